"""A policy as numpy operations on the buffer of a network. Needs no torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from autoplace.ppo.numpy_perceptron import Array, NumpyPerceptron

OBSERVATION_CLAMP = 10.0


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of a network within its buffer.

    Attributes:
        start: its first number.
        shape: of the tensor.
    """

    start: int
    shape: tuple[int, ...]

    def of(self, flat: Array) -> Array:
        """The tensor in a buffer."""
        return flat[self.start : self.start + math.prod(self.shape)].reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLayout:
    """Where the policy is in the buffer of a network of perceptrons, and how it acts.

    Attributes:
        layers: weight and bias of each layer.
        log_std: of a Gaussian policy, else ``None``.
        mean: of the observations.
        inverse_std: of the observations.
        normalizes: whether observations are standardised.
        heads: choices of each head; ``()`` where an action is a single choice.
    """

    layers: tuple[tuple[View, View], ...]
    log_std: View | None
    mean: View
    inverse_std: View
    normalizes: bool
    heads: tuple[int, ...]


class NumpyPolicy:
    """Samples actions by the weights that are in a buffer by then."""

    def __init__(self, flat: Array, layout: PolicyLayout) -> None:
        """Read ``flat``, a network's whole buffer."""
        self._actor = NumpyPerceptron([(w.of(flat), b.of(flat)) for w, b in layout.layers])
        self._log_std = None if layout.log_std is None else layout.log_std.of(flat)
        self._normalizes = layout.normalizes
        self._mean, self._inverse_std = layout.mean.of(flat), layout.inverse_std.of(flat)
        ends = itertools.accumulate(layout.heads, initial=0)
        self._heads = [slice(*pair) for pair in itertools.pairwise(ends)]

    def act(self, x: Array, noise: Array, actions: np.ndarray) -> None:
        """Sample for raw observations ``[N, D]``.

        Args:
            x: the observations, which are left as they are.
            noise: ``[N, A]`` from :func:`autoplace.ppo.distribution.draw_noise`.
            actions: ``[N]`` or ``[N, H]`` int64, or ``[N, A]`` float32; written.
        """
        if self._normalizes:
            x = x - self._mean
            x *= self._inverse_std
            np.minimum(np.maximum(x, -OBSERVATION_CLAMP, out=x), OBSERVATION_CLAMP, out=x)
        outputs = self._actor.forward(x)
        if self._log_std is not None:
            np.add(outputs.T, noise * np.exp(self._log_std), out=actions)
        elif self._heads:
            outputs += noise.T
            for column, head in enumerate(self._heads):
                actions[:, column] = outputs[head].argmax(0)
        else:
            outputs += noise.T
            outputs.argmax(0, out=actions)
