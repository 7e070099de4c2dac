"""What can be timed, what was timed, and all that was timed on one machine.

A :class:`Task` is both what a probe runs and what the cost model is asked for, so a prediction and
the measurement that checks it can never mean different things.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from autoplace.machine import Machine
from autoplace.workload import EnvSpec, NetworkSpec

SCHEMA_VERSION = 1

OPS = (
    "matmul",  # (m, k) @ (k, n)
    "elementwise",  # y = 2 x over n numbers: what the memory can stream
    "activation",  # y = tanh(x) over n numbers
    "dispatch",  # host time to issue one tiny operation, without waiting
    "launch",  # one tiny operation, issued and waited for
    "copy",  # bytes between host and device
    "handoff",  # a small message to another thread of control and its answer
    "hand_over",  # the same once in a while, as a sampler tells a learner of a rollout
    "process_start",  # a trainer's process spawned, until it is ready; with an env, a sampler's
    "crowd",  # several processes at once: (n,) stretches of Python each, until the last is through
    "interpreter",  # a stretch of Python, as environments are made of
    "env_step",  # one vector step of num_envs environments under random actions
    "policy_step",  # the trainer's own: observations in, actions out, rollout row written
    "cold_policy_step",  # what one behind a vector step takes more than behind a policy step
    "obs_to_device",  # one vector step's observations leave for the device
    "action_to_host",  # one vector step's actions come back, the wait for the policy included
    "bookkeeping",  # once per iteration: noise and orders of minibatches drawn, episodes counted
    "gae",  # a rollout made ready to learn from: values, advantages, statistics of observations
    "update",  # the trainer's own: one gradient step on one minibatch
    "first_update",  # the first one after other work, with all that is done once per update
    "engine_setup",  # once: an engine makes a policy step and a gradient step ready
    "weights_to_host",  # the sampler's network on the host brought up to date from the device
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing that can be timed. Hashable; fields that an op does not use keep their defaults.

    Attributes:
        op: one of :data:`OPS`.
        device: canonical name of the device that does the work (of the far end, for a copy).
        threads: intra-op threads of torch on the host.
        dtype: element type.
        shape: (m, k, n) of a matmul, (n,) of an elementwise op or activation, (bytes,) of a copy,
            (rollout_steps, num_envs) of a gae, (rollout_steps, num_envs, action_size, epochs) of
            bookkeeping, (stretches,) of a crowd.
        network: actor and critic of the trainer's own steps.
        rows: rows of a policy step, or of one minibatch.
        engine: how the trainer's own steps are executed.
        residency: ``resident`` (operands already on the device) or ``copied`` (they start and end
            on the host).
        direction: ``h2d`` or ``d2h``.
        pinned: whether a copy's host side is page-locked.
        env: the environment of an env step, or of that before a policy step.
        backend: the vector backend of such an env step.
        num_envs: environments stepped together.
        workers: processes that they are spread over, 0 for the caller's own.
        beside: cores that other work keeps busy at the same time.
        standardized: whether a perceptron's policy step or gae standardises observations.
        scaled_rewards: whether a perceptron's gae scales rewards.
    """

    op: str
    device: str = "cpu"
    threads: int = 1
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    network: NetworkSpec | None = None
    rows: int = 0
    engine: str = "eager"
    residency: str = "resident"
    direction: str | None = None
    pinned: bool | None = None
    env: EnvSpec | None = None
    backend: str | None = None
    num_envs: int = 0
    workers: int = 0
    beside: int = 0
    standardized: bool = True
    scaled_rewards: bool = True

    def __post_init__(self) -> None:
        assert self.op in OPS, self.op

    def to_json(self) -> dict[str, Any]:
        """A JSON object that leaves out what has its default."""
        row: dict[str, Any] = {}
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.default is dataclasses.MISSING or value != spec.default:
                row[spec.name] = value.to_json() if _is_spec(value) else value
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Task:
        """The inverse of :meth:`to_json`."""
        values = dict(row)
        if "shape" in values:
            values["shape"] = tuple(values["shape"])
        if "network" in values:
            values["network"] = NetworkSpec.from_json(values["network"])
        if "env" in values:
            values["env"] = EnvSpec(**values["env"])
        return cls(**values)


def _is_spec(value: object) -> TypeGuard[NetworkSpec | EnvSpec]:
    return isinstance(value, (NetworkSpec, EnvSpec))


PROCESS_START = Task(op="process_start")


def env_start(env: EnvSpec) -> Task:
    """The start of a process that makes environments and needs no torch."""
    return Task(op="process_start", env=env)


# A visit that took so many times as long as another met more than the machine's own ups and downs.
INTERFERED = 1.5


def _middle(times_s: Sequence[float]) -> tuple[float, float]:
    """Median, and 1.4826 x the median absolute deviation from it."""
    middle_s = statistics.median(times_s)
    return middle_s, 1.4826 * statistics.median(abs(t - middle_s) for t in times_s)


