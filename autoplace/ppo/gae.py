"""Generalised advantage estimation as a parallel scan.

| symbol | meaning |
|---|---|
| ``r_t`` | reward of step t |
| ``V_t`` | value of the observation before step t |
| ``V'_t`` | value of what step t led to: 0 where the episode terminated, the value of the final observation where it was truncated, ``V_{t+1}`` elsewhere |
| ``e_t`` | 1 where the episode ended (either way) at step t |
| ``d_t`` | ``r_t + gamma V'_t - V_t`` |
| ``c_t`` | ``gamma lambda (1 - e_t)`` |
| ``A_t`` | ``d_t + c_t A_{t+1}``, with ``A_T = 0`` (Schulman et al. 2016, eq. 16) |

A truncated episode is thus bootstrapped *and* its trace is cut: nothing leaks into the next one.
"""  # noqa: E501 - a table row

from __future__ import annotations

import torch
from torch import Tensor

from autoplace.ppo.numpy_perceptron import Array


def scan_backward(addends: Tensor, factors: Tensor) -> Tensor:
    """Solve ``x_t = addends_t + factors_t x_{t+1}`` with ``x_T = 0`` along the first axis.

    By doubling (Hillis and Steele 1986): after round k each ``x_t`` holds the sum over the next
    ``2^k`` steps and each factor the product over them. ``log2 T`` rounds of three operations
    replace ``T`` steps, which matters wherever an operation costs more than its arithmetic.
    """
    if addends.device.type == "cpu":  # numpy's calls cost less
        return torch.from_numpy(_scan_array(addends.numpy(), factors.numpy()))
    return _scan_tensor(addends, factors)


def _scan_tensor(addends: Tensor, factors: Tensor) -> Tensor:
    steps, reach = addends.shape[0], 1
    x, product = addends, factors[: max(0, steps - 1)]
    while reach < steps:
        head = torch.addcmul(x[:-reach], product, x[reach:])
        x = torch.cat((head, x[-reach:]))
        # Only rows that the next round still extends need their product.
        remaining = max(0, steps - 2 * reach)
        product = product[:remaining] * product[reach : reach + remaining]
        reach *= 2
    return x


def _scan_array(addends: Array, factors: Array) -> Array:
    steps, reach = len(addends), 1
    x: Array = addends.copy()
    product = factors[: max(0, steps - 1)]
    while reach < steps:
        x[:-reach] += product * x[reach:]
        remaining = max(0, steps - 2 * reach)
        product = product[:remaining] * product[reach : reach + remaining]
        reach *= 2
    return x


def bootstrap_values(
    values: Tensor, terminated: Tensor, final_index: Tensor, final_values: Tensor
) -> Tensor:
    """``V'``, the value of what each step led to.

    Args:
        values: ``[T + 1, N]`` of the observations before each step and after the last.
        terminated: ``[T, N]``, 1 where the episode terminated.
        final_index: ``[F]``, ``t N + env`` of each truncated episode.
        final_values: ``[F]``, the value of its final observation.

    Returns:
        ``[T, N]``.
    """
    led_to = values[1:] * (1.0 - terminated)
    if final_index.shape[0]:
        led_to.view(-1).index_copy_(0, final_index, final_values)
    return led_to


def advantages(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    ended: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    transitions: Tensor | None = None,
) -> Tensor:
    """Advantages ``[T, N]``; add the values for the returns that the critic learns.

    Args:
        rewards: ``r``, ``[T, N]``.
        values: ``V``, ``[T, N]``.
        next_values: ``V'``, ``[T, N]``, see :func:`bootstrap_values`.
        ended: ``e``, ``[T, N]``.
        gamma: discount per step.
        gae_lambda: decay of the trace.
        transitions: ``[T, N]``, 0 in rows that are none; their ``d`` is 0, so that the row before
            is bootstrapped from the observation that it led to, and ends there.
    """
    errors = torch.add(rewards, next_values, alpha=gamma).sub_(values)
    if transitions is not None:
        errors *= transitions
    return scan_backward(errors, (1.0 - ended).mul_(gamma * gae_lambda))
