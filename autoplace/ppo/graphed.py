"""Policy steps and gradient steps of an accelerator, recorded once and replayed with one call.

A recording works on the memory that it was made with. So what changes from call to call is copied
into tensors that stay: the observations and the noise of a policy step; the rows of a rollout (once
an iteration), the index of a minibatch and the learning rate of a gradient step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.engines import GRAPH
from autoplace.ppo.adam import ADAM_EPS, Adam
from autoplace.ppo.batch import Batch
from autoplace.ppo.engine_updater import EngineUpdater
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.policy_step import choose_actions
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.update import minibatch_losses


class GraphPolicyStep:
    """What the eager ``PolicyStep`` does, replayed."""

    def __init__(self, network: ActorCritic) -> None:
        self._network = network
        self._recordings: dict[int, _PolicyRecording] = {}  # by the number of environments

    @torch.inference_mode()
    def __call__(self, observations: Tensor, noise: Tensor, rollout: Rollout, t: int) -> Tensor:
        """Write row ``t`` of ``rollout`` and return its actions."""
        recording = self._recordings.get(len(observations))
        if recording is None:
            recording = _PolicyRecording(self._network, observations, noise)
            self._recordings[len(observations)] = recording
        recording.observations.copy_(observations)
        recording.noise.copy_(noise)
        recording.graph.replay()
        rollout.observation_rows[t].copy_(recording.observations)
        return rollout.action_rows[t].copy_(recording.actions)


class _PolicyRecording:
    def __init__(self, network: ActorCritic, observations: Tensor, noise: Tensor) -> None:
        self.observations, self.noise = observations.clone(), noise.clone()
        self.actions = choose_actions(network, self.observations, self.noise).clone()

        def work() -> None:
            self.actions.copy_(choose_actions(network, self.observations, self.noise))

        self.graph = devices.Graph(str(noise.device), work)


class GraphUpdater(EngineUpdater):
    """The optimiser and the gradient steps of one network, replayed."""

    engine = GRAPH

    def _make_optimizer(self, learning_rate: float) -> Adam:
        # A recording reads the step size from memory, as it does Adam's count of steps.
        step_size = torch.tensor(learning_rate, device=self._flat.device)
        return torch.optim.Adam(
            [self._flat], lr=step_size, eps=ADAM_EPS, fused=True, capturable=True
        )

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use ``learning_rate`` from the next gradient step on."""
        for group in self._optimizer.param_groups:
            group["lr"].fill_(learning_rate)

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of :meth:`optimizer_state`; what was recorded knows the old tensors."""
        super().load_optimizer_state(state)
        self._recordings: dict[bool, devices.Graph] = {}
        self._held: _HeldRows | None = None

    def engine_step(self, batch: Batch, index: Tensor, *, measure: bool = False) -> None:
        """One gradient step on the rows ``index``, as many as a whole minibatch has."""
        if self._held is None:
            rows = max(self.hyperparameters.rollout_rows, batch.num_rows)
            self._held = _HeldRows(batch, index, rows)
        self._held.take(batch, index)
        if measure not in self._recordings:
            self._recordings[measure] = self._record(self._held, measure)
        self._recordings[measure].replay()

    def _record(self, held: _HeldRows, measure: bool) -> devices.Graph:
        tensors = self._tensors()
        before = [tensor.clone() for tensor in tensors]

        def work() -> None:
            self._torch_step(held.batch, held.index, measure=measure, losses=minibatch_losses)

        graph = devices.Graph(str(held.index.device), work)
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)  # the steps that warm up are none of the run's
        return graph


class _HeldRows:
    """The rows of the rollout that is learned from, and a minibatch's index, where they stay."""

    def __init__(self, batch: Batch, index: Tensor, num_rows: int) -> None:
        rows = batch.rows.new_zeros(num_rows, batch.rows.shape[1])
        images = None
        if batch.images is not None:
            images = batch.images.new_zeros(num_rows, batch.images.shape[1])
        self.batch = Batch(rows, batch.spec, images)
        self.index = index.clone()
        self._source: Batch | None = None

    def take(self, batch: Batch, index: Tensor) -> None:
        if batch is not self._source:
            self.batch.rows[: batch.num_rows].copy_(batch.rows)
            if batch.images is not None and self.batch.images is not None:
                self.batch.images[: batch.num_rows].copy_(batch.images)
            self._source = batch
        self.index.copy_(index)
