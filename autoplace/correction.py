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
known to err together. ``s``, ``length`` and ``nugget`` are averaged over, each by its likelihood
(:mod:`autoplace.fitting`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoplace.measurement import Measurement, Task
from autoplace.model_parameters import CorrectionParameters
from autoplace.physics import Parts

Array = NDArray[np.float64]
Kernel = Callable[[Array, float], Array]  # features [N, F] and a length to [N, N]

Z90 = 1.645  # half-width of a 90 % interval in standard deviations
# How far the logarithm of a factor may be off, as a standard deviation.
FACTOR_ERROR = 0.35
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


def spreads_of(features: Array) -> Array:
    """What each column of features ``[N, F]`` is divided by ``[F]``."""
    return np.asarray(np.maximum(features.std(axis=0), _LEAST_SPREAD))


def linearised(parts: Sequence[Parts], factors: Sequence[float]) -> tuple[Array, Array]:
    """Logarithms of seconds ``[N]`` and their derivatives by those of the factors ``[N, P]``."""
    base = np.log([p.total_s(factors) for p in parts])
    return base, np.array([p.gradient(factors) for p in parts])


def covariances(
    gradients: Array,
    errors: Array,
    features: Array,
    hyperparameters: Iterable[tuple[float, float, float]],
    kernel: Kernel,
) -> Array:
    """``K`` of timed tasks under each of the hyperparameters ``[H, N, N]``."""
    shared = FACTOR_ERROR**2 * gradients @ gradients.T + np.diag(errors**2)
    identity = np.eye(len(errors))
    smooth: dict[float, Array] = {}
    found = []
    for length, signal, nugget in hyperparameters:
        if length not in smooth:
            smooth[length] = kernel(features, length)
        found.append(shared + signal**2 * smooth[length] + nugget**2 * identity)
    return np.array(found)


class Correction:
    """The model of one kind of task.

    Args:
        rows: what was timed.
        parts: the physics of each.
        errors: the standard error of each median, relative.
        parameters: what was fitted to them.
    """

    def __init__(
        self,
        rows: Sequence[Measurement],
        parts: Sequence[Parts],
        errors: Array,
        parameters: CorrectionParameters,
    ) -> None:
        self.parameters = parameters
        base, self._gradients = linearised(parts, parameters.factors)
        residual = np.log([m.median_s for m in rows]) - base
        features = np.array([features_of(m.task) for m in rows])
        self._low, self._high = features.min(axis=0), features.max(axis=0)
        self._scale = spreads_of(features)
        self._features = features / self._scale
        self._weights = np.array(parameters.weights)
        self._inverses = np.linalg.inv(
            covariances(
                self._gradients,
                errors,
                self._features,
                parameters.hyperparameters,
                lambda timed, length: _smooth(timed, timed, length),
            )
        )
        self._solved = self._inverses @ residual

    def predict(
        self, tasks: Sequence[Task], parts: Sequence[Parts]
    ) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Log-seconds, their standard errors, and whether each task is outside what was timed."""
        features = np.array([features_of(task) for task in tasks])
        base, gradients = linearised(parts, self.parameters.factors)
        by_rates = FACTOR_ERROR**2 * (gradients**2).sum(axis=1)
        means, variances = [], []
        for across, inverse, solved, (_, signal, nugget) in self._across(features, gradients):
            means.append(across @ solved)
            known = ((across @ inverse) * across).sum(axis=1)
            variances.append(by_rates + signal**2 - known + nugget**2)
        mean = self._weights @ np.array(means)
        variance = self._weights @ (np.array(variances) + (np.array(means) - mean) ** 2)
        beyond = np.maximum(self._low - features, features - self._high) / self._scale
        outside = beyond.max(axis=1)
        # Outside of what was timed the error grows with the distance.
        error = self.parameters.stretch * np.sqrt(variance) * (1 + np.maximum(outside, 0.0))
        return base + mean, error, outside > 0.1

    def joint(self, tasks: Sequence[Task], parts: Sequence[Parts]) -> tuple[Array, Array]:
        """Log-seconds without each task's own deviation, and their covariances."""
        features = np.array([features_of(task) for task in tasks])
        base, gradients = linearised(parts, self.parameters.factors)
        by_rates = FACTOR_ERROR**2 * gradients @ gradients.T
        scaled = features / self._scale
        means, covariance = [], np.zeros_like(by_rates)
        for weight, (across, inverse, solved, (length, signal, _)) in zip(
            self._weights, self._across(features, gradients), strict=True
        ):
            means.append(across @ solved)
            own = by_rates + signal**2 * _smooth(scaled, scaled, length)
            covariance += weight * (own - across @ inverse @ across.T)
        mean = self._weights @ np.array(means)
        off = np.array(means) - mean
        covariance += (self._weights * off.T) @ off
        return base + mean, self.parameters.stretch**2 * covariance

    def _across(
        self, features: Array, gradients: Array
    ) -> Iterator[tuple[Array, Array, Array, tuple[float, float, float]]]:
        """What predictions are made of, under each of the hyperparameters, which come last.

        Covariances of tasks with those that were timed ``[M, N]``, the inverse of the latter's own
        ``[N, N]``, and that times what the physics leave of them ``[N]``.
        """
        by_rates = FACTOR_ERROR**2 * gradients @ self._gradients.T
        hyperparameters = self.parameters.hyperparameters
        smooth = {
            length: _smooth(features / self._scale, self._features, length)
            for length in {length for length, _, _ in hyperparameters}
        }
        for one, inverse, solved in zip(hyperparameters, self._inverses, self._solved, strict=True):
            length, signal, _ = one
            yield by_rates + signal**2 * smooth[length], inverse, solved, one


def _smooth(left: Array, right: Array, length: float) -> Array:
    """Matérn's kernel with nu = 3/2 of the rows ``[M, F]`` and ``[N, F]``.

    (1 + d) exp(-d), d = sqrt(3) distance / length: rougher than a Gaussian, since libraries change
    their algorithms from one size to the next. Fitting takes scikit-learn's, whose import would
    take longer than all of a plan.
    """
    squares = np.zeros((len(left), len(right)))
    for one, other in zip(left.T, right.T, strict=True):
        squares += (one[:, None] - other) ** 2
    scaled = math.sqrt(3) / length * np.sqrt(squares)
    return np.asarray((1 + scaled) * np.exp(-scaled))
