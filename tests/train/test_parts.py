"""A rollout that several samplers fill: whose rows are whose, and whose weights acted."""

import numpy as np
import pytest
import torch

from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.vector import Step
from autoplace.ppo.batch import make_batch
from autoplace.ppo.distribution import log_prob
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.rollout import Rollout
from autoplace.train.parts import Part, merge
from autoplace.workload import Hyperparameters, NetworkSpec

SPEC = NetworkSpec(observation_size=1, hidden_sizes=(4,), action_size=2)
GAUSSIAN = NetworkSpec(observation_size=1, hidden_sizes=(4,), action_size=2, continuous=True)


def part(finals, valid=None):
    """A part of 3 steps of 2 environments; a final observation is its (t, env) as t.env."""
    return Part(
        iteration=0,
        version=0,
        final_index=np.array([t * 2 + env for t, env, _ in finals], np.int64),
        final_observations=np.array([[x] for *_, x in finals], np.float32).reshape(-1, 1),
        valid_index=None if valid is None else np.array([t * 2 + env for t, env in valid]),
    )


def test_final_observations_of_all_parts_get_the_rows_of_the_whole_rollout():
    rollout = Rollout(SPEC, rollout_steps=3, num_envs=6)
    # Environments 0-1, 2-3 and 4-5; 2.5 is step 2 of environment 5.
    parts = [part([(0, 1, 0.1), (2, 0, 2.0)]), part([]), part([(0, 0, 0.4), (2, 1, 2.5)])]
    merge(parts, rollout)
    assert rollout.final_index.tolist() == [0 * 6 + 1, 0 * 6 + 4, 2 * 6 + 0, 2 * 6 + 5]
    assert rollout.final_observations[:, 0].tolist() == pytest.approx([0.1, 0.4, 2.0, 2.5])
    assert rollout.valid_index is None and rollout.num_transitions == 18


def test_rows_that_are_no_transitions_get_the_rows_of_the_whole_rollout():
    rollout = Rollout(SPEC, rollout_steps=3, num_envs=4)
    # Environment 3 (the second of the second part) spent step 1 on a reset.
    valid = [(t, env) for t in range(3) for env in range(2) if (t, env) != (1, 1)]
    merge([part([]), part([], valid)], rollout)
    assert rollout.valid_index.tolist() == [row for row in range(12) if row != 1 * 4 + 3]
    assert rollout.num_transitions == 11
    merge([part([]), part([])], rollout)
    assert rollout.valid_index is None


def test_a_part_is_columns_of_the_same_memory():
    whole = Rollout(SPEC, rollout_steps=3, num_envs=6)
    right = whole.columns(slice(4, 6))
    for t in range(3):
        right.observation_rows[t].copy_(torch.tensor([[t + 0.4], [t + 0.5]]))
        right.action_rows[t].copy_(torch.tensor([0, 1]))
        right.outcomes[t, 0] = torch.tensor([10.0 * t + 4, 10.0 * t + 5])
    assert whole.observations[2, 4:, 0].tolist() == pytest.approx([2.4, 2.5])
    assert whole.actions[1, 4:].tolist() == [0, 1]
    assert whole.rewards[2, 4:].tolist() == [24, 25]


def test_episodes_of_a_whole_rollout_are_those_of_its_steps():
    rng = np.random.default_rng(0)
    outcomes = np.zeros((50, 3, 4), np.float32)
    outcomes[:, 0] = rng.standard_normal((50, 4))
    outcomes[:, 1] = rng.random((50, 4)) < 0.1
    outcomes[:, 2] = (rng.random((50, 4)) < 0.1) & (outcomes[:, 1] == 0)
    valid = rng.random((50, 4)) < 0.9
    outcomes[:, 1:] *= valid[:, None]
    lost = ~valid & (rng.random((50, 4)) < 0.3)  # with the rest of their episodes
    outcomes[:, 2] += lost
    for some in (slice(None), slice(0, 1)):  # one environment alone is summed up the same way
        whole, is_row = outcomes[:, :, some], valid[:, some]
        for mask in (is_row, None):
            one, other = EpisodeTracker(whole.shape[2]), EpisodeTracker(whole.shape[2])
            for t, row in enumerate(whole):
                over, cut = row[1] > 0, row[2] > 0
                ended = np.flatnonzero(over | cut if mask is None else (over | cut) & mask[t])
                known = None if mask is None else mask[t]
                one.add(Step(None, row[0], over, cut, ended.tolist(), None, known))
            for part in (slice(0, 17), slice(17, 50)):  # episodes go on in the next rollout
                index = None if mask is None else np.flatnonzero(mask[part])
                other.add_rollout(whole[part], index)
            assert one.num_episodes == other.num_episodes > 5
            assert one.recent == other.recent and one.longest_running == other.longest_running
            assert one.take_ended(100) == other.take_ended(100) != ()


