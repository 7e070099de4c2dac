import math

import pytest
import torch
from torch import distributions

from autoplace.ppo.distribution import (
    by_head,
    categorical_entropy,
    categorical_log_prob,
    draw_noise,
    entropy,
    gaussian_entropy,
    gaussian_log_prob,
    log_prob,
    most_probable,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_categorical_log_probabilities_of_known_odds():
    # exp(logits) = 1, 2, 5, so the probabilities are 1/8, 2/8 and 5/8.
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]]).repeat(3, 1)
    got = categorical_log_prob(logits, torch.tensor([0, 1, 2]))
    assert got.tolist() == pytest.approx([math.log(1 / 8), math.log(2 / 8), math.log(5 / 8)])


def test_categorical_entropy_of_a_fair_and_a_loaded_coin():
    logits = torch.tensor([[1.0, 1.0], [0.0, math.log(3)]])
    loaded = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert categorical_entropy(logits).tolist() == pytest.approx([math.log(2), loaded])


def test_gaussian_log_probability_worked_by_hand():
    # z = ((1 - 0) / 1, (3 - 1) / 2) = (1, 1): -(1 + 1) / 2 - log 1 - log 2 - log(2 pi)
    got = gaussian_log_prob(
        torch.tensor([[0.0, 1.0]]), torch.tensor([0.0, math.log(2)]), torch.tensor([[1.0, 3.0]])
    )
    assert got.item() == pytest.approx(-1 - math.log(2) - math.log(2 * math.pi))


def test_gaussian_entropy_worked_by_hand():
    # log 1 + log 2 + 2 (1 + log 2 pi) / 2
    got = gaussian_entropy(torch.tensor([0.0, math.log(2)]))
    assert got.item() == pytest.approx(math.log(2) + 1 + math.log(2 * math.pi))


def test_both_agree_with_torch_distributions():
    logits = torch.randn(50, 4, generator=generator())
    actions = torch.randint(4, (50,), generator=generator())
    reference = distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_prob(logits, None, actions), reference.log_prob(actions))
    torch.testing.assert_close(entropy(logits, None), reference.entropy().mean())

    log_std = torch.tensor([-0.5, 0.0, 1.0])
    actions = torch.randn(50, 3, generator=generator(1))
    normal = distributions.Independent(distributions.Normal(logits[:, :3], log_std.exp()), 1)
    torch.testing.assert_close(log_prob(logits[:, :3], log_std, actions), normal.log_prob(actions))
    torch.testing.assert_close(entropy(logits[:, :3], log_std), normal.entropy().mean())


def test_gumbel_noise_samples_the_softmax():
    logits = torch.tensor([0.0, math.log(2), math.log(5)])
    noise = draw_noise((100_000, 3), continuous=False, generator=generator())
    counts = torch.bincount((logits + noise).argmax(-1), minlength=3) / 100_000
    # Standard error sqrt(p (1 - p) / n) is at most 0.0016.
    assert counts.tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.006)


def test_noise_repeats_with_its_seed_and_is_finite():
    for continuous in (False, True):
        first = draw_noise((64, 8, 3), continuous=continuous, generator=generator(7))
        again = draw_noise((64, 8, 3), continuous=continuous, generator=generator(7))
        assert torch.equal(first, again)
        assert first.isfinite().all()


def test_log_probabilities_of_several_heads_add_up_worked_by_hand():
    # Heads of 2 and 3 choices with odds 1 : 3 and 1 : 2 : 5.
    logits = torch.tensor([[0.0, math.log(3), 0.0, math.log(2), math.log(5)]]).repeat(2, 1)
    got = log_prob(logits, None, torch.tensor([[0, 2], [1, 1]]), (2, 3))
    assert got.tolist() == pytest.approx(
        [math.log(1 / 4) + math.log(5 / 8), math.log(3 / 4) + math.log(2 / 8)]
    )


def test_the_entropy_of_several_heads_is_the_sum_worked_by_hand():
    # A fair coin and a die of three fair sides.
    assert entropy(torch.zeros(4, 5), None, (2, 3)).item() == pytest.approx(
        math.log(2) + math.log(3)
    )


@pytest.mark.parametrize("heads", [(3, 3), (2, 4, 1), (1, 1), (5, 2), (2, 2, 2, 2)])
def test_several_heads_agree_with_torch_distributions(heads):
    logits = torch.randn(40, sum(heads), generator=generator(), requires_grad=True)
    parts = [distributions.Categorical(logits=part) for part in logits.split(heads, -1)]
    actions = torch.stack([part.sample() for part in parts], -1)
    expected = sum(part.log_prob(actions[:, i]) for i, part in enumerate(parts))
    got = log_prob(logits, None, actions, heads)
    torch.testing.assert_close(got, expected)
    mean_entropy = entropy(logits, None, heads)
    torch.testing.assert_close(mean_entropy, sum(part.entropy() for part in parts).mean())
    (gradient,) = torch.autograd.grad(got.sum() + mean_entropy, logits)
    assert gradient.isfinite().all()  # of choices that a head does not have, too


def test_heads_of_two_are_bernoulli_variables():
    logits = torch.randn(40, 6, generator=generator())
    coins = distributions.Bernoulli(logits=logits[:, 1::2] - logits[:, ::2])
    actions = torch.randint(2, (40, 3), generator=generator())
    expected = coins.log_prob(actions.float()).sum(-1)
    torch.testing.assert_close(log_prob(logits, None, actions, (2, 2, 2)), expected)
    torch.testing.assert_close(
        entropy(logits, None, (2, 2, 2)), coins.entropy().sum(-1).mean(), atol=1e-5, rtol=1e-5
    )


def test_gumbel_noise_samples_every_head_and_never_a_choice_that_is_not_there():
    heads = (2, 4, 3)
    logits = torch.zeros(20_000, 9)
    logits[:, 1] = math.log(3)
    noise = draw_noise((20_000, 9), continuous=False, generator=generator())
    actions = most_probable(logits + noise, heads)
    assert actions.shape == (20_000, 3) and actions.dtype == torch.int64
    assert [int(column.max()) + 1 for column in actions.T] == list(heads)
    assert (actions[:, 0] == 1).float().mean().item() == pytest.approx(0.75, abs=0.02)
    assert torch.bincount(actions[:, 2]).div(20_000).tolist() == pytest.approx(
        [1 / 3] * 3, abs=0.02
    )


def test_logits_by_head_keep_their_places():
    got = by_head(torch.arange(5.0).unsqueeze(0), (2, 3))[0]
    assert got[0, :2].tolist() == [0, 1] and got[1].tolist() == [2, 3, 4] and got[0, 2] < -1e8
