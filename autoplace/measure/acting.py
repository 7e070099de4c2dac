"""What a trainer's policy step is timed with: a network, noise, and the step itself on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from autoplace.device import now
from autoplace.device_names import CPU
from autoplace.engines import EAGER
from autoplace.ppo.distribution import draw_noise
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import make_policy_step, step_over
from autoplace.workload import NetworkSpec

SEED = 0
ROLLOUT_STEPS = 64  # rows that a timed policy step cycles through


def timed_network(
    spec: NetworkSpec, on: str, engine: str = EAGER, *, standardized: bool = True
) -> ActorCritic:
    """A network of made-up weights on a device."""
    flat = _weights(spec).to(on, copy=True)
    return ActorCritic(spec, normalize_observations=standardized, engine=engine, flat=flat)


@functools.lru_cache(maxsize=16)
def _weights(spec: NetworkSpec) -> torch.Tensor:
    """Drawn once for all tasks of a network: wide ones take longer to draw than to time."""
    return ActorCritic(spec, seed=SEED, normalize_observations=True).flat


def timed_noise(spec: NetworkSpec, steps: int, rows: int, on: str) -> torch.Tensor:
    """``[steps, rows, A]``."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (steps, rows, spec.action_size)
    noise = draw_noise(shape, continuous=spec.continuous, generator=generator)
    return noise.to(on)


def host_policy_step(
    spec: NetworkSpec, observations: np.ndarray, engine: str, *, standardized: bool
) -> Callable[[int], np.ndarray]:
    """The policy step as the trainer's sampler calls it: actions by the number of the call.

    Args:
        spec: of the network.
        observations: ``[N, D]``, what to act on at every call.
        engine: of the step.
        standardized: whether observations are standardised.
    """
    rows = len(observations)
    rollout = Rollout(spec, rollout_steps=ROLLOUT_STEPS, num_envs=rows)
    step = step_over(
        make_policy_step(timed_network(spec, CPU, engine, standardized=standardized)),
        torch.from_numpy(observations),
        timed_noise(spec, ROLLOUT_STEPS, rows, CPU),
        rollout,
    )
    actions: list[np.ndarray] = list(rollout.actions.numpy())

    def act(call: int) -> np.ndarray:
        t = call % ROLLOUT_STEPS
        step(t)
        return actions[t]

    return act


def seconds_of(act: Callable[[int], object], call: int) -> float:
    """One call, between two looks at the clock as in the trainer."""
    start_s = now()
    act(call)
    return now() - start_s


def seconds_per_call(act: Callable[[int], object], calls: int) -> float:
    """The mean of so many calls in a row."""
    return sum([seconds_of(act, call) for call in range(calls)]) / calls
