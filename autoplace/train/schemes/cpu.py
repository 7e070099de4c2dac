"""Scheme ``cpu``: sampling and learning take turns on the CPU. Nothing crosses to a device."""

from __future__ import annotations

from torch import Tensor

from autoplace.device_names import CPU
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.update import UpdateStats
from autoplace.train.learner import Learner
from autoplace.train.sampler import HostSampler
from autoplace.train.schemes.base import InTurn, Setup


class CpuScheme(InTurn):
    """One network samples and learns; each phase has its own number of threads."""

    def __init__(self, setup: Setup) -> None:
        hyper, placement = setup.hyperparameters, setup.placement
        self._rollout = Rollout(
            setup.network.spec, rollout_steps=hyper.rollout_steps, num_envs=hyper.num_envs
        )
        self._sampler = HostSampler(setup, setup.network, self._rollout)
        self.learner = Learner(
            setup.network,
            hyper,
            minibatch_rows=placement.minibatch_rows,
            device=CPU,
            threads=placement.learn_threads,
            timer=setup.timer,
        )

    def sample(self, noise: Tensor) -> None:
        """Fill the rollout."""
        self._sampler.sample(noise)

    def learn(self, permutations: Tensor, *, learning_rate: float, iteration: int) -> UpdateStats:
        """Learn from the rollout."""
        return self.learner.learn(
            self._rollout, permutations, learning_rate=learning_rate, iteration=iteration
        )

    def publish(self) -> None:
        """Nothing to do: the weights that sample are those that learned."""
