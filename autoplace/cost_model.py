"""What a task costs on a calibrated machine: seconds, an interval, and where they come from.

Every prediction is physics from primitives x a correction fitted on timed steps:

1. *Primitives* are read off the calibration per device: the host's time to issue an operation, the
   latency of a launch, matmul, memory and link rates (:class:`_Primitives`).
2. *Physics* turns a task into a few parts in seconds, such as "operations issued", "arithmetic",
   "memory traffic" (:func:`_physics`), and says whether they add up or overlap.
3. A *correction* per kind of step scales each part by one fitted factor, 1 where nothing was
   timed, and a Gaussian process over the logarithms of sizes learns what is left (caches, kernel
   choice). Its own uncertainty, scaled by leave-one-out errors, is the interval.

======================  ===========================================================================
symbol                  meaning
======================  ===========================================================================
a                       fixed seconds of a call (dispatch, launch and wait)
R, B                    floating-point operations and bytes per second
h                       rows at which a matmul reaches half of R (its left operand has m rows)
c_j                     fitted factor of part j
log-ratio               log(measured seconds / corrected physics)
======================  ===========================================================================

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

from autoplace.errors import CalibrationFault
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.workload import FLOAT_BYTES

Array = NDArray[np.float64]

Z90 = 1.645  # half-width of a 90 % interval in standard deviations
# Least relative standard error of any prediction: two timings of the same thing on a quiet machine
# differ by about this much.
FLOOR_ERROR = 0.01
# Relative standard error of a prediction in whose kind nothing at all was timed.
UNTIMED_ERROR = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one call of a task.

    Attributes:
        seconds: the prediction.
        low_s: lower end of its 90 % interval.
        high_s: upper end of its 90 % interval.
        source: ``measured``, ``interpolated`` or ``extrapolated``.
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
# Primitives: one line of physics each


@dataclass(frozen=True, slots=True)
class _Matmul:
    """Seconds of an (m, k) @ (k, n): a + max(flops / R x (1 + h / m), bytes / B)."""

    fixed_s: float
    flops_per_s: float
    bytes_per_s: float
    half_rows: float

    def work_s(self, m: float, k: float, n: float) -> float:
        """Seconds without the fixed part."""
        flops = 2.0 * m * k * n
        nbytes = FLOAT_BYTES * (m * k + k * n + m * n)
        return max(flops / self.flops_per_s * (1 + self.half_rows / m), nbytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class _Line:
    """Seconds of something whose time grows with its bytes: a + bytes / B."""

    fixed_s: float
    bytes_per_s: float

    def __call__(self, nbytes: float) -> float:
        return self.fixed_s + nbytes / self.bytes_per_s


def _fit_matmul(rows: Sequence[Measurement]) -> _Matmul:
    shapes = np.array([m.task.shape for m in rows], dtype=float)
    seconds = np.array([m.median_s for m in rows])
    m, k, n = shapes.T
    flops = 2 * m * k * n
    nbytes = FLOAT_BYTES * (m * k + k * n + m * n)
    start = np.log([seconds.min() / 2, (flops / seconds).max(), 2 * (nbytes / seconds).max(), 0.5])

    def log_ratio(theta: Array) -> Array:
        fixed, rate, bandwidth, half = np.exp(theta)
        model = fixed + np.maximum(flops / rate * (1 + half / m), nbytes / bandwidth)
        return np.asarray(np.log(model / seconds))

    fit = least_squares(log_ratio, start, loss="soft_l1", f_scale=0.05, max_nfev=200)
    fixed, rate, bandwidth, half = np.exp(fit.x)
    return _Matmul(fixed, rate, bandwidth, half)


def _fit_line(rows: Sequence[Measurement], nbytes: Callable[[Task], float]) -> _Line:
    sizes = np.array([nbytes(m.task) for m in rows])
    seconds = np.array([m.median_s for m in rows])
    start = np.log([seconds.min(), (sizes / seconds).max()])

    def log_ratio(theta: Array) -> Array:
        fixed, rate = np.exp(theta)
        return np.asarray(np.log((fixed + sizes / rate) / seconds))

    fit = least_squares(log_ratio, start, loss="soft_l1", f_scale=0.05, max_nfev=200)
    fixed, rate = np.exp(fit.x)
    return _Line(fixed, rate)


class _Primitives:
    """The machine's basic rates, per device, and on the CPU per thread count."""

    def __init__(self, calibration: Calibration) -> None:
        groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
        for measurement in calibration.measurements:
            task = measurement.task
            if task.op in ("matmul", "elementwise") and task.residency == "resident":
                groups[task.op, task.device, task.threads].append(measurement)
            elif task.op in ("dispatch", "launch"):
                groups[task.op, task.device].append(measurement)
            elif task.op == "copy":
                groups[task.op, task.device, task.direction, task.pinned].append(measurement)
        self.dispatch_s: dict[str, float] = {}
        self.launch_s: dict[str, float] = {}
        self.matmul: dict[tuple[str, int], _Matmul] = {}
        self.elementwise: dict[tuple[str, int], _Line] = {}
        self.copy: dict[tuple[str, str, bool], _Line] = {}
        for key, rows in groups.items():
            if key[0] == "dispatch":
                self.dispatch_s[str(key[1])] = rows[0].median_s
            elif key[0] == "launch":
                self.launch_s[str(key[1])] = rows[0].median_s
            elif key[0] == "matmul" and len(rows) >= 4:
                self.matmul[str(key[1]), int(str(key[2]))] = _fit_matmul(rows)
            elif key[0] == "elementwise" and len(rows) >= 2:
                self.elementwise[str(key[1]), int(str(key[2]))] = _fit_line(
                    rows, lambda task: 2.0 * FLOAT_BYTES * task.shape[0]
                )
            elif key[0] == "copy" and len(rows) >= 2:
                self.copy[str(key[1]), str(key[2]), bool(key[3])] = _fit_line(
                    rows, lambda task: float(task.shape[0])
                )
        for device in calibration.devices:
            if device not in self.dispatch_s or not any(d == device for d, _ in self.matmul):
                raise CalibrationFault(
                    f"the calibration has no complete set of basic timings for {device}: "
                    "run `autoplace calibrate` again with a larger --budget"
                )
        self.devices = calibration.devices

    def thread_count(self, device: str, threads: int) -> int:
        """The timed thread count nearest to ``threads``, in ratio."""
        counts = [count for name, count in self.matmul if name == device]
        return min(counts, key=lambda count: (abs(math.log(count / threads)), count))

    def matmul_for(self, device: str, threads: int) -> _Matmul:
        return self.matmul[device, self.thread_count(device, threads)]

    def memory_s(self, device: str, threads: int, nbytes: float) -> float:
        """Seconds to stream ``nbytes`` through the device's memory."""
        line = self.elementwise.get((device, self.thread_count(device, threads)))
        if line is None:
            line = self.elementwise.get((device, 1))
        if line is None:
            return nbytes / self.matmul_for(device, threads).bytes_per_s
        return nbytes / line.bytes_per_s

    def launch_only_s(self, device: str) -> float:
        """Seconds between the issue of one tiny operation and its end, the issue left out."""
        latency_s = self.launch_s.get(device, self.dispatch_s[device])
        return max(latency_s - self.dispatch_s[device], 0.0)

    def copy_s(self, device: str, direction: str, pinned: bool, nbytes: float) -> float:
        line = self.copy.get((device, direction, pinned)) or self.copy.get(
            (device, direction, not pinned)
        )
        if line is None:
            raise CalibrationFault(
                f"the calibration has no copies ({direction}) for {device}: "
                "run `autoplace calibrate` again with a larger --budget"
            )
        return line(nbytes)


