"""Categorical and diagonal Gaussian policies as plain functions; noise is an input.

Symbols: ``l`` logits, ``a`` action, ``m`` mean, ``s`` standard deviation, ``z`` noise, ``A`` the
number of actions or action dimensions.

| | categorical | Gaussian |
|---|---|---|
| sample | ``argmax_k (l_k + z_k)``, z Gumbel | ``m + s z``, z standard normal |
| log-prob | ``l_a - log sum_k exp l_k`` | ``-sum_k (z_k^2 / 2 + log s_k) - A log(2 pi) / 2`` |
| entropy | ``-sum_k p_k log p_k`` | ``sum_k log s_k + A (1 + log 2 pi) / 2`` |

Taking the noise as an input lets all randomness be drawn on the host, once per rollout, so that
every device computes the same actions and none launches a random kernel per step. The Gumbel
maximum is a sample of the softmax (Gumbel 1954).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOG_2_PI = math.log(2 * math.pi)


def draw_noise(shape: tuple[int, ...], *, continuous: bool, generator: torch.Generator) -> Tensor:
    """Host noise for sampling: standard normal for a Gaussian policy, else standard Gumbel."""
    if continuous:
        return torch.randn(shape, generator=generator)
    # A Gumbel variable is minus the logarithm of an exponential one.
    return torch.empty(shape).exponential_(generator=generator).log_().neg_()


def categorical_log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities ``[B]`` of int64 actions ``[B]`` under logits ``[B, A]``."""
    return logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Entropies ``[B]`` of logits ``[B, A]``, in nats."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def gaussian_log_prob(means: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities ``[B]`` of actions ``[B, A]`` under means ``[B, A]``, log_std ``[A]``."""
    z = (actions - means) * torch.exp(-log_std)
    constant = log_std.sum() + 0.5 * _LOG_2_PI * actions.shape[-1]
    return -0.5 * z.square().sum(-1) - constant


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Entropy (one number, in nats) of a diagonal Gaussian."""
    return log_std.sum() + 0.5 * (1.0 + _LOG_2_PI) * log_std.shape[-1]


def log_prob(outputs: Tensor, log_std: Tensor | None, actions: Tensor) -> Tensor:
    """Log-probabilities ``[B]`` under a network's policy outputs ``[B, A]``."""
    if log_std is None:
        return categorical_log_prob(outputs, actions)
    return gaussian_log_prob(outputs, log_std, actions)


def entropy(outputs: Tensor, log_std: Tensor | None) -> Tensor:
    """Mean entropy (one number) of a network's policy outputs ``[B, A]``."""
    if log_std is None:
        return categorical_entropy(outputs).mean()
    return gaussian_entropy(log_std)