def _usual(times_s: Sequence[float]) -> Sequence[float]:
    """Those within 5 spreads (or 10 %) of the median, which outliers move a little, too."""
    middle_s, spread_s = _middle(times_s)
    limit_s = max(5 * spread_s, 0.10 * middle_s)
    return [t for t in times_s if abs(t - middle_s) <= limit_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """How episodes end under random actions, and what that takes.

    Attributes:
        end_s: seconds that the end of one episode adds to a vector step: the reset, mostly.
        steps: mean env steps of an episode.
        timed_ends: ends of episodes for each row of the vector steps that the median goes by.
        limit: steps after which episodes are truncated, where the environment says so.
    """

    end_s: float
    steps: float
    timed_ends: float
    limit: int | None = None

    def __post_init__(self) -> None:
        assert self.end_s >= 0 and self.steps > 0 and self.timed_ends >= 0, self

    @property
    def expected_steps(self) -> float:
        """Env steps of an episode in a run, by the ends that are expected for each of them.

        Random actions say where a policy begins, and the limit is as far as one that learns to last
        can come. Between the two nothing is known, so each doubling of the length counts alike:
        the mean of 1 / length, its logarithm uniform, is (1/a - 1/b) / ln(b/a).
        """
        most, least = 1 / self.steps, 1 / max(self.limit or 0, self.steps)
        span = math.log(most / least)
        return span / (most - least) if span > 1e-6 else self.steps

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A task and its raw times; every statistic is derived from them.

    Attributes:
        task: what was timed.
        times_s: seconds of one call, one entry per sample, in the order they were taken.
        calls_per_sample: calls that each sample averages over.
        origin: ``measured``; ``scaled`` from another machine's; or ``given`` by the user.
        valid_fraction: share of an env step's rows that were transitions; the others only reset.
        episodes: how they ended meanwhile, where enough did to tell.
        cold_s: seconds that a policy step right behind such a vector step, whose code and data are
            in the caches then, takes more than others, and makes the next vector step take more
            than one of the fastest engine does; by engine.
        process_bytes: memory that the first environment of a process start adds to the process,
            beyond its own.
        env_bytes: memory that each of its environments holds.
        visits: how many of the samples each visit took; one visit took all where that is empty.
    """

    task: Task
    times_s: tuple[float, ...]
    calls_per_sample: int = 1
    origin: str = "measured"
    valid_fraction: float = 1.0
    episodes: Episodes | None = None
    cold_s: tuple[tuple[str, float], ...] = ()
    process_bytes: int = 0
    env_bytes: int = 0
    visits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.times_s and all(t > 0 and math.isfinite(t) for t in self.times_s), self
        assert self.calls_per_sample >= 1
        assert self.origin in ("measured", "scaled", "given"), self.origin
        assert 0 < self.valid_fraction <= 1, self.valid_fraction
        assert self.process_bytes >= 0 and self.env_bytes >= 0, self
        assert not self.visits or sum(self.visits) == len(self.times_s), self
        assert all(taken > 0 for taken in self.visits), self

    @property
    def times_by_visit_s(self) -> tuple[tuple[float, ...], ...]:
        """The raw times of each visit."""
        visits = self.visits or (self.num_samples,)
        ends = itertools.accumulate(visits)
        return tuple(self.times_s[end - n : end] for end, n in zip(ends, visits, strict=True))

    @functools.cached_property
    def visit_medians_s(self) -> tuple[float, ...]:
        """Median seconds of one call in each visit, outliers left out."""
        return tuple(statistics.median(_usual(times)) for times in self.times_by_visit_s)

    @functools.cached_property
    def visit_spread_fraction(self) -> float:
        """Scatter of single samples around the median of their visit, as an estimate from few."""
        deviations = [
            abs(t / middle_s - 1)
            for times in self.times_by_visit_s
            for middle_s in [statistics.median(times)]
            for t in times
        ]
        n = self.num_samples
        few = n / (n - 0.8 * len(self.times_by_visit_s))  # as in error_fraction, per visit
        return 1.4826 * statistics.median(deviations) * few

    @functools.cached_property
    def median_s(self) -> float:
        """Median seconds of one call: of all visits, each of which counts for one.

        What a visit found far above another was other programs' work.
        """
        limit_s = INTERFERED * min(self.visit_medians_s)
        return statistics.median(s for s in self.visit_medians_s if s <= limit_s)

    @property
    def expected_valid_fraction(self) -> float:
        """:attr:`valid_fraction` with episodes as long as they are expected to be in a run."""
        if self.episodes is None:
            return self.valid_fraction
        resets = (1 / self.valid_fraction - 1) * self.episodes.steps  # rows, for each episode
        return 1 / (1 + resets / self.episodes.expected_steps)

    @property
    def num_samples(self) -> int:
        """Number of raw times."""
        return len(self.times_s)

    @functools.cached_property
    def spread_fraction(self) -> float:
        """Scatter of single samples: 1.4826 x their median absolute deviation over the median."""
        middle_s, spread_s = _middle(self.times_s)
        return spread_s / middle_s

    @property
    def error_fraction(self) -> float:
        """Standard error of the median over the median.

        Normal theory gives 1.2533 spread / sqrt(n). The median absolute deviation of few samples
        is too small by about (n - 0.8) / n (Croux and Rousseeuw 1992), which is put right.
        """
        n = self.num_samples
        return 1.2533 * self.spread_fraction / math.sqrt(n) * n / (n - 0.8)

    @property
    def outlier_fraction(self) -> float:
        """Share of samples further than 5 spreads (and 10 %) from the median."""
        return 1 - len(_usual(self.times_s)) / self.num_samples

    @property
    def drift_fraction(self) -> float:
        """Change of the median from the first half of the samples to the second, over the whole."""
        if self.num_samples < 4:
            return 0.0
        half = self.num_samples // 2
        first = statistics.median(self.times_s[:half])
        second = statistics.median(self.times_s[half:])
        return (second - first) / self.median_s

    def to_json(self) -> dict[str, Any]:
        """A JSON object; times keep nine significant digits, the usual goes without saying."""
        return {
            "task": self.task.to_json(),
            "times_s": [float(f"{t:.9g}") for t in self.times_s],
            "calls_per_sample": self.calls_per_sample,
            **({} if self.origin == "measured" else {"origin": self.origin}),
            **({} if self.valid_fraction == 1 else {"valid_fraction": self.valid_fraction}),
            **({"episodes": self.episodes.to_json()} if self.episodes else {}),
            **({"cold_s": dict(self.cold_s)} if self.cold_s else {}),
            **({"visits": list(self.visits)} if self.visits else {}),
            **({"process_bytes": self.process_bytes} if self.process_bytes else {}),
            **({"env_bytes": self.env_bytes} if self.env_bytes else {}),
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Measurement:
        """The inverse of :meth:`to_json`."""
        return cls(
            task=Task.from_json(row["task"]),
            times_s=tuple(float(t) for t in row["times_s"]),
            calls_per_sample=int(row["calls_per_sample"]),
            origin=str(row.get("origin", "measured")),
            valid_fraction=float(row.get("valid_fraction", 1.0)),
            episodes=Episodes(**row["episodes"]) if "episodes" in row else None,
            cold_s=tuple((name, float(s)) for name, s in row.get("cold_s", {}).items()),
            visits=tuple(map(int, row.get("visits", ()))),
            process_bytes=int(row.get("process_bytes", 0)),
            env_bytes=int(row.get("env_bytes", 0)),
        )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All that was measured on one machine.

    Attributes:
        machine: the machine it holds for.
        measurements: one per task.
        budget_s: the time it was allowed, 0 where none was set.
        spent_s: the time it took.
        created: when it was made, ISO 8601 with time zone.
        warnings: doubts that a person should know of, one line each.
        origin: ``measured``, or ``modelled`` where the times were derived from published figures.
        sources: of a modelled one, each borrowed figure with where it was published.
    """

    machine: Machine
    measurements: tuple[Measurement, ...]
    budget_s: float = 0.0
    spent_s: float = 0.0
    created: str = ""
    warnings: tuple[str, ...] = ()
    origin: str = "measured"
    sources: tuple[str, ...] = ()

    @functools.cached_property
    def by_task(self) -> dict[Task, Measurement]:
        """The measurements by what was timed."""
        return {m.task: m for m in self.measurements}

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that any measured task ran on, the CPU first."""
        found = {m.task.device for m in self.measurements}
        return tuple(sorted(found, key=lambda device: (device != "cpu", device)))

    def with_measurements(self, more: Iterable[Measurement]) -> Calibration:
        """A copy in which ``more`` are added, each replacing an older one of the same task."""
        merged = {**self.by_task, **{m.task: m for m in more}}
        return dataclasses.replace(self, measurements=tuple(merged.values()))

    def to_json(self) -> dict[str, Any]:
        """The whole calibration as a JSON object with its schema version."""
        return {
            "schema_version": SCHEMA_VERSION,
            "origin": self.origin,
            **({"sources": list(self.sources)} if self.sources else {}),
            "created": self.created,
            "budget_s": self.budget_s,
            "spent_s": self.spent_s,
            "warnings": list(self.warnings),
            "machine": self.machine.to_json(),
            "measurements": [m.to_json() for m in self.measurements],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Calibration:
        """The inverse of :meth:`to_json`, for the current schema version."""
        return cls(
            machine=Machine.from_json(data["machine"]),
            measurements=tuple(Measurement.from_json(row) for row in data["measurements"]),
            budget_s=float(data["budget_s"]),
            spent_s=float(data["spent_s"]),
            created=str(data["created"]),
            warnings=tuple(data["warnings"]),
            origin=str(data["origin"]),
            sources=tuple(data.get("sources", ())),
        )
