"""Gradient steps by another engine than the eager one, with that one at hand."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from autoplace.ppo.batch import Batch
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.trial import STEPS, Hear, Trial
from autoplace.ppo.update import Updater
from autoplace.workload import Hyperparameters


class EngineUpdater(Updater):
    """The optimiser and the gradient steps of one network, by an engine that is tried first.

    Weights, gradient and Adam's moments are the same tensors for both engines, so that each step
    may be taken by either.
    """

    engine: ClassVar[str]
    # Whether only whole minibatches are worth the engine's one-off work; the last one of an epoch,
    # where it is smaller, is eager then.
    whole_only: ClassVar[bool] = True
    tried_steps: ClassVar[int] = STEPS

    def __init__(
        self,
        network: ActorCritic,
        hyperparameters: Hyperparameters,
        *,
        minibatch_rows: int,
        hear: Hear | None = None,
    ) -> None:
        """Take gradient steps on ``network``; ``hear`` of what came of the first of them.

        Without ``hear`` the engine is not compared with the eager one, and its errors are raised.
        """
        super().__init__(network, hyperparameters, minibatch_rows=minibatch_rows)
        self._trial: Trial | None = None
        if hear is not None:
            device = str(network.flat.device)
            steps = self.tried_steps
            self._trial = Trial(self.engine, "gradient step", device, hear, steps=steps)
        self.use_moments(torch.zeros_like(self._gradient), torch.zeros_like(self._gradient), 0)

    def engine_step(self, batch: Batch, index: Tensor, *, measure: bool = False) -> None:
        """As :meth:`minibatch_step`, by this engine whatever came of it."""
        raise NotImplementedError

    def minibatch_step(self, batch: Batch, index: Tensor, *, measure: bool = False) -> None:
        """One gradient step on the rows ``index`` (int64 ``[B]``), by the engine that is in use."""
        trial = self._trial
        if self.whole_only and len(index) != self.minibatch_rows:
            super().minibatch_step(batch, index, measure=measure)
        elif trial is None or (trial.is_over and not trial.is_dropped):
            self.engine_step(batch, index, measure=measure)
        elif trial.is_dropped:
            super().minibatch_step(batch, index, measure=measure)
        else:
            self._try(trial, batch, index, measure)

    def _try(self, trial: Trial, batch: Batch, index: Tensor, measure: bool) -> None:
        """Take the step with both engines; the eager one's counts where the other is dropped."""
        eager_step = super().minibatch_step
        tensors = self._tensors()
        before = [tensor.clone() for tensor in tensors]
        eager_s = trial.timed(lambda: eager_step(batch, index, measure=measure))
        eager = [tensor.clone() for tensor in tensors]
        _copy(before, tensors)
        try:
            engine_s = trial.timed(lambda: self.engine_step(batch, index, measure=measure))
        except Exception as error:  # whatever a compiler or a driver raises
            trial.fail(error)
        else:
            trial.add(eager_s, engine_s, _difference(before[0], eager[0], tensors[0]))
        if trial.is_dropped:
            _copy(eager, tensors)

    def _tensors(self) -> list[Tensor]:
        """All that a gradient step changes, the weights first."""
        return [self._flat.detach(), self._metrics, *self._optimizer.state[self._flat].values()]

    def optimizer_state(self) -> dict[str, Tensor]:
        """Adam's moments and step count; empty before the first gradient step."""
        state = super().optimizer_state()
        return state if state["step"].item() else {}


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _difference(before: Tensor, eager: Tensor, engine: Tensor) -> float:
    """Between two steps of the weights, over the size of the eager one."""
    size = float(torch.linalg.vector_norm(eager - before))
    apart = float(torch.linalg.vector_norm(engine - eager))
    if not size or size != size:  # no step, or one that is no number: nothing to compare with
        return 0.0
    return apart / size if apart == apart else float("inf")