@pytest.mark.parametrize("spec", [SPEC, GAUSSIAN], ids=["categorical", "gaussian"])
def test_each_part_is_judged_by_the_weights_that_acted_in_it(spec):
    """Three parts of two environments each, by weights a, b and a again; c is to learn."""
    torch.manual_seed(0)
    a, b, learning = (
        ActorCritic(spec, seed=seed, normalize_observations=True) for seed in range(3)
    )
    for scale, network in enumerate((a, b, learning), 1):  # statistics and spreads differ too
        network.update_statistics(scale * torch.randn(50, 1))
        if network.log_std is not None:
            network.log_std.data.fill_(-0.1 * scale)
    rollout = Rollout(spec, rollout_steps=4, num_envs=6)
    rollout.observations.normal_()
    rollout.actions.copy_(torch.randn(rollout.actions.shape).clamp(0, 1).round())
    rollout.outcomes.zero_()
    rollout.rewards.normal_()
    ended = [(1, 0), (1, 2), (3, 5)]  # (step, environment), cut off
    for t, env in ended:
        rollout.truncated[t, env] = 1
    rollout.final_index = torch.tensor([t * 6 + env for t, env in ended])
    rollout.final_observations = torch.randn(3, 1)
    hyper = Hyperparameters(num_envs=6, rollout_steps=4, gamma=0.9, gae_lambda=0.8)
    batch = make_batch(learning, rollout, hyper, acted=(a, b, a))
    observations, actions, log_probs, advantage, returns = batch.split(batch.rows)

    for env, network in enumerate((a, a, b, b, a, a)):
        seen = rollout.observations[:, env]
        outputs, values = network(seen)
        expected = log_prob(
            outputs[:-1],
            network.log_std,
            actions.view(4, 6, -1)[:, env].squeeze(1)
            if not spec.continuous
            else actions.view(4, 6, -1)[:, env],
            (),
        )
        torch.testing.assert_close(log_probs.view(4, 6)[:, env], expected)
        torch.testing.assert_close(
            observations.view(4, 6)[:, env], learning.normalize(seen[:-1].clone()).squeeze(1)
        )
        # GAE by hand, backwards, bootstrapped from final observations as the same weights see them.
        trace = 0.0
        for t in reversed(range(4)):
            cut = (t, env) in ended
            led_to = values[t + 1]
            if cut:
                final = rollout.final_observations[ended.index((t, env))]
                led_to = network(final.unsqueeze(0))[1][0]
            error = rollout.rewards[t, env] + 0.9 * led_to - values[t]
            trace = error + (0.0 if cut else 0.9 * 0.8 * trace)
            torch.testing.assert_close(advantage.view(4, 6)[t, env], trace)
            torch.testing.assert_close(returns.view(4, 6)[t, env], trace + values[t])


def test_parts_by_the_same_weights_are_judged_as_one():
    torch.manual_seed(0)
    acted, learning = ActorCritic(SPEC, seed=0), ActorCritic(SPEC, seed=1)
    rollout = Rollout(SPEC, rollout_steps=4, num_envs=6)
    rollout.observations.normal_()
    rollout.actions.random_(0, 2)
    rollout.outcomes.zero_()
    hyper = Hyperparameters(num_envs=6, rollout_steps=4)
    one = make_batch(learning, rollout, hyper, acted=(acted,))
    many = make_batch(learning, rollout, hyper, acted=(acted, acted, acted))
    assert torch.equal(one.rows, many.rows)
    assert not torch.equal(one.rows, make_batch(learning, rollout, hyper).rows)
