import math

import pytest
import torch

from autoplace.ppo.loss import approximate_kl, clip_fraction, ppo_loss, standardize


def loss_of(ratios, advantages, *, values=(0.0,), returns=(0.0,), entropy=None, **coefs):
    coefs = {"clip_range": 0.2, "value_coef": 0.5, "entropy_coef": 0.0, **coefs}
    return ppo_loss(
        torch.tensor(ratios).log(),
        torch.zeros(len(ratios)),
        torch.tensor(advantages),
        torch.tensor(values),
        torch.tensor(returns),
        entropy,
        **coefs,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective"),
    [
        (1.0, 2.0, 2.0),  # unchanged policy
        (1.5, 2.0, 2.4),  # good action, already 20 % likelier: clipped at 1.2
        (0.5, 2.0, 1.0),  # good action made less likely: not clipped, so it can be mended
        (1.5, -2.0, -3.0),  # bad action made likelier: not clipped
        (0.5, -2.0, -1.6),  # bad action, already 20 % less likely: clipped at 0.8
    ],
)
def test_the_clipped_objective(ratio, advantage, objective):
    assert loss_of([ratio], [advantage]).policy.item() == pytest.approx(-objective)


def test_no_gradient_flows_through_a_clipped_sample():
    log_probs = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    loss = ppo_loss(
        log_probs,
        torch.zeros(2),
        torch.tensor([2.0, 2.0]),
        torch.zeros(2),
        torch.zeros(2),
        None,
        clip_range=0.2,
        value_coef=0.5,
        entropy_coef=0.0,
    )
    loss.total.backward()
    # d/dlog p of -mean(rho A) is -rho A / 2 where it is not clipped: -1.1 * 2 / 2
    assert log_probs.grad.tolist() == pytest.approx([0.0, -1.1])


def test_the_total_adds_value_loss_and_subtracts_entropy():
    # policy: -(1 * 1) = -1; value: ((3 - 1)^2 + 0) / 2 = 2; entropy 0.7
    # total: -1 + 0.5 * 2 - 0.1 * 0.7 = -0.07
    loss = loss_of(
        [1.0, 1.0],
        [1.0, 1.0],
        values=[3.0, 1.0],
        returns=[1.0, 1.0],
        entropy=torch.tensor(0.7),
        entropy_coef=0.1,
    )
    assert loss.value.item() == pytest.approx(2.0)
    assert loss.total.item() == pytest.approx(-0.07)


def test_standardised_advantages_use_the_unbiased_spread():
    # mean 2, deviations -1, 0, 1, unbiased std 1
    assert standardize(torch.tensor([1.0, 2.0, 3.0])).tolist() == pytest.approx([-1, 0, 1])


def test_equal_advantages_standardise_to_zero():
    assert standardize(torch.full((4,), 3.0)).tolist() == [0, 0, 0, 0]


def test_kl_estimate_and_clip_fraction_of_known_ratios():
    ratio = torch.tensor([1.0, 2.0, 0.9, 0.7])
    # (0 - 0) + (1 - log 2) + (-0.1 - log 0.9) + (-0.3 - log 0.7), over 4
    expected = ((1 - math.log(2)) + (-0.1 - math.log(0.9)) + (-0.3 - math.log(0.7))) / 4
    assert approximate_kl(ratio, ratio.log()).item() == pytest.approx(expected, rel=1e-5)
    assert clip_fraction(ratio, 0.2).item() == pytest.approx(0.5)  # 2.0 and 0.7


@pytest.mark.parametrize(
    ("value", "loss"),
    [
        (1.1, 0.81),  # moved by 0.1: not clipped, (1.1 - 2)^2
        (1.5, 0.64),  # moved by 0.5 towards the return: as if it had moved by 0.2, (1.2 - 2)^2
        (0.5, 2.25),  # moved away from the return: not clipped, so it can be mended
        (3.5, 2.25),  # moved past the return: (3.5 - 2)^2 is worse than (1.2 - 2)^2
    ],
)
def test_the_clipped_value_loss_worked_by_hand(value, loss):
    # The value that acted is 1, the return 2, the clip 0.2.
    got = ppo_loss(
        torch.zeros(1),
        torch.zeros(1),
        torch.ones(1),
        torch.tensor([value]),
        torch.tensor([2.0]),
        None,
        torch.tensor([1.0]),
        clip_range=0.2,
        value_coef=0.5,
        entropy_coef=0.0,
        value_clip=0.2,
    )
    assert got.value.item() == pytest.approx(loss)
