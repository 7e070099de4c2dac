"""What timed tasks of one kind say about others: physics, its uncertain rates, and what is left.

The logarithm of a task's seconds is modelled as

    y(x) = log p(x; c) + g(x) + u,

``p`` the physics with one factor per part (and, for products, the rates that shape it), ``g`` a
smooth function of the logarithms of sizes, ``u`` each task's own deviation. Factors are fitted
first, robustly; around them the physics is linear in their logarithms, so that all three together
are one Gaussian process (universal kriging; Rasmussen and Williams 2006, section 2.7):

    K = J S J' + s^2 Matern(length, nu=1.5) + nugget^2 I + diag(standard errors^2),

``J`` the derivatives of ``log p``, ``S`` how far a factor may be off. What the timings leave open
of the factors widens a prediction as much as it matters there, and predictions that share them are
known to err together. ``s``, ``length`` and ``nugget`` are averaged over, each by its likelihood.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.special import logsumexp

from autoplace.measurement import Measurement, Task
from autoplace.physics import Parts

Array = NDArray[np.float64]

Z90 = 1.645  # half-width of a 90 % interval in standard deviations
# How far the logarithm of a factor may be off, as a standard deviation.
FACTOR_ERROR = 0.35
# What is averaged over: length scales in multiples of each feature's spread, standard deviations of
# the smooth part, and of each task's own deviation.
_LENGTHS = (0.5, 1.0, 2.0, 4.0)
_SIGNALS = (0.003, 0.01, 0.03, 0.1, 0.3)
_NUGGETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
_HYPERPARAMETERS = tuple(itertools.product(_LENGTHS, _SIGNALS, _NUGGETS))
_LEAST_WEIGHT = 0.01  # of hyperparameters, against the best; what is less likely is left out
_LEARNING_ROUNDS = 20  # of expectation maximisation
_TASKS_FOR_HALF = 20  # left-out tasks whose say in the length of intervals is worth one half
# Least spread of a feature, in logarithms: what hardly varied is not told apart.
_LEAST_SPREAD = 0.3


def features_of(task: Task) -> tuple[float, ...]:
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
    return tuple(float(np.log(size)) for size in sizes)


class Correction:
    """The model of one kind of task, ready after :func:`share_hyperparameters`.

    Args:
        rows: what was timed.
        parts: the physics of each.
        errors: the standard error of each median, relative.

    Attributes:
        factors: of the parts.
        log_likelihood: of the timings, under each of the hyperparameters.
        left_out: by how much the logarithm of each task is missed by the others.
        stretch: what makes 90 % of the intervals of left-out tasks hold.
    """

    def __init__(self, rows: Sequence[Measurement], parts: Sequence[Parts], errors: Array) -> None:
        log_seconds = np.log([m.median_s for m in rows])
        self.factors = _fit_factors(parts, log_seconds)
        base, self._gradients = self._physics(parts)
        residual = log_seconds - base
        features = np.array([features_of(m.task) for m in rows])
        self._low, self._high = features.min(axis=0), features.max(axis=0)
        self._scale = np.maximum(features.std(axis=0), _LEAST_SPREAD)
        self._features = features / self._scale
        smooth = {length: _smooth(self._features, self._features, length) for length in _LENGTHS}
        shared = FACTOR_ERROR**2 * self._gradients @ self._gradients.T + np.diag(errors**2)
        identity = np.eye(len(rows))
        covariances = np.array(
            [
                shared + signal**2 * smooth[length] + nugget**2 * identity
                for length, signal, nugget in _HYPERPARAMETERS
            ]
        )
        _, log_determinants = np.linalg.slogdet(covariances)
        distances = np.linalg.inv(covariances) @ residual @ residual
        # log N(residual; 0, K), up to a constant
        self.log_likelihood = -0.5 * (distances + log_determinants)
        self._covariances, self._residual = covariances, residual

    def weigh(self, log_prior: Array) -> None:
        """Average over the hyperparameters with this prior."""
        posterior = self.log_likelihood + log_prior
        kept = posterior > posterior.max() + np.log(_LEAST_WEIGHT)
        self._hyperparameters = [h for h, keep in zip(_HYPERPARAMETERS, kept, strict=True) if keep]
        self._weights = np.exp(posterior[kept] - logsumexp(posterior[kept]))
        self._inverses = np.linalg.inv(self._covariances[kept])
        self._solved = self._inverses @ self._residual
        # Leave-one-out errors in closed form (Rasmussen and Williams 2006, eq. 5.12).
        variances = 1 / np.diagonal(self._inverses, axis1=1, axis2=2)
        misses = self._solved * variances
        self.left_out = self._weights @ misses
        deviations = np.sqrt(self._weights @ (variances + misses**2) - self.left_out**2)
        self.stretch = _stretch(np.abs(self.left_out) / deviations)

    def _physics(self, parts: Sequence[Parts]) -> tuple[Array, Array]:
        base = np.log([p.total_s(self.factors) for p in parts])
        return base, np.array([p.gradient(self.factors) for p in parts])

    def predict(
        self, tasks: Sequence[Task], parts: Sequence[Parts]
    ) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Log-seconds, their standard errors, and whether each task is outside what was timed."""
        mean, covariance, nugget = self._posterior(tasks, parts)
        features = np.array([features_of(task) for task in tasks])
        beyond = np.maximum(self._low - features, features - self._high) / self._scale
        outside = beyond.max(axis=1)
        error = self.stretch * np.sqrt(np.diag(covariance) + nugget)
        # Outside of what was timed the error grows with the distance.
        return mean, error * (1 + np.maximum(outside, 0.0)), outside > 0.1

    def joint(self, tasks: Sequence[Task], parts: Sequence[Parts]) -> tuple[Array, Array]:
        """Log-seconds without each task's own deviation, and their covariances."""
        mean, covariance, _ = self._posterior(tasks, parts)
        return mean, self.stretch**2 * covariance

    def _posterior(
        self, tasks: Sequence[Task], parts: Sequence[Parts]
    ) -> tuple[Array, Array, float]:
        """Mean and covariance of the smooth part, and the variance of a task's own deviation."""
        base, gradients = self._physics(parts)
        features = np.array([features_of(task) for task in tasks]) / self._scale
        by_rates = FACTOR_ERROR**2 * gradients @ gradients.T
        by_rates_to_timed = FACTOR_ERROR**2 * gradients @ self._gradients.T
        means, covariance, nugget_variance = [], np.zeros_like(by_rates), 0.0
        for (length, signal, nugget), weight, inverse, solved in zip(
            self._hyperparameters, self._weights, self._inverses, self._solved, strict=True
        ):
            across = by_rates_to_timed + signal**2 * _smooth(features, self._features, length)
            means.append(across @ solved)
            own = by_rates + signal**2 * _smooth(features, features, length)
            covariance += weight * (own - across @ inverse @ across.T)
            nugget_variance += weight * nugget**2
        mean = self._weights @ np.array(means)
        off = np.array(means) - mean
        covariance += (self._weights * off.T) @ off
        return base + mean, covariance, nugget_variance


