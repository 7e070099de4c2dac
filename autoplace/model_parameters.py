"""What a cost model takes from fitting, apart from the calibration itself: numbers, kept as JSON.

Fitting needs scikit-learn and scipy, whose imports take longer than a plan; a model that is made
from these numbers needs neither.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoplace.measurement import Calibration, Measurement, Task
from autoplace.physics import Line, Matmul, Primitives
from autoplace.products import Regimes

Kind = tuple[object, ...]


def kind_of(task: Task) -> Kind:
    """Tasks of one kind share one correction."""
    return (
        task.op,
        task.device,
        task.dtype,
        task.engine,
        task.residency,
        task.direction,
        task.pinned,
        task.beside,
        None if task.network is None else task.network.family,
    )


def any_number(env_step: Task) -> Task:
    """What the steps of one environment by one backend have in common."""
    return dataclasses.replace(env_step, num_envs=0)


@dataclass(frozen=True, slots=True)
class Timed:
    """The timings of a calibration as they are fitted, in its order.

    Attributes:
        rows: all that have a cost of their own.
        by_kind: those with a correction.
        env_steps: those of environments, by :func:`any_number`.
    """

    rows: list[Measurement]
    by_kind: dict[Kind, list[Measurement]]
    env_steps: dict[Task, list[Measurement]]

    @classmethod
    def of(cls, calibration: Calibration) -> Timed:
        """Those of a calibration."""
        # What was timed to be compared only (see autoplace.contention) has no cost of its own, and
        # what is paid once is no part of an iteration (see autoplace.planner.engine_gain).
        rows = [
            m
            for m in calibration.measurements
            if not m.task.beside and m.task.op not in ("interpreter", "crowd", "engine_setup")
        ]
        by_kind: dict[Kind, list[Measurement]] = defaultdict(list)
        env_steps: dict[Task, list[Measurement]] = defaultdict(list)
        for row in rows:
            if row.task.op == "env_step":
                env_steps[any_number(row.task)].append(row)
            elif row.task.op != "process_start":  # one cost, which nothing predicts
                by_kind[kind_of(row.task)].append(row)
        return cls(rows, dict(by_kind), dict(env_steps))


@dataclass(frozen=True, slots=True)
class VisitErrors:
    """How far a task's time differs from one visit to another, as a relative standard error.

    Clocks, caches, the placement of memory and whatever shares the chip change within seconds: one
    visit tells of the next only so much, and so does a calibration of what is done after it.

    Attributes:
        by_kind: of an op on a device by an engine, on several threads or not.
        by_device: of all that a device does on several threads or not.
    """

    by_kind: dict[tuple[str, str, str, bool], float]
    by_device: dict[tuple[str, bool], float]

    def of(self, task: Task) -> float:
        """That of a task, 0 where nothing like it was visited twice."""
        is_threaded = task.threads > 1
        kind = task.op, task.device, task.engine, is_threaded
        return self.by_kind.get(kind, self.by_device.get((task.device, is_threaded), 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionParameters:
    """Of the correction of one kind of task (:mod:`autoplace.correction`).

    Attributes:
        factors: of the parts.
        hyperparameters: (length, signal, nugget) of each process that is averaged over.
        weights: of those.
        left_out: by how much the logarithm of each task is missed by the others.
        stretch: what makes 90 % of the intervals of left-out tasks hold.
    """

    factors: tuple[float, ...]
    hyperparameters: tuple[tuple[float, float, float], ...]
    weights: tuple[float, ...]
    left_out: tuple[float, ...]
    stretch: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CorrectionParameters:
        """The inverse of :func:`dataclasses.asdict`, lists for tuples."""
        return cls(
            factors=_floats(data["factors"]),
            hyperparameters=tuple(
                (float(a), float(b), float(c)) for a, b, c in data["hyperparameters"]
            ),
            weights=_floats(data["weights"]),
            left_out=_floats(data["left_out"]),
            stretch=float(data["stretch"]),
        )


# The tables of Primitives: how many entries a key has, and what stands under it.
_TABLES: dict[str, tuple[int, type[Matmul] | type[Regimes] | type[Line]]] = {
    "matmul": (2, Matmul),
    "numpy_matmul": (2, Matmul),
    "regimes": (2, Regimes),
    "numpy_regimes": (2, Regimes),
    "elementwise": (2, Line),
    "activation": (2, Line),
    "copy": (3, Line),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameters:
    """All that is fitted, in the order of :class:`Timed`.

    Attributes:
        primitives: the basic rates of the machine.
        errors: relative standard error of the median of each of ``rows``.
        visits: what another visit may differ by.
        corrections: one for each of ``by_kind``.
        env_lines: seconds by the number of environments for each of ``env_steps``; ``None`` where
            only one number was timed.
    """

    primitives: Primitives
    errors: tuple[float, ...]
    visits: VisitErrors
    corrections: tuple[CorrectionParameters, ...]
    env_lines: tuple[Line | None, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object; numbers are kept exactly."""
        primitives = self.primitives
        by_kind, by_device = self.visits.by_kind, self.visits.by_device
        return {
            "primitives": {
                "devices": list(primitives.devices),
                "dispatch_s": primitives.dispatch_s,
                "launch_s": primitives.launch_s,
                **{
                    name: [
                        [*key, *dataclasses.astuple(rates)]
                        for key, rates in getattr(primitives, name).items()
                    ]
                    for name in _TABLES
                },
            },
            "errors": list(self.errors),
            "visits": [[[*key, v] for key, v in t.items()] for t in (by_kind, by_device)],
            "corrections": [dataclasses.asdict(fitted) for fitted in self.corrections],
            "env_lines": [line and dataclasses.astuple(line) for line in self.env_lines],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelParameters:
        """The inverse of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is not of that form.
        """
        rates = data["primitives"]
        tables: dict[str, Any] = {
            name: {tuple(row[:size]): made(*map(_number, row[size:])) for row in rates[name]}
            for name, (size, made) in _TABLES.items()
        }
        return cls(
            primitives=Primitives(
                devices=tuple(map(str, rates["devices"])),
                dispatch_s={key: float(value) for key, value in rates["dispatch_s"].items()},
                launch_s={key: float(value) for key, value in rates["launch_s"].items()},
                **tables,
            ),
            errors=_floats(data["errors"]),
            visits=VisitErrors(
                *({tuple(row[:-1]): float(row[-1]) for row in table} for table in data["visits"])
            ),
            corrections=tuple(map(CorrectionParameters.from_json, data["corrections"])),
            env_lines=tuple(row and Line(*_floats(row)) for row in data["env_lines"]),
        )


def _floats(row: list[float]) -> tuple[float, ...]:
    return tuple(map(float, row))


def _number(value: Any) -> Any:  # noqa: ANN401 - a number, or lists of them
    return tuple(map(_number, value)) if isinstance(value, list) else float(value)
