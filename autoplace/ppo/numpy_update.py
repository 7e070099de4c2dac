"""Gradient steps in numpy.

The same steps as those of :class:`autoplace.ppo.update.Updater`, to float32 rounding, on the same
buffers: weights, gradient and Adam's moments are the tensors that the rest of the trainer knows,
seen as arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from autoplace.engines import NUMPY
from autoplace.ppo import numpy_loss
from autoplace.ppo.adam import ADAM_EPS, BETA_1, BETA_2
from autoplace.ppo.batch import Batch
from autoplace.ppo.engine_updater import EngineUpdater
from autoplace.ppo.network import ActorCritic, host_perceptron
from autoplace.ppo.numpy_perceptron import Array
from autoplace.ppo.trial import Hear
from autoplace.ppo.update import UpdateStats
from autoplace.workload import Hyperparameters


class _Minibatch(NamedTuple):
    """The rows of an index: ``[B, D]``, ``[A, B]``, and ``[B]`` each."""

    of: Tensor
    observations: Array
    actions: Array
    old_log_probs: Array
    advantages: Array
    returns: Array
    old_values: Array


class NumpyUpdater(EngineUpdater):
    """The optimiser and the gradient steps of a network of perceptrons in host memory."""

    engine = NUMPY
    whole_only = False
    tried_steps = 3  # an eager one takes several times as long, and which is faster is known

    def __init__(
        self,
        network: ActorCritic,
        hyperparameters: Hyperparameters,
        *,
        minibatch_rows: int,
        hear: Hear | None = None,
    ) -> None:
        super().__init__(network, hyperparameters, minibatch_rows=minibatch_rows, hear=hear)
        spec = network.spec
        self._learning_rate = hyperparameters.learning_rate
        self._weights = self._flat.detach().numpy()
        self._slope = self._gradient.numpy()
        self._scratch = np.empty_like(self._slope)
        self._sums = self._metrics.numpy()
        self._actor = host_perceptron(network.actor_layers)
        self._critic = host_perceptron(network.critic_layers)
        ends = itertools.accumulate(spec.action_heads or (spec.action_size,), initial=0)
        self._heads = [slice(*pair) for pair in itertools.pairwise(ends)]
        self._keeps = False
        self._kept: _Minibatch | None = None
        self._log_std: Array | None = None
        if network.log_std is not None and network.log_std.grad is not None:
            self._log_std = network.log_std.detach().numpy()
            self._by_log_std = network.log_std.grad.numpy()

    def update(
        self, batch: Batch, permutations: Sequence[Tensor], *, learning_rate: float, iteration: int
    ) -> UpdateStats:
        """As :meth:`Updater.update`; a minibatch of all rows is gathered once for all epochs."""
        self._keeps = True
        try:
            return super().update(
                batch, permutations, learning_rate=learning_rate, iteration=iteration
            )
        finally:
            self._keeps, self._kept = False, None

    def _gather(self, batch: Batch, index: Tensor) -> _Minibatch:
        if self._kept is not None and self._kept.of is index:
            return self._kept
        width, normalizes = batch.spec.observation_size, self.hyperparameters.normalize_advantages
        rows = batch.rows.numpy().take(index.numpy(), 0)
        columns = rows[:, width:].T.copy()
        old_log_probs, advantages, returns = columns[-3:]
        made = _Minibatch(
            of=index,
            observations=rows[:, :width],
            actions=columns[:-3],
            old_log_probs=old_log_probs,
            advantages=numpy_loss.standardize(advantages) if normalizes else advantages,
            returns=returns,
            old_values=returns - advantages,
        )
        if self._keeps and len(index) == batch.num_rows:
            self._kept = made
        return made

    def engine_step(self, batch: Batch, index: Tensor, *, measure: bool = False) -> None:
        """One gradient step on the rows ``index`` (int64 ``[B]``)."""
        hyper, rows = self.hyperparameters, self._gather(batch, index)
        loss = self._policy_loss(
            self._actor.forward(rows.observations), rows, needs_entropy=measure
        )
        values = self._critic.forward(rows.observations)[0]
        squares, by_value = numpy_loss.value_loss(
            values, rows.returns, rows.old_values, hyper.value_clip
        )
        by_value *= hyper.value_coef / len(values)
        self._actor.backward(loss.by_outputs)
        self._critic.backward(by_value[None, :])
        if self._log_std is not None:
            self._by_log_std[:] = loss.by_log_std

        norm = math.sqrt(np.dot(self._slope, self._slope))
        if measure:
            terms, ratio, log_ratio, _ = loss.surrogate
            apart = ratio - 1.0
            sums = np.add.reduce([-terms, squares, apart - log_ratio], 1)
            clipped = np.count_nonzero(np.abs(apart) > hyper.clip_range)
            policy, value, kl = (sums / len(values)).tolist()
            self._sums += policy, value, loss.entropy, kl, clipped / len(values), norm
        self._adam_step(min(1.0, hyper.max_grad_norm / (norm + 1e-6)))

    def _policy_loss(
        self, outputs: Array, rows: _Minibatch, *, needs_entropy: bool
    ) -> numpy_loss.PolicyLoss:
        hyper = self.hyperparameters
        if self._log_std is not None:
            return numpy_loss.gaussian(
                outputs,
                self._log_std,
                rows.actions,
                rows.old_log_probs,
                rows.advantages,
                clip_range=hyper.clip_range,
                entropy_coef=hyper.entropy_coef,
            )
        return numpy_loss.categorical(
            outputs,
            rows.actions,
            rows.old_log_probs,
            rows.advantages,
            heads=self._heads,
            clip_range=hyper.clip_range,
            entropy_coef=hyper.entropy_coef,
            needs_entropy=needs_entropy,
        )

    def _adam_step(self, clip: float) -> None:
        """Adam (Kingma and Ba 2015, algorithm 1) with the gradient scaled by ``clip``.

        With ``m`` and ``v`` the moments after ``t`` steps, the weights move by
        ``-alpha m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)``.
        """
        slope, scratch = self._slope, self._scratch
        first, second = self._first, self._second
        self._count += 1
        steps = float(self._count)
        first *= BETA_1
        first += np.multiply(slope, (1.0 - BETA_1) * clip, out=scratch)
        second *= BETA_2
        np.multiply(slope, slope, out=scratch)
        scratch *= (1.0 - BETA_2) * clip * clip
        second += scratch
        np.sqrt(second, out=scratch)
        scratch *= 1.0 / math.sqrt(1.0 - BETA_2**steps)
        scratch += ADAM_EPS
        np.divide(first, scratch, out=scratch)
        scratch *= self._learning_rate / (1.0 - BETA_1**steps)
        self._weights -= scratch

    # ----------------------------------------------------------------------------------------------
    # The optimiser's state, as checkpoints know it

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use ``learning_rate`` from the next gradient step on."""
        super().set_learning_rate(learning_rate)
        self._learning_rate = learning_rate

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of :meth:`optimizer_state`."""
        super().load_optimizer_state(state)
        self._first, self._second = state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()
        self._count = state["step"].numpy()