# --------------------------------------------------------------------------------------------------
# Physics: a task as parts, in seconds


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a task's time is made of.

    Attributes:
        host_s: parts that the host does one after the other.
        device_s: parts that the device does meanwhile; empty on the CPU.
        tail_s: parts that start when both are done.
    """

    host_s: tuple[float, ...]
    device_s: tuple[float, ...] = ()
    tail_s: tuple[float, ...] = ()
    wait_only: bool = False

    @property
    def flat(self) -> tuple[float, ...]:
        return (*self.host_s, *self.device_s, *self.tail_s)

    def total_s(self, factors: Iterable[float]) -> float:
        """Seconds with each part scaled by its factor.

        Where ``wait_only``, what counts is how long the host waits for the device after having
        done its own part.
        """
        scaled = [part * factor for part, factor in zip(self.flat, factors, strict=True)]
        num_host, num_device = len(self.host_s), len(self.device_s)
        host = sum(scaled[:num_host])
        on_device = sum(scaled[num_host : num_host + num_device])
        tail = sum(scaled[num_host + num_device :])
        if self.wait_only:
            return max(on_device - host, 0.0) + tail
        return max(host, on_device) + tail


# Operations that the eager engine issues, counted from its code: (fixed, per hidden layer).
_POLICY_OPS = (8, 2)
_UPDATE_OPS = (70, 20)
_GAE_OPS = (50, 8, 4)  # and per round of the scan


_Layers = Sequence[tuple[int, int]]


def _network_work_s(
    primitives: _Primitives, device: str, threads: int, layers: _Layers, rows: float
) -> float:
    model = primitives.matmul_for(device, threads)
    return sum(model.work_s(rows, inputs, outputs) for inputs, outputs in layers)


def _activation_bytes(layers: _Layers, rows: float) -> float:
    return FLOAT_BYTES * rows * sum(outputs for _, outputs in layers)


def _physics(primitives: _Primitives, task: Task) -> _Parts:
    device, threads = task.device, task.threads
    dispatch_s = primitives.dispatch_s[device]
    on_device = device != "cpu"
    launch_s = primitives.launch_only_s(device) if on_device else 0.0

    def step(ops: float, arithmetic_s: float, nbytes: float) -> _Parts:
        memory_s = primitives.memory_s(device, threads, nbytes)
        if on_device:
            return _Parts((ops * dispatch_s,), (ops * launch_s, arithmetic_s, memory_s))
        return _Parts((ops * dispatch_s, arithmetic_s, memory_s))

    if task.op in ("dispatch", "launch"):
        source = primitives.dispatch_s if task.op == "dispatch" else primitives.launch_s
        return _Parts((source.get(device, dispatch_s),))
    if task.op == "matmul":
        model = primitives.matmul_for(device, threads)
        m, k, n = task.shape
        on_the_device_s = (model.fixed_s, model.work_s(m, k, n))
        if task.residency == "resident":
            return _Parts(on_the_device_s)
        copied_s = (
            primitives.copy_s(device, "h2d", False, FLOAT_BYTES * m * k)
            + primitives.copy_s(device, "h2d", False, FLOAT_BYTES * k * n)
            + primitives.copy_s(device, "d2h", False, FLOAT_BYTES * m * n)
        )
        return _Parts((*on_the_device_s, copied_s))
    if task.op == "elementwise":
        nbytes = 2.0 * FLOAT_BYTES * task.shape[0]
        fixed_s = dispatch_s + launch_s
        return _Parts((fixed_s, primitives.memory_s(device, threads, nbytes)))
    if task.op == "copy":
        assert task.direction is not None
        return _Parts(
            (primitives.copy_s(device, task.direction, bool(task.pinned), float(task.shape[0])),)
        )
    if task.op == "gae":
        assert task.network is not None
        steps, envs = task.shape
        layers = task.network.layers
        rounds = math.ceil(math.log2(max(steps, 2)))
        fixed, per_layer, per_round = _GAE_OPS
        ops = fixed + per_layer * len(layers) / 2 + per_round * rounds
        # The whole rollout passes the network once; the scan streams it a few times per round.
        arithmetic_s = _network_work_s(primitives, device, threads, layers, steps * envs)
        nbytes = 2.0 * _activation_bytes(layers, steps * envs) + FLOAT_BYTES * steps * envs * (
            4.0 * task.network.observation_size + 16 + 8 * rounds
        )
        return step(ops, arithmetic_s, nbytes)

    network = task.network
    assert network is not None, task
    depth = len(network.hidden_sizes)
    rows = task.rows
    if task.op == "update":
        fixed, per_layer = _UPDATE_OPS
        ops = fixed + per_layer * depth
        arithmetic_s = 3 * _network_work_s(primitives, device, threads, network.layers, rows)
        # Activations and their gradients, written and read; weights, gradients and both moments of
        # Adam likewise; the gathered rows.
        nbytes = 6.0 * _activation_bytes(network.layers, rows) + FLOAT_BYTES * (
            14.0 * network.num_parameters + 2.0 * rows * network.observation_size
        )
        return step(ops, arithmetic_s, nbytes)
    fixed, per_layer = _POLICY_OPS
    ops = fixed + per_layer * depth
    if task.op == "policy_step":
        arithmetic_s = _network_work_s(primitives, device, threads, network.actor_layers, rows)
        parts = step(ops, arithmetic_s, 2.0 * _activation_bytes(network.actor_layers, rows))
        # On an accelerator the step is issued, and the wait belongs to the action that comes back.
        return _Parts(parts.host_s) if on_device else parts
    if task.op == "obs_to_device":
        nbytes = FLOAT_BYTES * rows * network.observation_size
        host_copy_s = primitives.memory_s("cpu", 1, 2.0 * nbytes)
        return _Parts((dispatch_s, host_copy_s))
    if task.op == "action_to_host":
        to_device_s = primitives.copy_s(
            device, "h2d", True, FLOAT_BYTES * rows * network.observation_size
        )
        arithmetic_s = _network_work_s(primitives, device, threads, network.actor_layers, rows)
        memory_s = primitives.memory_s(
            device, threads, 2.0 * _activation_bytes(network.actor_layers, rows)
        )
        action_numbers = rows * (network.action_size if network.continuous else 2)
        to_host_s = primitives.copy_s(device, "d2h", True, FLOAT_BYTES * action_numbers)
        return _Parts(
            ((ops + 1) * dispatch_s,),
            (to_device_s, ops * launch_s, arithmetic_s, memory_s),
            (to_host_s,),
            wait_only=True,
        )
    if task.op == "weights_to_host":
        # The network is one buffer: its weights, and mean, variance and scale of observations.
        nbytes = FLOAT_BYTES * (network.num_parameters + 3.0 * network.observation_size)
        to_host_s = primitives.copy_s(device, "d2h", True, nbytes)
        return _Parts((to_host_s, primitives.memory_s("cpu", 1, 2.0 * nbytes)))
    raise AssertionError(f"no physics for {task.op}")


# --------------------------------------------------------------------------------------------------
# Corrections: what was timed, against the physics


def _features(task: Task) -> tuple[float, ...]:
    """Logarithms of the sizes that a correction may depend on."""
    sizes: list[float] = [float(task.threads)]
    if task.shape:
        sizes += [float(size) for size in task.shape]
    if task.network is not None:
        network = task.network
        width = network.num_parameters / sum(o for _, o in network.layers)
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
    )


# Length scales, in multiples of each feature's spread, among which the likelihood chooses.
_LENGTH_SCALES = (0.5, 1.0, 2.0, 4.0)
# Standard deviations of the log-ratio among which the likelihood chooses.
_SIGNALS = (0.03, 0.1, 0.3)
_NUGGET = 0.01


class _Correction:
    """Factors of the parts, and a Gaussian process on the log-ratio that they leave."""

    def __init__(self, rows: Sequence[Measurement], physics: Callable[[Task], _Parts]) -> None:
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
    def _fit_factors(parts: Sequence[_Parts], seconds: Array) -> Array:
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
        self, tasks: Sequence[Task], parts: Sequence[_Parts]
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
        self._primitives = _Primitives(calibration)
        groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
        self._env_steps: dict[Task, list[Measurement]] = defaultdict(list)
        for measurement in calibration.measurements:
            task = measurement.task
            if task.op == "env_step":
                self._env_steps[_any_number(task)].append(measurement)
            else:
                groups[_kind(task)].append(measurement)
        self._corrections = {kind: _Correction(rows, self._parts) for kind, rows in groups.items()}

    def _parts(self, task: Task) -> _Parts:
        return _physics(self._primitives, task)

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
            CalibrationFault: a task concerns a device or an environment that was never measured.
        """
        distinct = list(dict.fromkeys(tasks))
        costs: dict[Task, Cost] = {}
        pending: dict[tuple[object, ...], list[Task]] = defaultdict(list)
        for task in distinct:
            measured = self._measured.get(task)
            if measured is not None:
                error = max(measured.error_fraction, FLOOR_ERROR)
                costs[task] = _cost(measured.median_s, error, "measured")
            elif task.op == "env_step":
                costs[task] = self._env_step(task)
            else:
                pending[_kind(task)].append(task)
        for kind, group in pending.items():
            costs.update(self._predict_kind(kind, group))
        return {task: costs[task] for task in distinct}

    def _predict_kind(self, kind: tuple[object, ...], group: Sequence[Task]) -> dict[Task, Cost]:
        if group[0].device not in self.devices:
            raise CalibrationFault(
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
            task: _cost(float(s), float(e), "extrapolated" if out else "interpolated")
            for task, s, e, out in zip(group, seconds, errors, outside, strict=True)
        }

    def _env_step(self, task: Task) -> Cost:
        """A vector step of n envs costs a + b n, from the measured numbers of the same env."""
        rows = self._env_steps.get(_any_number(task), [])
        if not rows:
            assert task.env is not None
            raise CalibrationFault(
                f"no step time of {task.env.id} ({task.backend}) is in the calibration: "
                f"run `autoplace calibrate --env {task.env.id}`"
            )
        numbers = np.array([float(m.task.num_envs) for m in rows])
        seconds = np.array([m.median_s for m in rows])
        error = max(max(m.error_fraction for m in rows), FLOOR_ERROR)
        if len(set(numbers)) == 1:
            # One number alone cannot tell the fixed part from the part per env.
            predicted = float(seconds[0] * task.num_envs / numbers[0])
            error += 0.1 * abs(math.log(task.num_envs / numbers[0]))
        else:
            line = _fit_line(rows, lambda t: float(t.num_envs))
            predicted = line(task.num_envs)
        inside = numbers.min() <= task.num_envs <= numbers.max()
        if not inside:
            error *= 1 + abs(math.log(task.num_envs / numbers.max()))
        return _cost(predicted, error, "interpolated" if inside else "extrapolated")


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
        CalibrationFault: the calibration lacks the basic timings of one of its devices.
    """
    return CostModel(calibration)
