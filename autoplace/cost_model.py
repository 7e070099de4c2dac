"""What a task costs on a calibrated machine: seconds, an interval, and where they come from.

Every prediction is physics from primitives x a correction fitted on timed steps:

1. *Primitives* are read off the calibration per device: the host's time to issue an operation, the
   latency of a launch, matmul, memory and link rates (:mod:`autoplace.rates`).
2. *Physics* turns a task into a few parts in seconds, such as "operations issued", "arithmetic",
   "memory traffic", and says whether they add up or overlap.
3. A *correction* per kind of step scales each part by a fitted factor and lets a Gaussian process
   over the logarithms of sizes learn what is left (:mod:`autoplace.correction`).

An interval follows from how well each median is known, what the medians leave open of factors and
process, how far off each task is when it is left out, and how far a task's time differs from one
visit to another (:mod:`autoplace.standard_errors`).

Fitting (:mod:`autoplace.fitting`) takes well under a second; what it finds is kept beside a stored
calibration (:mod:`autoplace.kept_model`), since the libraries that fit take longer to import.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from autoplace.correction import FACTOR_ERROR, Z90, Correction
from autoplace.engines import EAGER
from autoplace.errors import CalibrationError
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.model_parameters import ModelParameters, Timed, any_number, kind_of
from autoplace.physics import LEAST_S, Curve, Parts, Primitives, physics

__all__ = ["CONTEXT_ERROR", "UNTIMED_ERROR", "Z90", "Cost", "CostModel", "fit_cost_model"]

Array = NDArray[np.float64]

# Relative standard error that a step's time within a run has on top, known from timing it alone:
# there it meets caches, allocators and sleeping threads as the stages before it left them.
CONTEXT_ERROR = 0.04
# Share of a vector step that is left of it at least where episodes end more rarely.
_LEAST_WITHOUT_ENDS = 0.1
# Relative standard error of what a policy step takes more behind a vector step.
_COLD_ERROR = 0.2
# Relative standard error of a size between two timed ones, beyond what bounds it.
CURVE_ERROR = 0.03
# Relative standard error of a prediction in whose kind nothing at all was timed, of a time that was
# scaled from another machine's, and of any on a machine that is modelled from published figures.
UNTIMED_ERROR = FACTOR_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one call of a task.

    Attributes:
        seconds: the prediction.
        low_s: lower end of its 90 % interval.
        high_s: upper end of its 90 % interval.
        source: ``measured``, ``interpolated`` or ``extrapolated``; ``given`` by the user; or,
            inside what is known of a modelled machine, ``modelled``.
    """

    seconds: float
    low_s: float
    high_s: float
    source: str

    @property
    def standard_error_s(self) -> float:
        """Half of the interval in logarithms, as one standard error in seconds."""
        return self.seconds * math.log(self.high_s / self.low_s) / (2 * Z90)


# --------------------------------------------------------------------------------------------------


