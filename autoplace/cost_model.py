"""What a task costs on a calibrated machine: seconds, an interval, and where they come from.

Every prediction is physics from primitives x a correction fitted on timed steps:

1. *Primitives* are read off the calibration per device: the host's time to issue an operation, the
   latency of a launch, matmul, memory and link rates (:mod:`autoplace.physics`).
2. *Physics* turns a task into a few parts in seconds, such as "operations issued", "arithmetic",
   "memory traffic", and says whether they add up or overlap.
3. A *correction* per kind of step scales each part by one fitted factor, 1 where nothing was
   timed, and a Gaussian process over the logarithms of sizes learns what is left (caches, kernel
   choice). Its own uncertainty, scaled by leave-one-out errors, is the interval.

``c_j`` is the fitted factor of part j, ``log-ratio`` the log of measured over corrected physics.

Fitting takes well under a second, so a model is made from its calibration whenever it is needed and
never stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from autoplace.errors import CalibrationError
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.physics import Parts, Primitives, fit_line, physics

Array = NDArray[np.float64]

Z90 = 1.645  # half-width of a 90 % interval in standard deviations
# Least relative standard error of any prediction: two timings of the same thing on a quiet machine
# differ by about this much.
FLOOR_ERROR = 0.01
# Relative standard error of what a step takes within a run, known from timing it alone: there it
# meets caches, allocators and sleeping threads as the stages before it left them.
CONTEXT_ERROR = 0.04
# Relative standard error of a prediction in whose kind nothing at all was timed, of a time that was
# scaled from another machine's, and of any on a machine that is modelled from published figures.
UNTIMED_ERROR = 0.35


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
# Corrections: what was timed, against the physics


def _features(task: Task) -> tuple[float, ...]:
    """Logarithms of the sizes that a correction may depend on."""
    sizes: list[float] = [float(task.threads)]
    if task.shape:
        sizes += [float(size) for size in task.shape]
    if task.network is not None:
        network = task.network
        width = network.num_parameters / network.activation_size
        sizes += [
            float(max(task.rows, 1)),
            width,
            float(network.observation_size),
            float(len(network.hidden_sizes) + 1),
            2.0 if network.continuous else 1.0,
        ]
    return tuple(math.log(size) for size in sizes)


def _kind(task: Task) -> tuple[object, ...]:
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


# Length scales, in multiples of each feature's spread, among which the likelihood chooses.
_LENGTH_SCALES = (0.5, 1.0, 2.0, 4.0)
# Standard deviations of the log-ratio among which the likelihood chooses.
_SIGNALS = (0.03, 0.1, 0.3)
_NUGGET = 0.01


class _Correction:
    """Factors of the parts, and a Gaussian process on the log-ratio that they leave."""

    def __init__(self, rows: Sequence[Measurement], physics: Callable[[Task], Parts]) -> None:
        tasks = [m.task for m in rows]
        parts = [physics(task) for task in tasks]
        seconds = np.array([m.median_s for m in rows])
        errors = np.array([max(m.error_fraction, FLOOR_ERROR) for m in rows])
        self.factors = self._fit_factors(parts, seconds)
        base = np.array([max(p.total_s(self.factors), 1e-9) for p in parts])
        log_ratio = np.log(seconds / base)
        features = np.array([_features(task) for task in tasks])
        self.low, self.high = features.min(axis=0), features.max(axis=0)
        self.scale = np.maximum(features.std(axis=0), 0.3)
        self.mean = float(np.average(log_ratio, weights=errors**-2.0))
        self.gp, self.error_scale = self._fit_process(
            features / self.scale, log_ratio - self.mean, errors
        )

    @staticmethod
    def _fit_factors(parts: Sequence[Parts], seconds: Array) -> Array:
        """Factors c_j > 0, each drawn towards 1 as far as the timings leave it open."""
        num_parts = len(parts[0].flat)

        def residual(theta: Array) -> Array:
            factors = np.exp(theta)
            model = np.array([max(p.total_s(factors), 1e-9) for p in parts])
            return np.concatenate([np.log(model / seconds) / 0.1, theta / 1.5])

        fit = least_squares(residual, np.zeros(num_parts), loss="soft_l1", f_scale=1.0, max_nfev=60)
        return np.asarray(np.exp(fit.x))

    @staticmethod
    def _fit_process(
        features: Array, log_ratio: Array, errors: Array
    ) -> tuple[GaussianProcessRegressor, float]:
        best: GaussianProcessRegressor | None = None
        for length in _LENGTH_SCALES:
            for signal in _SIGNALS:
                gp = GaussianProcessRegressor(
                    ConstantKernel(signal**2) * RBF(length),
                    alpha=errors**2 + _NUGGET**2,
                    optimizer=None,
                )
                gp.fit(features, log_ratio)
                if (
                    best is None
                    or gp.log_marginal_likelihood_value_ > best.log_marginal_likelihood_value_
                ):
                    best = gp
        assert best is not None
        # Leave-one-out errors in closed form (Rasmussen & Williams 2006, eq. 5.12): the stated
        # standard deviations are stretched until 90 % of them hold.
        if len(log_ratio) < 5:
            return best, 1.0
        cholesky = np.asarray(best.L_)
        inverse = np.linalg.inv(cholesky @ cholesky.T)
        variance = 1.0 / np.diag(inverse)
        left_out = np.asarray(best.alpha_) * variance
        z_scores = np.abs(left_out) / np.sqrt(variance)
        return best, float(np.quantile(z_scores, 0.9) / Z90)

    def predict(
        self, tasks: Sequence[Task], parts: Sequence[Parts]
    ) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Seconds, relative standard errors, and whether each task is outside what was timed."""
        base = np.array([max(p.total_s(self.factors), 1e-9) for p in parts])
        features = np.array([_features(task) for task in tasks])
        mean, std = self.gp.predict(features / self.scale, return_std=True)
        beyond = np.maximum(self.low - features, features - self.high) / self.scale
        outside = beyond.max(axis=1)
        std = np.hypot(std * max(self.error_scale, 0.5), _NUGGET)
        # Outside of what was timed the error grows with the distance.
        std = std * (1 + np.maximum(outside, 0.0))
        return (
            base * np.exp(mean + self.mean),
            np.maximum(std, FLOOR_ERROR),
            outside > 0.1,
        )


