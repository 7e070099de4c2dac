import pytest
import torch

from autoplace.ppo.gae import (
    _scan_array,
    _scan_tensor,
    advantages,
    bootstrap_values,
    scan_backward,
)


def recursion(rewards, values, next_values, ended, gamma, gae_lambda):
    """The textbook loop, one step and one environment at a time."""
    steps, num_envs = rewards.shape
    result = torch.zeros(steps, num_envs, dtype=torch.float64)
    for env in range(num_envs):
        following = 0.0
        for t in reversed(range(steps)):
            error = rewards[t, env] + gamma * next_values[t, env] - values[t, env]
            following = error + gamma * gae_lambda * (1 - ended[t, env]) * following
            result[t, env] = following
    return result


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(1)


def test_three_steps_worked_by_hand():
    # gamma 0.9, lambda 0.5, so gamma lambda = 0.45.
    # d_2 = 3 + 0.9 * 0.7 - 0.6 = 3.03           A_2 = 3.03
    # d_1 = 2 + 0.9 * 0.6 - 0.4 = 2.14           A_1 = 2.14 + 0.45 * 3.03  = 3.5035
    # d_0 = 1 + 0.9 * 0.4 - 0.5 = 0.86           A_0 = 0.86 + 0.45 * 3.5035 = 2.436575
    got = advantages(
        column(1, 2, 3),
        column(0.5, 0.4, 0.6),
        column(0.4, 0.6, 0.7),
        column(0, 0, 0),
        gamma=0.9,
        gae_lambda=0.5,
    )
    assert got.squeeze(1).tolist() == pytest.approx([2.436575, 3.5035, 3.03])


def test_a_terminal_state_is_worth_nothing_and_cuts_the_trace():
    # Step 1 terminates: d_1 = 2 + 0 - 0.4 = 1.6 and A_1 = 1.6, whatever follows.
    # d_2 = 3 + 0.9 * 0.7 - 0.6 = 3.03; A_0 = (1 + 0.9 * 0.4 - 0.5) + 0.45 * 1.6 = 1.58
    values = column(0.5, 0.4, 0.6, 0.7)
    terminated = column(0, 1, 0)
    next_values = bootstrap_values(
        values, terminated, torch.empty(0, dtype=torch.int64), torch.empty(0)
    )
    assert next_values.squeeze(1).tolist() == pytest.approx([0.4, 0.0, 0.7])
    got = advantages(
        column(1, 2, 3), values[:-1], next_values, terminated, gamma=0.9, gae_lambda=0.5
    )
    assert got.squeeze(1).tolist() == pytest.approx([1.58, 1.6, 3.03])


def test_a_truncated_episode_is_bootstrapped_from_its_final_observation_and_cuts_the_trace():
    # Step 1 is truncated in an observation worth 5; the next episode begins with value 0.6.
    # d_1 = 2 + 0.9 * 5 - 0.4 = 6.1 = A_1; A_0 = 0.86 + 0.45 * 6.1 = 3.605
    values = column(0.5, 0.4, 0.6, 0.7)
    nothing = column(0, 0, 0)
    next_values = bootstrap_values(values, nothing, torch.tensor([1]), torch.tensor([5.0]))
    assert next_values.squeeze(1).tolist() == pytest.approx([0.4, 5.0, 0.7])
    got = advantages(
        column(1, 2, 3), values[:-1], next_values, column(0, 1, 0), gamma=0.9, gae_lambda=0.5
    )
    assert got.squeeze(1).tolist() == pytest.approx([3.605, 6.1, 3.03])


def test_final_values_go_to_the_environment_they_belong_to():
    values = torch.arange(9, dtype=torch.float32).view(3, 3)  # T = 2, N = 3
    got = bootstrap_values(
        values, torch.zeros(2, 3), torch.tensor([1 * 3 + 2, 0 * 3 + 1]), torch.tensor([50.0, 60.0])
    )
    assert got.tolist() == [[3, 60, 5], [6, 7, 50]]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7, 8, 16, 31, 100, 128])
def test_the_parallel_scan_agrees_with_the_recursion(steps):
    generator = torch.Generator().manual_seed(steps)
    rewards, values, next_values = torch.randn(3, steps, 5, generator=generator)
    ended = (torch.rand(steps, 5, generator=generator) < 0.15).float()
    got = advantages(rewards, values, next_values, ended, gamma=0.99, gae_lambda=0.95)
    expected = recursion(rewards, values, next_values, ended, 0.99, 0.95)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_scan_without_decay_sums_what_follows():
    got = scan_backward(torch.ones(6, 1), torch.ones(6, 1))
    assert got.squeeze(1).tolist() == [6, 5, 4, 3, 2, 1]


def test_a_scan_leaves_its_input_alone():
    addends = torch.ones(4, 2)
    factors = torch.full((4, 2), 0.5)
    scan_backward(addends, factors)
    assert addends.eq(1).all() and factors.eq(0.5).all()


@pytest.mark.parametrize("steps", [1, 2, 7, 64])
def test_a_scan_is_the_same_by_tensors_and_by_arrays(steps):
    addends, factors = torch.rand(2, steps, 3, generator=torch.Generator().manual_seed(steps))
    by_arrays = torch.from_numpy(_scan_array(addends.numpy(), factors.numpy()))
    torch.testing.assert_close(_scan_tensor(addends, factors), by_arrays)
