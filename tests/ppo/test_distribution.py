import math

import pytest
import torch
from torch import distributions

from autoplace.ppo.distribution import (
    categorical_entropy,
    categorical_log_prob,
    draw_noise,
    entropy,
    gaussian_entropy,
    gaussian_log_prob,
    log_prob,
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