# --------------------------------------------------------------------------------------------------


class CostModel:
    """Predicts what tasks cost on one machine. Made by :func:`fit_cost_model`."""

    def __init__(self, calibration: Calibration) -> None:
        self._measured = calibration.by_task
        self._is_modelled = calibration.origin == "modelled"
        self._primitives = Primitives(calibration)
        groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
        self._env_steps: dict[Task, list[Measurement]] = defaultdict(list)
        for measurement in calibration.measurements:
            task = measurement.task
            if task.op == "env_step":
                self._env_steps[_any_number(task)].append(measurement)
            else:
                groups[_kind(task)].append(measurement)
        self._corrections = {kind: _Correction(rows, self._parts) for kind, rows in groups.items()}

    def _parts(self, task: Task) -> Parts:
        return physics(self._primitives, task)

    @property
    def primitives(self) -> Primitives:
        """The machine's basic rates, as fitted."""
        return self._primitives

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices with costs, the CPU first."""
        return self._primitives.devices

    @property
    def error_fractions(self) -> dict[str, float]:
        """Median leave-one-out style error of each op's correction, by ``op@device``."""
        errors: dict[str, list[float]] = defaultdict(list)
        for kind, correction in self._corrections.items():
            op, device = str(kind[0]), str(kind[1])
            if len(correction.gp.X_train_) >= 5:
                errors[f"{op}@{device}"].append(_median_left_out(correction.gp))
        return {name: float(np.median(values)) for name, values in sorted(errors.items())}

    def predict(self, tasks: Iterable[Task]) -> dict[Task, Cost]:
        """Cost each distinct task once.

        Raises:
            CalibrationError: a task concerns a device or an environment that was never measured.
        """
        distinct = list(dict.fromkeys(tasks))
        costs: dict[Task, Cost] = {}
        pending: dict[tuple[object, ...], list[Task]] = defaultdict(list)
        for task in distinct:
            measured = self._measured.get(task)
            if measured is not None:
                error = _in_context(task, _error_fraction(measured))
                costs[task] = _cost(measured.median_s, error, _SOURCES[measured.origin])
            elif task.op == "env_step":
                costs[task] = self._env_step(task)
            else:
                pending[_kind(task)].append(task)
        for kind, group in pending.items():
            costs.update(self._predict_kind(kind, group))
        if self._is_modelled:
            return {task: _as_modelled(costs[task]) for task in distinct}
        return {task: costs[task] for task in distinct}

    def _predict_kind(self, kind: tuple[object, ...], group: Sequence[Task]) -> dict[Task, Cost]:
        if group[0].device not in self.devices:
            raise CalibrationError(
                f"device {group[0].device} was not calibrated, only {', '.join(self.devices)}: "
                "run `autoplace calibrate`"
            )
        parts = [self._parts(task) for task in group]
        correction = self._corrections.get(kind)
        if correction is None:
            return {
                task: _cost(
                    max(p.total_s([1.0] * len(p.flat)), 1e-9), UNTIMED_ERROR, "extrapolated"
                )
                for task, p in zip(group, parts, strict=True)
            }
        seconds, errors, outside = correction.predict(group, parts)
        return {
            task: _cost(
                float(s), _in_context(task, float(e)), "extrapolated" if out else "interpolated"
            )
            for task, s, e, out in zip(group, seconds, errors, outside, strict=True)
        }

    def _env_step(self, task: Task) -> Cost:
        """A vector step of n envs costs a + b n, from the measured numbers of the same env."""
        rows = self._env_steps.get(_any_number(task), [])
        if not rows:
            assert task.env is not None
            raise CalibrationError(
                f"no step time of {task.env.id} ({task.backend}) is in the calibration: "
                f"run `autoplace calibrate --env {task.env.id}`"
            )
        numbers = np.array([float(m.task.num_envs) for m in rows])
        seconds = np.array([m.median_s for m in rows])
        error = max(_error_fraction(m) for m in rows)
        if len(set(numbers)) == 1:
            # One number alone cannot tell the fixed part from the part per env.
            predicted = float(seconds[0] * task.num_envs / numbers[0])
            error += 0.1 * abs(math.log(task.num_envs / numbers[0]))
        else:
            line = fit_line(rows, lambda t: float(t.num_envs))
            predicted = line(task.num_envs)
        inside = numbers.min() <= task.num_envs <= numbers.max()
        if not inside:
            error *= 1 + abs(math.log(task.num_envs / numbers.max()))
        source = "interpolated" if inside else "extrapolated"
        if inside and rows[0].origin != "measured":
            source = _SOURCES[rows[0].origin]
        return _cost(predicted, _in_context(task, error), source)