def _smooth(left: Array, right: Array, length: float) -> Array:
    """Matérn's kernel with nu = 3/2 of the rows ``[M, F]`` and ``[N, F]``.

    Rougher than a Gaussian: libraries change their algorithms from one size to the next.
    """
    from sklearn.gaussian_process.kernels import Matern  # slow to import, and runs fit nothing

    return np.asarray(Matern(length, nu=1.5)(left, right))


def _stretch(z_scores: Array) -> float:
    """How much longer the stated intervals should be for 90 % of the left-out tasks to be in them.

    What few tasks say is drawn towards 1.
    """
    count = len(z_scores)
    if count < 5:
        return 1.0
    found = float(np.quantile(z_scores, 0.9, method="median_unbiased")) / Z90
    return float(found ** (count / (count + _TASKS_FOR_HALF)))


def share_hyperparameters(corrections: Sequence[Correction]) -> None:
    """Learn from all kinds which hyperparameters are likely, and weigh each kind's by it.

    Few timings of one kind cannot tell its deviations from noise; those of all kinds together can.
    The prior is the mixture that makes all timings likeliest, with one more kind that says nothing
    (expectation maximisation), so that none is ruled out.
    """
    log_likelihoods = np.array([c.log_likelihood for c in corrections])
    uniform = np.full((1, len(_HYPERPARAMETERS)), -np.log(len(_HYPERPARAMETERS)))
    log_prior = uniform[0]
    for _ in range(_LEARNING_ROUNDS):
        posterior = log_likelihoods + log_prior
        posterior -= logsumexp(posterior, axis=1, keepdims=True)
        log_prior = logsumexp(np.vstack([posterior, uniform]), axis=0)
        log_prior -= np.log(len(corrections) + 1)
    for correction in corrections:
        correction.weigh(log_prior)


def _fit_factors(parts: Sequence[Parts], log_seconds: Array) -> Array:
    """Factors c_j > 0, each drawn towards 1 as far as the timings leave it open."""
    num_parts = len(parts[0].flat)

    def residual(theta: Array) -> Array:
        factors = np.exp(theta)
        model = np.log([p.total_s(factors) for p in parts])
        return np.concatenate([(model - log_seconds) / 0.1, theta / 1.5])

    fit = least_squares(residual, np.zeros(num_parts), loss="soft_l1", f_scale=1.0, max_nfev=60)
    return np.asarray(np.exp(fit.x))
