"""The learning half of an iteration, on whatever device the scheme put it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.device import now
from autoplace.engines import FP32
from autoplace.ppo.batch import make_batch
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.reward_normalizer import RewardNormalizer
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import make_updater
from autoplace.ppo.trial import Hear
from autoplace.ppo.update import UpdateStats
from autoplace.train.stage_timer import StageTimer
from autoplace.workload import Hyperparameters


class OptimizerState(Protocol):
    """Adam's moments and step count, by torch's names for them."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps; empty before the first gradient step."""
        ...

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of :meth:`optimizer_state`."""
        ...


class Learned(Protocol):
    """What a run saves, shows and restores of its learner."""

    @property
    def network(self) -> ActorCritic:
        """Weights and statistics after the last complete update."""
        ...

    @property
    def device(self) -> str:
        """Where the tensors are."""
        ...

    @property
    def updater(self) -> OptimizerState:
        """The optimiser."""
        ...

    @property
    def reward_normalizer(self) -> RewardNormalizer | None:
        """Statistics of the rewards."""
        ...

    @property
    def previous(self) -> Tensor | None:
        """The network's buffer before the last update, where that samples the next rollout."""
        ...

    @property
    def is_in_place(self) -> bool:
        """Whether an update that is under way has changed these already."""
        ...


class Learner:
    """A network and what it learns with: optimiser, reward statistics, and the two stages."""

    is_in_place = True
    previous: Tensor | None = None  # sampling waits for the update

    def __init__(
        self,
        network: ActorCritic,
        hyperparameters: Hyperparameters,
        *,
        minibatch_rows: int,
        precision: str = FP32,
        accumulation_steps: int = 1,
        device: str,
        threads: int,
        timer: StageTimer,
        hear: Hear | None = None,
    ) -> None:
        self.network = network
        self.device = device
        self.updater = make_updater(
            network,
            hyperparameters,
            minibatch_rows=minibatch_rows,
            precision=precision,
            accumulation_steps=accumulation_steps,
            hear=hear,
        )
        self.reward_normalizer = (
            RewardNormalizer(
                num_envs=hyperparameters.num_envs, gamma=hyperparameters.gamma, device=device
            )
            if hyperparameters.normalize_rewards
            else None
        )
        self._hyperparameters = hyperparameters
        self._threads = threads
        self._timer = timer

    def learn(
        self,
        rollout: Rollout,
        permutations: Tensor,
        *,
        learning_rate: float,
        iteration: int,
        acted: Sequence[ActorCritic] = (),
    ) -> UpdateStats:
        """Learn from a complete rollout; everything is on the learner's device, and done after.

        Each stage ends with the device synchronised, so that its time is its own. ``acted`` are
        the networks that sampled, as :func:`make_batch` takes them.
        """
        with devices.torch_threads(self._threads, self.network.engine_here):
            start_s = now()
            batch = make_batch(
                self.network,
                rollout,
                self._hyperparameters,
                self.reward_normalizer,
                acted=acted,
            )
            # The batch is normalised already: what changes here acts from the next rollout on.
            if self.network.normalize_observations and rollout.num_transitions:
                recorded = torch.flatten(rollout.observations[:-1], 0, 1)
                if rollout.valid_index is not None:
                    recorded = recorded.index_select(0, rollout.valid_index)
                self.network.update_statistics(recorded)
            devices.synchronize(self.device)
            batched_s = now()
            stats = self.updater.update(
                batch,
                permutations.unbind(0),
                learning_rate=learning_rate,
                iteration=iteration,
            )
            devices.synchronize(self.device)
            updated_s = now()
        self._timer.add("gae", "learner", batched_s - start_s)
        self._timer.add("update", "learner", updated_s - batched_s)
        return stats
