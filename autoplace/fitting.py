"""Fits the parameters of a cost model to a calibration, with scipy and scikit-learn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import least_squares
from scipy.special import logsumexp
from sklearn.gaussian_process.kernels import Matern

from autoplace.correction import (
    FACTOR_ERROR,
    Z90,
    covariances,
    features_of,
    linearised,
    spreads_of,
)
from autoplace.measurement import Calibration, Measurement
from autoplace.model_parameters import CorrectionParameters, ModelParameters, Timed
from autoplace.physics import Line, Parts, physics
from autoplace.rates import fit_line, fit_primitives
from autoplace.standard_errors import standard_errors

Array = NDArray[np.float64]

# Relative standard errors of times that have no samples of their own to tell it.
_UNSAMPLED_ERRORS = {"measured": FACTOR_ERROR, "scaled": FACTOR_ERROR, "given": 0.0}
# What is averaged over: length scales in multiples of each feature's spread, standard deviations of
# the smooth part, and of each task's own deviation.
_LENGTHS = (0.5, 1.0, 2.0, 4.0)
_SIGNALS = (0.003, 0.01, 0.03, 0.1, 0.3)
_NUGGETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
_HYPERPARAMETERS = tuple(itertools.product(_LENGTHS, _SIGNALS, _NUGGETS))
_LEAST_WEIGHT = 0.01  # of hyperparameters, against the best; what is less likely is left out
_LEARNING_ROUNDS = 20  # of expectation maximisation
# What is slower than its kind by more than this, in logarithms, and by so many spreads is doubted.
_OUT_OF_LINE, _OUT_OF_LINE_SPREADS = 1.0, 8.0
_TASKS_FOR_HALF = 20  # left-out tasks whose say in the length of intervals is worth one half


def fit_parameters(calibration: Calibration) -> ModelParameters:
    """The parameters of the cost model of a calibrated machine; takes well under a second.

    Raises:
        CalibrationError: the calibration lacks the basic timings of one of its devices.
    """
    primitives, timed = fit_primitives(calibration), Timed.of(calibration)
    known, visits = standard_errors(timed.rows)
    errors = {m.task: known.get(m.task, _UNSAMPLED_ERRORS[m.origin]) for m in timed.rows}
    kinds = [
        _Kind(
            rows,
            [physics(primitives, m.task) for m in rows],
            np.array([errors[m.task] for m in rows]),
        )
        for rows in timed.by_kind.values()
    ]
    for kind, rows in zip(kinds, timed.by_kind.values(), strict=True):
        errors.update(zip((m.task for m in rows), kind.errors.tolist(), strict=True))
    log_prior = _shared_prior(np.array([kind.log_likelihood for kind in kinds]))
    return ModelParameters(
        primitives=primitives,
        errors=tuple(errors[m.task] for m in timed.rows),
        visits=visits,
        corrections=tuple(kind.weighed(log_prior) for kind in kinds),
        env_lines=tuple(map(_env_line, timed.env_steps.values())),
    )


def _env_line(rows: Sequence[Measurement]) -> Line | None:
    """One number of environments alone cannot tell the fixed part from the part per env."""
    if len({m.task.num_envs for m in rows}) == 1:
        return None
    return fit_line(rows, lambda task: float(task.num_envs))


class _Kind:
    """The timings of one kind of task, under all hyperparameters.

    Args:
        rows: what was timed.
        parts: the physics of each.
        errors: the standard error of each median, relative.

    Attributes:
        errors: likewise, of what is out of line as much as it is.
        log_likelihood: of the timings, under each of the hyperparameters.
    """

    def __init__(self, rows: Sequence[Measurement], parts: Sequence[Parts], errors: Array) -> None:
        log_seconds = np.log([m.median_s for m in rows])
        self._factors = _fit_factors(parts, log_seconds)
        base, gradients = linearised(parts, self._factors)
        self._residual = log_seconds - base
        # Streams go by a curve: every cache has a rate of its own, far from the others perhaps.
        is_stream = rows[0].task.op == "elementwise"
        self.errors = errors if is_stream else _doubted(self._residual, errors)
        features = np.array([features_of(m.task) for m in rows])
        self._covariances = covariances(
            gradients,
            self.errors,
            features / spreads_of(features),
            _HYPERPARAMETERS,
            lambda timed, length: np.asarray(Matern(length, nu=1.5)(timed)),
        )
        self.log_likelihood = np.array([_log_density(self._residual, k) for k in self._covariances])

    def weighed(self, log_prior: Array) -> CorrectionParameters:
        """The average over the hyperparameters with this prior."""
        posterior = self.log_likelihood + log_prior
        kept = posterior > posterior.max() + np.log(_LEAST_WEIGHT)
        weights = np.exp(posterior[kept] - logsumexp(posterior[kept]))
        inverses = np.linalg.inv(self._covariances[kept])
        # Leave-one-out errors in closed form (Rasmussen and Williams 2006, eq. 5.12).
        variances = 1 / np.diagonal(inverses, axis1=1, axis2=2)
        misses = (inverses @ self._residual) * variances
        left_out = weights @ misses
        deviations = np.sqrt(weights @ (variances + misses**2) - left_out**2)
        return CorrectionParameters(
            factors=tuple(self._factors),
            hyperparameters=tuple(itertools.compress(_HYPERPARAMETERS, kept)),
            weights=tuple(weights.tolist()),
            left_out=tuple(left_out.tolist()),
            stretch=_stretch(np.abs(left_out) / deviations),
        )


def _doubted(residual: Array, errors: Array) -> Array:
    """Standard errors, of what took far longer than others of its kind as long as it missed them.

    Threads that share a core with another program, or with each other, may wait for time slices as
    long as a task is timed: thousands of times what it takes.
    """
    off = residual - np.median(residual)
    limit = max(_OUT_OF_LINE, _OUT_OF_LINE_SPREADS * 1.4826 * float(np.median(np.abs(off))))
    return np.where(off > limit, np.maximum(errors, off), errors)


def _log_density(residual: Array, covariance: Array) -> float:
    """Log N(residual; 0, K), up to a constant."""
    factor = cholesky(covariance, lower=True, check_finite=False)
    whitened = solve_triangular(factor, residual, lower=True, check_finite=False)
    return float(-0.5 * whitened @ whitened - np.sum(np.log(np.diag(factor))))


def _shared_prior(log_likelihoods: Array) -> Array:
    """Logarithms of how likely all kinds ``[K, H]`` make each of the hyperparameters ``[H]``.

    Few timings of one kind cannot tell its deviations from noise; those of all kinds together can.
    The prior is the mixture that makes all timings likeliest, with one more kind that says nothing
    (expectation maximisation), so that none is ruled out.
    """
    uniform = np.full((1, len(_HYPERPARAMETERS)), -np.log(len(_HYPERPARAMETERS)))
    log_prior = uniform[0]
    for _ in range(_LEARNING_ROUNDS):
        posterior = log_likelihoods + log_prior
        posterior -= logsumexp(posterior, axis=1, keepdims=True)
        log_prior = logsumexp(np.vstack([posterior, uniform]), axis=0)
        log_prior -= np.log(len(log_likelihoods) + 1)
    return np.asarray(log_prior)


def _stretch(z_scores: Array) -> float:
    """How much longer the stated intervals should be for 90 % of the left-out tasks to be in them.

    What few tasks say is drawn towards 1.
    """
    count = len(z_scores)
    if count < 5:
        return 1.0
    found = float(np.quantile(z_scores, 0.9, method="median_unbiased")) / Z90
    return float(found ** (count / (count + _TASKS_FOR_HALF)))


def _fit_factors(parts: Sequence[Parts], log_seconds: Array) -> list[float]:
    """Factors c_j > 0, each drawn towards 1 as far as the timings leave it open."""
    num_parts = len(parts[0].flat)

    def residual(theta: Array) -> Array:
        factors = np.exp(theta)
        model = np.log([p.total_s(factors) for p in parts])
        return np.concatenate([(model - log_seconds) / 0.1, theta / 1.5])

    def jacobian(theta: Array) -> Array:
        factors = np.exp(theta)
        gradients = np.array([p.gradient(factors)[:num_parts] for p in parts])
        return np.vstack([gradients / 0.1, np.eye(num_parts) / 1.5])

    fit = least_squares(
        residual, np.zeros(num_parts), jacobian, loss="soft_l1", f_scale=1.0, max_nfev=60
    )
    found: list[float] = np.exp(fit.x).tolist()
    return found
