"""The clipped PPO objective and its gradient in closed form, as numpy operations.

The objective is that of :mod:`autoplace.ppo.loss`; every array holds a row per number and a column
per sample, ``[K, B]`` or ``[B]``.

| symbol | meaning |
|---|---|
| ``B`` | samples of the minibatch |
| ``r`` | probability ratio of an action, new policy over old |
| ``A`` | advantage |
| ``p``, ``a`` | probabilities of a choice, and the one that was taken |
| ``H``, ``c_e`` | entropy, and its weight in the loss |
| ``m``, ``s``, ``z`` | mean and standard deviation of a Gaussian policy, ``z = (a - m) / s`` |
| ``V``, ``R``, ``c_v`` | value, return, weight of the value loss |

The surrogate ``-mean(min(r A, clip(r) A))`` has by a log-probability the gradient ``g = -r A / B``
where ``r A <= clip(r) A`` and 0 elsewhere. From there:

- by a logit: ``g (1[k = a] - p_k)``, and the entropy's ``c_e p_k (log p_k + H) / B``;
- by a mean: ``g z / s``; by a log standard deviation: ``sum of g (z^2 - 1)``, and ``-c_e``;
- by a value: ``2 c_v (V - R) / B``; with value clipping, where the clipped term is the larger one,
  that of the clipped value inside its range and 0 outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoplace.ppo.numpy_perceptron import Array

_STD_FLOOR = 1e-8
_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


class Surrogate(NamedTuple):
    """The policy's part of the loss.

    Attributes:
        terms: ``min(r A, clip(r) A)`` of each sample.
        ratio: ``r``.
        log_ratio: its logarithm.
        slope: ``g``, by the log-probability of each sample.
    """

    terms: Array
    ratio: Array
    log_ratio: Array
    slope: Array


class PolicyLoss(NamedTuple):
    """What a policy's outputs gave, and the gradient by them.

    Attributes:
        surrogate: of each sample.
        entropy: mean over the samples, nats.
        by_outputs: ``[K, B]``, by logits or means.
        by_log_std: ``[K]`` by the log standard deviations of a Gaussian policy, else ``None``.
    """

    surrogate: Surrogate
    entropy: float
    by_outputs: Array
    by_log_std: Array | None = None


def standardize(advantages: Array) -> Array:
    """Advantages ``[B]`` with mean 0 and (unbiased) standard deviation 1; B is at least 2."""
    count = len(advantages)
    centred: Array = advantages - np.add.reduce(advantages) / count
    std = math.sqrt(np.dot(centred, centred) / (count - 1))
    centred /= std + _STD_FLOOR
    return centred


def _surrogate(
    log_probs: Array, old_log_probs: Array, advantages: Array, clip_range: float
) -> Surrogate:
    log_ratio = log_probs - old_log_probs
    ratio = np.exp(log_ratio)
    free = ratio * advantages
    clipped = np.minimum(np.maximum(ratio, 1.0 - clip_range), 1.0 + clip_range)
    clipped *= advantages
    slope = free * (free <= clipped)
    slope *= -1.0 / len(free)
    return Surrogate(np.minimum(free, clipped), ratio, log_ratio, slope)


def categorical(
    logits: Array,
    actions: Array,
    old_log_probs: Array,
    advantages: Array,
    *,
    heads: Sequence[slice],
    clip_range: float,
    entropy_coef: float,
    needs_entropy: bool,
) -> PolicyLoss:
    """The loss of independent choices; ``logits`` are used up.

    Args:
        logits: ``[K, B]``, those of all heads.
        actions: ``[heads, B]``, whole numbers.
        old_log_probs: ``[B]``, of the policy that acted.
        advantages: ``[B]``.
        heads: the rows of ``logits`` that each head has.
        clip_range: how far a ratio may leave 1.
        entropy_coef: weight of the entropy.
        needs_entropy: whether the entropy is computed where it has no weight.
    """
    # The places of the chosen logits among all of them, ``[heads, B]``.
    chosen = actions.astype(np.intp)
    if len(heads) > 1:
        chosen += np.array([[head.start] for head in heads])
    chosen *= logits.shape[1]
    chosen += np.arange(logits.shape[1])
    for head in heads:
        log_p = logits[head]
        log_p -= np.maximum.reduce(log_p, 0)
        log_p -= np.log(np.add.reduce(np.exp(log_p), 0))
    of_heads = logits.reshape(-1)[chosen]
    chosen_log_probs = of_heads[0]
    for more in of_heads[1:]:
        chosen_log_probs += more
    surrogate = _surrogate(chosen_log_probs, old_log_probs, advantages, clip_range)
    by_logits = np.exp(logits, order="C")
    entropy = 0.0
    if entropy_coef or needs_entropy:
        for head in heads:
            p, log_p = by_logits[head], logits[head]
            entropies = -np.add.reduce(p * log_p, 0)
            entropy += float(np.add.reduce(entropies)) / len(entropies)
            log_p += entropies
            log_p *= p
            log_p *= entropy_coef / len(entropies)
    by_logits *= -surrogate.slope
    by_logits.reshape(-1)[chosen] += surrogate.slope
    if entropy_coef:
        by_logits += logits
    return PolicyLoss(surrogate, entropy, by_logits)


def gaussian(
    means: Array,
    log_std: Array,
    actions: Array,
    old_log_probs: Array,
    advantages: Array,
    *,
    clip_range: float,
    entropy_coef: float,
) -> PolicyLoss:
    """The loss of a diagonal Gaussian policy.

    Args:
        means: ``[K, B]``; used up.
        log_std: ``[K]``.
        actions: ``[K, B]``, as sampled.
        old_log_probs: ``[B]``, of the policy that acted.
        advantages: ``[B]``.
        clip_range: how far a ratio may leave 1.
        entropy_coef: weight of the entropy.
    """
    log_scale = float(np.add.reduce(log_std)) + len(log_std) * _HALF_LOG_2_PI
    inverse_std = np.exp(-log_std)[:, None]
    z = np.subtract(actions, means, out=means)
    z *= inverse_std
    squares = z * z
    log_probs = np.add.reduce(squares, 0)
    log_probs *= -0.5
    log_probs -= log_scale
    surrogate = _surrogate(log_probs, old_log_probs, advantages, clip_range)
    squares -= 1.0
    by_log_std = np.dot(squares, surrogate.slope)
    if entropy_coef:
        by_log_std -= entropy_coef
    z *= surrogate.slope
    z *= inverse_std
    return PolicyLoss(surrogate, log_scale + 0.5 * len(log_std), z, by_log_std)


def value_loss(
    values: Array, returns: Array, old_values: Array, value_clip: float | None
) -> tuple[Array, Array]:
    """Squared error ``[B]`` of each value, and its derivative by the value.

    Args:
        values: ``[B]``.
        returns: ``[B]``.
        old_values: ``[B]``, under the weights that acted.
        value_clip: how far a value may move from the old one, ``None`` for no limit.
    """
    errors = values - returns
    squares = errors * errors
    if value_clip is None:
        return squares, 2.0 * errors
    moved = values - old_values
    near_errors = np.minimum(np.maximum(moved, -value_clip), value_clip) + old_values - returns
    near_squares = near_errors * near_errors
    is_near = near_squares > squares
    inside = np.abs(moved) <= value_clip
    return (
        np.maximum(squares, near_squares),
        np.where(is_near, 2.0 * near_errors * inside, 2.0 * errors),
    )