# What a cost is called that was taken as it stands, by the origin of the measurement.
_SOURCES = {"measured": "measured", "scaled": "extrapolated", "given": "given"}


def _error_fraction(measurement: Measurement) -> float:
    """Relative standard error of what a measurement stands for."""
    if measurement.origin == "scaled":
        return UNTIMED_ERROR
    return max(measurement.error_fraction, FLOOR_ERROR)


def _as_modelled(cost: Cost) -> Cost:
    """The cost on a machine on which nothing was timed."""
    if cost.source == "given":
        return cost
    error = math.hypot(cost.standard_error_s / cost.seconds, UNTIMED_ERROR)
    source = "extrapolated" if cost.source == "extrapolated" else "modelled"
    return _cost(cost.seconds, error, source)


def _in_context(task: Task, error: float) -> float:
    """The error of a prediction where the task is a step of the trainer's."""
    is_step = task.network is not None or task.env is not None
    return math.hypot(error, CONTEXT_ERROR) if is_step else error


def _any_number(task: Task) -> Task:
    return dataclasses.replace(task, num_envs=0)


def _median_left_out(gp: GaussianProcessRegressor) -> float:
    cholesky = np.asarray(gp.L_)
    inverse = np.linalg.inv(cholesky @ cholesky.T)
    return float(np.median(np.abs(np.asarray(gp.alpha_) / np.diag(inverse))))


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
    return CostModel(calibration)