class CostModel:
    """Predicts what tasks cost on one machine. Made by :func:`fit_cost_model`.

    Attributes:
        parameters: what was fitted.
    """

    def __init__(self, calibration: Calibration, parameters: ModelParameters) -> None:
        self.parameters = parameters
        self._measured = calibration.by_task
        self._is_modelled = calibration.origin == "modelled"
        timed = Timed.of(calibration)
        self._errors = {
            m.task: error for m, error in zip(timed.rows, parameters.errors, strict=True)
        }
        self._corrections = {
            kind: Correction(
                rows,
                [self._parts(m.task) for m in rows],
                np.array([self._errors[m.task] for m in rows]),
                fitted,
            )
            for (kind, rows), fitted in zip(
                timed.by_kind.items(), parameters.corrections, strict=True
            )
        }
        self._left_out = {
            row.task: abs(miss)
            for rows, fitted in zip(timed.by_kind.values(), parameters.corrections, strict=True)
            for row, miss in zip(rows, fitted.left_out, strict=True)
        }
        self._env_steps = timed.env_steps
        self._env_lines = dict(zip(timed.env_steps, parameters.env_lines, strict=True))
        streamed: dict[tuple[str, str, int], list[Measurement]] = defaultdict(list)
        for measurement in timed.rows:
            task = measurement.task
            if task.op == "elementwise":
                streamed[task.op, task.device, task.threads].append(measurement)
        self._curves = {
            key: (Curve.of(rows), CURVE_ERROR + max(self._errors[m.task] for m in rows))
            for key, rows in streamed.items()
            if len(rows) >= 2
        }

    def _parts(self, task: Task) -> Parts:
        return physics(self.primitives, task)

    @property
    def primitives(self) -> Primitives:
        """The machine's basic rates, as fitted."""
        return self.parameters.primitives

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices with costs, the CPU first."""
        return self.primitives.devices

    @property
    def error_fractions(self) -> dict[str, float]:
        """Median leave-one-out style error of each op's correction, by ``op@device``."""
        errors: dict[str, list[float]] = defaultdict(list)
        for kind, correction in self._corrections.items():
            op, device = str(kind[0]), str(kind[1])
            if len(correction.parameters.left_out) >= 5:
                errors[f"{op}@{device}"].append(
                    float(np.median(np.abs(correction.parameters.left_out)))
                )
        return {name: float(np.median(values)) for name, values in sorted(errors.items())}

    def out_of_line(self, least: float) -> list[Task]:
        """Timed tasks, of which the others of their kind say something else; the worst first.

        Args:
            least: by how much, as the logarithm of a ratio.
        """
        found = [task for task, miss in self._left_out.items() if miss > least]
        return sorted(found, key=self._left_out.__getitem__, reverse=True)

    def predict(self, tasks: Iterable[Task], *, within_run: bool = False) -> dict[Task, Cost]:
        """Cost each distinct task once.

        Args:
            tasks: what to cost.
            within_run: whether the trainer's steps are meant as they are among the other stages of
                a run, which is known less well than their time alone.

        Raises:
            CalibrationError: a task concerns a device or an environment that was never measured.
        """
        distinct = list(dict.fromkeys(tasks))
        costs: dict[Task, Cost] = {}
        pending: dict[tuple[object, ...], list[Task]] = defaultdict(list)
        for task in distinct:
            measured = self._measured.get(task)
            if measured is not None:
                source = _SOURCES[measured.origin]
                costs[task] = _cost(measured.median_s, self._errors[task], source)
            elif task.op == "cold_policy_step":
                costs[task] = self._cold(task)
            elif task.op == "env_step":
                costs[task] = self._env_step(task)
            elif (task.op, task.device, task.threads) in self._curves:
                costs[task] = self._on_curve(task)
            else:
                pending[kind_of(task)].append(task)
        for kind, group in pending.items():
            costs.update(self._predict_kind(kind, group))
        costs = {task: self._as_in_a_run(task, cost) for task, cost in costs.items()}
        visits = self.parameters.visits
        costs = {task: _widened(cost, visits.of(task)) for task, cost in costs.items()}
        if within_run:
            costs = {task: _within_run(task, cost) for task, cost in costs.items()}
        if self._is_modelled:
            costs = {task: _as_modelled(cost) for task, cost in costs.items()}
        return {task: costs[task] for task in distinct}

    def _predict_kind(self, kind: tuple[object, ...], group: Sequence[Task]) -> dict[Task, Cost]:
        if group[0].device not in self.devices:
            raise CalibrationError(
                f"device {group[0].device} was not calibrated, only {', '.join(self.devices)}: "
                "run `autoplace calibrate`"
            )
        parts = [self._parts(task) for task in group]
        correction = self._corrections.get(kind)
        if correction is None and group[0].op in _LIKE:
            return self._by_what_is_like(group)
        if correction is None:
            return {
                task: _cost(p.unscaled_s, UNTIMED_ERROR, "extrapolated")
                for task, p in zip(group, parts, strict=True)
            }
        log_seconds, errors, outside = correction.predict(group, parts)
        return {
            task: _cost(math.exp(y), float(e), "extrapolated" if out else "interpolated")
            for task, y, e, out in zip(group, log_seconds, errors, outside, strict=True)
        }

    def _by_what_is_like(self, group: Sequence[Task]) -> dict[Task, Cost]:
        """Tasks of a kind that was never timed, by those of another and the physics of both."""
        found = {}
        for task in group:
            like = dataclasses.replace(task, op=_LIKE[task.op])
            known = self.predict([like])[like]
            ratio = self._parts(task).unscaled_s / self._parts(like).unscaled_s
            # Of what is more than in the other kind as little is known as of one without timings.
            error = known.standard_error_s / known.seconds + UNTIMED_ERROR * abs(1 - 1 / ratio)
            found[task] = _cost(known.seconds * ratio, error, known.source)
        return found

    def joint(self, tasks: Sequence[Task]) -> tuple[Array, Array]:
        """What is known of several tasks together.

        Returns:
            Logarithms of seconds ``[N]`` and their covariances ``[N, N]``, each task's own
            deviation from what varies smoothly with sizes left out, and so what another visit may
            differ by.

        Raises:
            CalibrationError: a task concerns a device that was never measured.
        """
        mean, covariance = np.zeros(len(tasks)), np.zeros((len(tasks), len(tasks)))
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, task in enumerate(tasks):
            groups[kind_of(task)].append(index)
        for kind, indices in groups.items():
            group = [tasks[index] for index in indices]
            correction = self._corrections.get(kind)
            if correction is None:
                costs = self._predict_kind(kind, group)
                mean[indices] = [math.log(costs[task].seconds) for task in group]
                covariance[np.ix_(indices, indices)] = UNTIMED_ERROR**2
                continue
            joint = correction.joint(group, [self._parts(task) for task in group])
            mean[indices], covariance[np.ix_(indices, indices)] = joint
        return mean, covariance

    def _on_curve(self, task: Task) -> Cost:
        """Between sizes that were timed at the same threads."""
        curve, error = self._curves[task.op, task.device, task.threads]
        seconds, factor = curve(float(task.shape[0]))
        inside = curve.sizes[0] <= task.shape[0] <= curve.sizes[-1]
        beyond = 0.0 if inside else abs(math.log(task.shape[0] / curve.sizes[-1]))
        error = math.hypot(error, math.log(factor) / Z90, 0.1 * beyond)
        return _cost(seconds, error, "interpolated" if inside else "extrapolated")

    def _env_step(self, task: Task) -> Cost:
        """A vector step of n envs costs a + b n, from the measured numbers of the same env."""
        rows = self._timed_env_steps(task)
        numbers = np.array([float(m.task.num_envs) for m in rows])
        error = max(self._errors[m.task] for m in rows)
        line = self._env_lines[any_number(task)]
        if line is None:
            predicted = self._from_one_number(task, rows[0])
            error += 0.1 * abs(math.log(task.num_envs / numbers[0]))
        else:
            predicted = line(task.num_envs)
        inside = numbers.min() <= task.num_envs <= numbers.max()
        if not inside:
            error *= 1 + abs(math.log(task.num_envs / numbers.max()))
        source = "interpolated" if inside else "extrapolated"
        if inside and rows[0].origin != "measured":
            source = _SOURCES[rows[0].origin]
        return _cost(predicted, error, source)

    def nearest_env_step(self, task: Task) -> Measurement:
        """The timing of the same environment, backend and workers that is nearest in number.

        Args:
            task: an env step, or a cold policy step behind one.

        Raises:
            CalibrationError: there is none.
        """
        return min(
            self._timed_env_steps(task),
            key=lambda m: abs(math.log(m.task.num_envs / task.num_envs)),
        )

    def _timed_env_steps(self, task: Task) -> list[Measurement]:
        like = dataclasses.replace(any_number(task), op="env_step", device="cpu", engine=EAGER)
        if like not in self._env_steps:
            assert task.env is not None
            raise CalibrationError(
                f"no step time of {task.env.id} ({task.backend}) is in the calibration: "
                f"run `autoplace calibrate --env {task.env.id}`"
            )
        return self._env_steps[like]

    def like_env_step(self, task: Task) -> Measurement:
        """As :meth:`nearest_env_step`, or of another backend where that tells of no episodes."""
        nearest = self.nearest_env_step(task)
        if nearest.episodes is not None or nearest.origin == "given":
            return nearest
        others = (m for rows in self._env_steps.values() for m in rows if m.task.env == task.env)
        return next((m for m in others if m.episodes is not None), nearest)

    def _cold(self, task: Task) -> Cost:
        """What a policy step takes more behind a vector step, next to nothing where unknown.

        An engine that was not timed so makes no more of the caches' work than the best that was.
        """
        known = self.nearest_env_step(task)
        by_engine = dict(known.cold_s)
        least_s = min(by_engine.values(), default=0.0)
        seconds, error = by_engine.get(task.engine, least_s), _COLD_ERROR
        if task.engine not in by_engine:
            error = UNTIMED_ERROR
        return _cost(max(seconds, LEAST_S), error, _SOURCES[known.origin])

    def _as_in_a_run(self, task: Task, cost: Cost) -> Cost:
        """The cost of a vector step whose episodes last as long as they are expected to.

        Its interval reaches as far as what was timed.
        """
        if task.op != "env_step" or cost.source == "given":
            return cost
        known = self.nearest_env_step(task)
        episodes = self.like_env_step(task).episodes
        if episodes is None:
            return cost
        ends = known.expected_valid_fraction / episodes.expected_steps  # for each row
        saved_s = task.num_envs * episodes.end_s * (episodes.timed_ends - ends)
        seconds = max(cost.seconds - saved_s, _LEAST_WITHOUT_ENDS * cost.seconds)
        error = math.hypot(cost.standard_error_s / cost.seconds, saved_s / Z90 / seconds)
        return _cost(seconds, error, cost.source)

    def _from_one_number(self, task: Task, known: Measurement) -> float:
        """Seconds in proportion to the environments.

        With workers only what each steps by itself is in proportion; handing over is not.
        """
        share = task.num_envs / known.task.num_envs
        if not task.workers:
            return known.median_s * share
        alone = any_number(dataclasses.replace(task, backend="sync", workers=0))
        if alone not in self._env_steps:
            return known.median_s * max(share, 1.0)  # handing over may be all of it
        one_s = min(m.median_s / m.task.num_envs for m in self._env_steps[alone])
        before, after = (math.ceil(n / task.workers) for n in (known.task.num_envs, task.num_envs))
        return max(known.median_s + one_s * (after - before), one_s * after)


