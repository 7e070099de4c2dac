"""A perceptron as numpy operations on the very numbers of an :class:`ActorCritic`.

Symbols: ``B`` rows, ``I`` inputs and ``O`` outputs of a layer, ``K`` outputs of the last one. With
``h`` the inputs of a layer (rows, or the tanh of the layer before) and ``g`` the gradient by its
outputs, rows by columns: ``dW = g^T h``, ``db = sum of the rows of g``, and the gradient by the
layer before is ``(g W) (1 - h^2)``.

The last layer's outputs are kept as ``[K, B]``: an action has few numbers, and a reduction over a
short last axis is slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
PASS_ROWS = 1024  # of one pass without gradients: its activations stay in a core's cache


class NumpyPerceptron:
    """Passes through one network of a policy or a value, and the gradients of its layers.

    Buffers are kept from call to call, so what :meth:`forward` returns holds until the next one.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Array, Array]],
        gradients: Sequence[tuple[Array, Array]] = (),
    ) -> None:
        """Read ``layers``, (weight ``[O, I]``, bias ``[O]``) each; write ``gradients`` likewise."""
        self._weights = [weight for weight, _ in layers]
        # Views, made once: where there are few rows, making one costs as much as some arithmetic.
        self._into_hidden = [(weight.T, bias) for weight, bias in layers[:-1]]
        self._last_bias = layers[-1][1][:, None]
        self._gradients = tuple(gradients)
        self._rows = self._capacity = 0
        self._memory: list[Array] = []
        self._hidden: list[Array] = []
        self._by_hidden: list[Array] = []
        self._ones = np.empty(0, np.float32)
        self._inputs: list[Array] = []  # of each layer, in the last forward pass

    def _take(self, rows: int) -> None:
        """Have buffers of ``rows`` rows."""
        widths = [bias.shape[0] for _, bias in self._into_hidden]
        if rows > self._capacity:
            self._capacity = rows
            sets = 2 if self._gradients else 1
            self._memory = [np.empty((rows, width), np.float32) for width in widths * sets]
            self._ones = np.ones(rows, np.float32)
        self._rows = rows
        views = [buffer[:rows] for buffer in self._memory]
        self._hidden, self._by_hidden = views[: len(widths)], views[len(widths) :]

    def forward(self, x: Array) -> Array:
        """Outputs ``[K, B]`` of rows ``[B, I]``."""
        if x.shape[0] != self._rows:
            self._take(x.shape[0])
        self._inputs = [x, *self._hidden]
        for (weight, bias), hidden in zip(self._into_hidden, self._hidden, strict=True):
            x.dot(weight, hidden)
            hidden += bias
            x = np.tanh(hidden, out=hidden)
        outputs: Array = self._weights[-1].dot(x.T)
        outputs += self._last_bias
        return outputs

    def backward(self, by_outputs: Array) -> None:
        """Write the gradients, given that by the outputs ``[K, B]`` of the last forward pass.

        The activations of that pass are used up.
        """
        ones, by_layer = self._ones[: self._rows], by_outputs.T
        for i in range(len(self._weights) - 1, -1, -1):
            inputs, (by_weight, by_bias) = self._inputs[i], self._gradients[i]
            by_layer.T.dot(inputs, by_weight)
            ones.dot(by_layer, by_bias)
            if i:
                below = by_layer.dot(self._weights[i], self._by_hidden[i - 1])
                inputs *= inputs
                np.subtract(1.0, inputs, out=inputs)
                below *= inputs
                by_layer = below

    def outputs(self, x: Array) -> Array:
        """A new array of outputs ``[B, K]`` of any number of rows ``[B, I]``."""
        outputs = np.empty((x.shape[0], len(self._last_bias)), np.float32)
        for start in range(0, x.shape[0], PASS_ROWS):
            part = slice(start, start + PASS_ROWS)
            outputs[part] = self.forward(x[part]).T
        return outputs
