"""The learning half of an iteration, on whatever device the scheme put it."""

from __future__ import annotations

import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.device import now
from autoplace.ppo.batch import make_batch
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.reward_normalizer import RewardNormalizer
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.update import Updater, UpdateStats
from autoplace.train.stage_timer import StageTimer
from autoplace.workload import Hyperparameters


class Learner:
    """A network and what it learns with: optimiser, reward statistics, and the two stages."""

    def __init__(
        self,
        network: ActorCritic,
        hyperparameters: Hyperparameters,
        *,
        minibatch_rows: int,
        device: str,
        threads: int,
        timer: StageTimer,
    ) -> None:
        self.network = network
        self.device = device
        self.updater = Updater(network, hyperparameters, minibatch_rows=minibatch_rows)
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
        self, rollout: Rollout, permutations: Tensor, *, learning_rate: float, iteration: int
    ) -> UpdateStats:
        """Learn from a complete rollout; everything is on the learner's device, and done after.

        Each stage ends with the device synchronised, so that its time is its own.
        """
        with devices.torch_threads(self._threads):
            start_s = now()
            batch = make_batch(self.network, rollout, self._hyperparameters, self.reward_normalizer)
            devices.synchronize(self.device)
            batched_s = now()
            stats = self.updater.update(
                batch,
                permutations.unbind(0),
                learning_rate=learning_rate,
                iteration=iteration,
            )
            recorded = rollout.observations[:-1]
            self.network.update_statistics(torch.flatten(recorded, 0, 1))
            devices.synchronize(self.device)
            updated_s = now()
        self._timer.add("gae", "learner", batched_s - start_s)
        self._timer.add("update", "learner", updated_s - batched_s)
        return stats