# What a kind of task is like of which nothing was timed.
_LIKE = {"first_update": "update"}
# What a cost is called that was taken as it stands, by the origin of the measurement.
_SOURCES = {"measured": "measured", "scaled": "extrapolated", "given": "given"}


def _as_modelled(cost: Cost) -> Cost:
    """The cost on a machine on which nothing was timed."""
    if cost.source not in ("given", "extrapolated"):
        cost = dataclasses.replace(cost, source="modelled")
    return _widened(cost, UNTIMED_ERROR)


def _within_run(task: Task, cost: Cost) -> Cost:
    """The cost where the task is one of the trainer's steps in a run."""
    if task.network is None and task.env is None:
        return cost
    return _widened(cost, CONTEXT_ERROR)


def _widened(cost: Cost, error: float) -> Cost:
    """The cost where so much more is open of it, unless it was given."""
    if cost.source == "given":
        return cost
    error = math.hypot(cost.standard_error_s / cost.seconds, error)
    return _cost(cost.seconds, error, cost.source)


def _cost(seconds: float, error: float, source: str) -> Cost:
    stretch = math.exp(Z90 * error)
    return Cost(
        seconds=float(seconds),
        low_s=float(seconds / stretch),
        high_s=float(seconds * stretch),
        source=source,
    )


def fit_cost_model(calibration: Calibration) -> CostModel:
    """Fit the cost model of a calibrated machine; takes well under a second.

    Raises:
        CalibrationError: the calibration lacks the basic timings of one of its devices.
    """
    from autoplace.fitting import fit_parameters  # imports scikit-learn, which is slow

    with threadpool_limits(limits=1, user_api="blas"):  # in small products threads only hinder
        return CostModel(calibration, fit_parameters(calibration))
