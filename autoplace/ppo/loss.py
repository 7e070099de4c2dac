"""The clipped PPO objective.

| symbol | meaning |
|---|---|
| ``rho`` | ``exp(log pi(a|s) - log pi_old(a|s))``, the probability ratio |
| ``A`` | advantage, standardised over the minibatch where that is asked for |
| ``eps`` | clip range |
| ``R``, ``V`` | return (advantage + old value) and value |
| ``V_old``, ``c`` | value under the weights that acted, and how far ``V`` may move from it |
| ``H`` | entropy of the policy, nats |

    L_policy = -mean(min(rho A, clip(rho, 1 - eps, 1 + eps) A))      (Schulman et al. 2017, eq. 7)
    L_value  =  mean((V - R)^2)                                      (eq. 9, without the half)
             or  mean(max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)) with value clipping
    L        =  L_policy + c_v L_value - c_e mean(H)

How far the policy moved is estimated by ``mean((rho - 1) - log rho)``, which is never negative
and has less variance than ``mean(-log rho)`` (Schulman 2020, "Approximating KL divergence", k3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_STD_FLOOR = 1e-8


class PPOLoss(NamedTuple):
    """The loss to minimise and the tensors that statistics are derived from."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor | None
    ratio: Tensor
    log_ratio: Tensor


def standardize(advantages: Tensor) -> Tensor:
    """Advantages ``[B]`` with mean 0 and (unbiased) standard deviation 1; B is at least 2."""
    std, mean = torch.std_mean(advantages)
    return (advantages - mean).div_(std.add_(_STD_FLOOR))


def ppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    values: Tensor,
    returns: Tensor,
    entropy: Tensor | None,
    old_values: Tensor | None = None,
    *,
    clip_range: float,
    value_coef: float,
    entropy_coef: float,
    value_clip: float | None = None,
) -> PPOLoss:
    """The loss of one minibatch; every tensor but ``entropy`` (one number) is ``[B]``.

    ``old_values`` are needed where ``value_clip`` is given.
    """
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    policy = -torch.min(ratio * advantages, clipped * advantages).mean()
    if value_clip is None:
        value = F.mse_loss(values, returns)
    else:
        assert old_values is not None
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        value = torch.max((values - returns).square(), (near - returns).square()).mean()
    total = torch.add(policy, value, alpha=value_coef)
    if entropy is not None and entropy_coef:
        total = torch.sub(total, entropy, alpha=entropy_coef)
    return PPOLoss(total, policy, value, entropy, ratio, log_ratio)


def approximate_kl(ratio: Tensor, log_ratio: Tensor) -> Tensor:
    """Estimate of KL(old policy, new policy) from samples of the old one: k3 of Schulman 2020."""
    return (ratio - 1.0 - log_ratio).mean()


def clip_fraction(ratio: Tensor, clip_range: float) -> Tensor:
    """Share of samples whose ratio left the clip range."""
    return ((ratio - 1.0).abs() > clip_range).float().mean()
