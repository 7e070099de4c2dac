"""The values that each free part of a placement may take, and what a user's values do to them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autoplace.device_names import CPU, canonical_device
from autoplace.engines import FP32, PRECISIONS, precision_problem
from autoplace.errors import UsageError
from autoplace.planner.placements import Placements
from autoplace.planner.schemes import Axes

# Rows of a minibatch that the planner may choose, each with its measured relative sample
# efficiency: mean env steps until sampled episodes of CartPole-v1 returned 450, over 10 seeds with
# the default hyperparameters (10.8k, 10.2k, 13.6k and 24.9k steps; the first two are within noise).
MINIBATCH_EFFICIENCY: dict[int, float] = {64: 1.0, 128: 1.0, 256: 0.75, 512: 0.41}
# Backends that run another implementation of an environment: planned where they are named only.
OWN_DYNAMICS = frozenset({"envpool"})
# Relative sample efficiency under a policy lag of one iteration: env steps until CartPole-v1
# returned 400, over 8 seeds with the default hyperparameters (46.5k steps against 48.6k, a ratio
# of 0.955 +- 0.013; tests/benchmarks/lag_efficiency.py). More is taken to compound, unmeasured.
LAG_EFFICIENCY = 0.96
# Chunk lengths that are considered.
_MAX_INTERVALS = 8


def calibrated_device(name: str, devices: Sequence[str]) -> str:
    """The canonical name of a device that a calibration knows (the CPU first in ``devices``)."""
    device = canonical_device(name, devices[1:])
    if device not in devices:
        raise UsageError(
            f"--device is one that was calibrated ({', '.join(devices)}), got {name}: "
            "name one of them, or run `autoplace calibrate` again"
        )
    return device


def minibatch_choices(rollout_rows: int, given: int | None) -> tuple[int, ...]:
    """Minibatch sizes to consider: the user's, or the declared ones that divide the rollout.

    Where none of the declared sizes divides the rollout, the divisor nearest to one of them; a
    rollout that is smaller than all of them is one minibatch.
    """
    if given is not None:
        return (given,)
    declared = [rows for rows in MINIBATCH_EFFICIENCY if rollout_rows % rows == 0]
    if declared:
        return tuple(declared)
    divisors = [rows for rows in range(2, rollout_rows + 1) if rollout_rows % rows == 0]
    target = min(MINIBATCH_EFFICIENCY)
    return (min(divisors, key=lambda rows: (abs(math.log(rows / target)), rows)),)


def minibatch_efficiency(rows: int) -> float:
    """Relative sample efficiency, interpolated over log rows between the declared sizes."""
    sizes = sorted(MINIBATCH_EFFICIENCY)
    if rows <= sizes[0]:
        return MINIBATCH_EFFICIENCY[sizes[0]]
    for low, high in itertools.pairwise(sizes):
        if rows <= high:
            share = math.log(rows / low) / math.log(high / low)
            first, last = MINIBATCH_EFFICIENCY[low], MINIBATCH_EFFICIENCY[high]
            return first + share * (last - first)
    return MINIBATCH_EFFICIENCY[sizes[-1]]


def lag_efficiency(lag: int) -> float:
    """Relative sample efficiency under a policy lag of so many iterations."""
    return LAG_EFFICIENCY**lag


def policy_lags(max_policy_lag: int) -> tuple[int, ...]:
    """Bounds on the policy lag to consider where sampling and learning overlap."""
    return tuple(dict.fromkeys((1, max_policy_lag))) if max_policy_lag >= 1 else ()


def sampler_counts(num_envs: int, usable_cpus: int) -> tuple[int, ...]:
    """Numbers of sampler processes to consider: divisors of ``num_envs``.

    Up to one per CPU, and the next one: where that is not a divisor, a few processes too many
    leave no CPU idle.
    """
    divisors = [count for count in range(1, num_envs + 1) if num_envs % count == 0]
    fitting = [count for count in divisors if count <= usable_cpus]
    return tuple(divisors[: len(fitting) + 1])


def transfer_intervals(rollout_steps: int) -> tuple[int, ...]:
    """Chunk lengths to consider: the whole rollout, and halves of it down to a few steps."""
    lengths = [rollout_steps]
    while lengths[-1] > 1 and len(lengths) < _MAX_INTERVALS:
        lengths.append(math.ceil(lengths[-1] / 2))
    return tuple(lengths)


def narrowed(axes: Axes, given: Mapping[str, object], steps: int) -> Axes:
    """The axes with what the user gave in place of the free values."""

    def one(name: str, free: tuple[int, ...]) -> tuple[int, ...]:
        value = given.get(name)
        return free if value is None else (int(str(value)),)

    engine = given.get("engine")
    if engine is not None and engine not in axes.engines:
        raise UsageError(
            f"--engine is one that was timed and can run the network ({', '.join(axes.engines)}), "
            f"got {engine}: leave it to auto, or run `autoplace calibrate` again"
        )
    precision, passes = given.get("precision", FP32), given.get("accumulation_steps", 1)
    if precision not in PRECISIONS:
        raise UsageError(
            f"--precision is one of {', '.join(PRECISIONS)}, got {precision}: name one"
        )
    if not axes.accelerators and precision_problem(str(precision), CPU):
        raise UsageError(
            f"--precision {precision} is of accelerators, and none was calibrated here: "
            "use fp32 or bf16"
        )
    if not 1 <= int(str(passes)) <= min(axes.minibatch_rows):
        raise UsageError(
            "--accumulation-steps is between 1 and the rows of a minibatch, got "
            f"{passes}: change it"
        )
    interval = given.get("transfer_interval_steps")
    if interval is not None and not 1 <= int(str(interval)) <= steps:
        raise UsageError(
            f"--transfer-interval is between 1 and the rollout's {steps} steps, got {interval}: "
            "change it"
        )
    for name, flag in (
        ("sample_threads", "--sample-threads"),
        ("learn_threads", "--learn-threads"),
    ):
        value = given.get(name)
        if value is not None and int(str(value)) < 1:
            raise UsageError(f"{flag} is a whole number from 1, got {value}: change it")
    backends, samplers = axes.env_backends, axes.samplers
    backend, workers = given.get("env_backend"), given.get("num_workers")
    if backend is not None:
        names = tuple(dict.fromkeys(name for name, _ in backends))
        if backend not in names:
            raise UsageError(
                f"--env-backend is auto or one of {', '.join(names)}, got {backend}: name one"
            )
        backends = tuple(entry for entry in backends if entry[0] == backend)
        samplers = tuple(entry for entry in samplers if entry[0] == backend)
    if workers is not None:
        counts = sorted({count for _, count in (*backends, *samplers)})
        if workers not in counts:
            raise UsageError(
                f"--num-workers is auto or one of {', '.join(map(str, counts))}, "
                f"got {workers}: give one of them"
            )
        backends = tuple(entry for entry in backends if entry[1] == workers)
        samplers = tuple(entry for entry in samplers if entry[1] == workers)
    return dataclasses.replace(
        axes,
        sample_threads=one("sample_threads", axes.sample_threads),
        learn_threads=one("learn_threads", axes.learn_threads),
        transfer_intervals=one("transfer_interval_steps", axes.transfer_intervals),
        env_backends=backends,
        samplers=samplers,
        engines=axes.engines if engine is None else (str(engine),),
        precision=str(precision),
        accumulation_steps=int(str(passes)),
    )


def matching(placements: Placements, given: Mapping[str, object]) -> Placements:
    """Those that have what the user gave; parts that do not apply to a placement do not count."""
    free = {
        "transfer_interval_steps": placements.sample_device == placements.learn_device,
        "learn_threads": placements.learn_device != CPU,
        "sample_threads": placements.sample_device != CPU,
    }
    kept = np.ones(len(placements), dtype=np.bool_)
    for name, value in given.items():
        kept &= (getattr(placements, name) == value) | free.get(name, False)
    return placements.where(kept)
