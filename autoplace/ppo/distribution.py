"""Categorical and diagonal Gaussian policies as plain functions; noise is an input.

An action of several independent choices ("heads", as of a MultiDiscrete space; a coin is a choice
between two) has the logits of all of them side by side: log-probabilities and entropies add up.

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

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

_LOG_2_PI = math.log(2 * math.pi)
# Logit of a choice that a head does not have: its probability is exactly 0, its entropy not NaN.
_ABSENT = -1e9


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


def by_head(logits: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Logits ``[B, sum of heads]`` as ``[B, H, K]``, K being the largest head's choices."""
    largest = max(heads)
    if min(heads) == largest:
        return logits.view(-1, len(heads), largest)
    index = _padded_index(heads, str(logits.device))
    padded = F.pad(logits, (0, 1), value=_ABSENT)
    return padded.index_select(-1, index).view(-1, len(heads), largest)


@functools.lru_cache(maxsize=64)
def _padded_index(heads: tuple[int, ...], device: str) -> Tensor:
    """Columns of the logits head by head, the one past the last where a head has no more."""
    largest, end = max(heads), sum(heads)
    columns, start = [], 0
    for head in heads:
        columns += [*range(start, start + head), *([end] * (largest - head))]
        start += head
    with torch.inference_mode(False):  # it outlives this call and is used where gradients are
        return torch.tensor(columns, device=device)


def most_probable(logits: Tensor, heads: tuple[int, ...] = ()) -> Tensor:
    """The largest logit: ``[B]`` int64, or of each head ``[B, H]``."""
    return (by_head(logits, heads) if heads else logits).argmax(-1)


def log_prob(
    outputs: Tensor, log_std: Tensor | None, actions: Tensor, heads: tuple[int, ...] = ()
) -> Tensor:
    """Log-probabilities ``[B]`` under a network's policy outputs ``[B, A]``.

    Args:
        outputs: logits or means.
        log_std: ``[A]`` of a Gaussian policy, else ``None``.
        actions: ``[B, A]`` float32 of a Gaussian policy, else int64: ``[B]``, or ``[B, H]`` where
            there are heads.
        heads: choices of each head; ``()`` where an action is a single choice.
    """
    if log_std is not None:
        return gaussian_log_prob(outputs, log_std, actions)
    if heads:
        return categorical_log_prob(by_head(outputs, heads), actions).sum(-1)
    return categorical_log_prob(outputs, actions)


def entropy(outputs: Tensor, log_std: Tensor | None, heads: tuple[int, ...] = ()) -> Tensor:
    """Mean entropy (one number) of a network's policy outputs ``[B, A]``."""
    if log_std is not None:
        return gaussian_entropy(log_std)
    if heads:
        return categorical_entropy(by_head(outputs, heads)).sum(-1).mean()
    return categorical_entropy(outputs).mean()
