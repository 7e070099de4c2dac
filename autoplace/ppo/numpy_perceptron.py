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
_PASS_ROWS = 1024  # of one pass without gradients: its activations stay in a core's cache


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
        self._layers = tuple(layers)
        self._gradients = tuple(gradients)
        self._capacity = 0
        self._hidden: list[Array] = []
        self._backward: list[Array] = []
        self._ones = np.empty(0, np.float32)
        self._inputs: list[Array] = []  # of each layer, in the last forward pass

    def _reserve(self, rows: int) -> None:
        if rows <= self._capacity:
            return
        self._capacity = rows
        widths = [weight.shape[0] for weight, _ in self._layers[:-1]]
        self._hidden = [np.empty((rows, width), np.float32) for width in widths]
        if self._gradients:
            self._backward = [np.empty((rows, width), np.float32) for width in widths]
        self._ones = np.ones(rows, np.float32)

    def forward(self, x: Array) -> Array:
        """Outputs ``[K, B]`` of rows ``[B, I]``."""
        rows = x.shape[0]
        self._reserve(rows)
        self._inputs = [x]
        for (weight, bias), buffer in zip(self._layers[:-1], self._hidden, strict=True):
            x = np.dot(x, weight.T, out=buffer[:rows])
            x += bias
            np.tanh(x, out=x)
            self._inputs.append(x)
        weight, bias = self._layers[-1]
        outputs: Array = np.dot(weight, x.T)
        outputs += bias[:, None]
        return outputs

    def backward(self, by_outputs: Array) -> None:
        """Write the gradients, given that by the outputs ``[K, B]`` of the last forward pass.

        The activations of that pass are used up.
        """
        rows = by_outputs.shape[1]
        ones, by_layer = self._ones[:rows], by_outputs.T
        for i in range(len(self._layers) - 1, -1, -1):
            inputs, (by_weight, by_bias) = self._inputs[i], self._gradients[i]
            np.dot(by_layer.T, inputs, out=by_weight)
            np.dot(ones, by_layer, out=by_bias)
            if i:
                below = np.dot(by_layer, self._layers[i][0], out=self._backward[i - 1][:rows])
                inputs *= inputs
                np.subtract(1.0, inputs, out=inputs)
                below *= inputs
                by_layer = below

    def outputs(self, x: Array) -> Array:
        """A new array of outputs ``[B, K]`` of any number of rows ``[B, I]``."""
        outputs = np.empty((x.shape[0], self._layers[-1][1].shape[0]), np.float32)
        for start in range(0, x.shape[0], _PASS_ROWS):
            part = slice(start, start + _PASS_ROWS)
            outputs[part] = self.forward(x[part]).T
        return outputs
