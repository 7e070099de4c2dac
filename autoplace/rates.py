"""The basic rates of a machine, fitted to what was timed; the symbols are those of physics."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autoplace.engines import NUMPY
from autoplace.errors import CalibrationError
from autoplace.fit_products import fit_regimes, misses
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.physics import Line, Matmul, Primitives
from autoplace.workload import FLOAT_BYTES

Array = NDArray[np.float64]

_FARTHEST = 60.0  # logarithms beyond which no rate or size is tried
_BLOCKS = (4.0, 8.0, 16.0, 32.0)
_HALF_SIZES = ((0.5, 0.5), (16.0, 0.5), (256.0, 0.5), (8.0, 16.0))


def _fit_matmul(timed: Sequence[Measurement]) -> Matmul:
    single = [m for m in timed if m.task.shape[0] == 1]
    if len(single) < 2:  # too few to tell a rate of their own
        single = []
    rows = [m for m in timed if m not in single]
    shapes = np.array([m.task.shape for m in rows], dtype=float)
    seconds = np.array([m.median_s for m in rows])
    m, k, n = shapes.T
    nbytes = FLOAT_BYTES * (m * k + k * n + m * n)

    def log_ratio(theta: Array, block: float) -> Array:
        flops = 2 * m * k * block * np.ceil(n / block)
        fixed, rate, bandwidth, rows_, columns = np.exp(np.clip(theta, -_FARTHEST, _FARTHEST))
        shape = (1 + rows_ / m) * (1 + columns / n)
        model = fixed + np.maximum(flops / rate * shape, nbytes / bandwidth)
        # What the shapes leave open is drawn, very weakly, towards a rate that holds for all.
        open_ = 1e-3 * (theta[3:] - math.log(0.5))
        return np.concatenate([np.log(model / seconds), open_])

    def fit(start: Array, block: float) -> Any:  # noqa: ANN401 - scipy's result
        return least_squares(
            log_ratio, start, loss="soft_l1", f_scale=0.05, max_nfev=200, args=(block,)
        )

    # Rates and half-rate sizes trade off, so the fit is started from several of the latter.
    rates = seconds.min() / 2, (2 * m * k * n / seconds).max(), 2 * (nbytes / seconds).max()
    starts = [np.log([*rates, *halves]) for halves in _HALF_SIZES]
    best, block = min((fit(start, 1.0) for start in starts), key=lambda found: found.cost), 1.0
    for wider in _BLOCKS:
        found = fit(best.x, wider)
        if found.cost < best.cost:
            best, block = found, wider
    fixed, rate, bandwidth, half_rows, half_columns = np.exp(best.x).tolist()
    fitted = Matmul(fixed, rate, bandwidth, half_rows, half_columns, block)
    if not single:
        return fitted
    line = fit_line(single, lambda t: FLOAT_BYTES * float(t.shape[1] * t.shape[2]))
    return dataclasses.replace(fitted, vector_bytes_per_s=line.bytes_per_s)


def fit_line(rows: Sequence[Measurement], nbytes: Callable[[Task], float]) -> Line:
    """Fit ``a + bytes / B`` with equal weight on every size's relative error."""
    sizes = np.array([nbytes(m.task) for m in rows])
    seconds = np.array([m.median_s for m in rows])
    start = np.log([seconds.min(), (sizes / seconds).max()])

    def log_ratio(theta: Array) -> Array:
        fixed, rate = np.exp(theta)
        return np.asarray(np.log((fixed + sizes / rate) / seconds))

    fit = least_squares(log_ratio, start, loss="soft_l1", f_scale=0.05, max_nfev=200)
    return Line(*np.exp(fit.x).tolist())


def fit_primitives(calibration: Calibration) -> Primitives:
    """The basic rates of a calibrated machine.

    Raises:
        CalibrationError: the basic timings of a device are not complete.
    """
    groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for measurement in calibration.measurements:
        task = measurement.task
        if task.op in ("matmul", "elementwise", "activation"):
            if task.residency == "resident":
                op = "product" if task.engine == NUMPY else task.op
                groups[op, task.device, task.threads].append(measurement)
        elif task.op in ("dispatch", "launch"):
            groups[task.op, task.device].append(measurement)
        elif task.op == "copy":
            groups[task.op, task.device, task.direction, task.pinned].append(measurement)
    found = Primitives(devices=calibration.devices)
    for key, rows in groups.items():
        if key[0] == "dispatch":
            found.dispatch_s[str(key[1])] = rows[0].median_s
        elif key[0] == "launch":
            found.launch_s[str(key[1])] = rows[0].median_s
        elif key[0] in ("matmul", "product") and len(rows) >= 4:
            at, is_numpy = (str(key[1]), int(str(key[2]))), key[0] == "product"
            rates = _fit_matmul(rows)
            (found.numpy_matmul if is_numpy else found.matmul)[at] = rates
            regimes = fit_regimes(rows)
            if regimes and misses(regimes, rows) < misses(rates, rows):
                (found.numpy_regimes if is_numpy else found.regimes)[at] = regimes
        elif key[0] == "elementwise" and len(rows) >= 2:
            found.elementwise[str(key[1]), int(str(key[2]))] = fit_line(
                rows, lambda task: 2.0 * FLOAT_BYTES * task.shape[0]
            )
        elif key[0] == "activation" and len(rows) >= 2:
            found.activation[str(key[1]), int(str(key[2]))] = fit_line(
                rows, lambda task: float(task.shape[0])
            )
        elif key[0] == "copy" and len(rows) >= 2:
            found.copy[str(key[1]), str(key[2]), bool(key[3])] = fit_line(
                rows, lambda task: float(task.shape[0])
            )
    for device in found.devices:
        if device not in found.dispatch_s or not any(d == device for d, _ in found.matmul):
            raise CalibrationError(
                f"the calibration has no complete set of basic timings for {device}: "
                "run `autoplace calibrate` again with a larger --budget"
            )
    return found
