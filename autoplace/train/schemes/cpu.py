"""Scheme ``cpu``: sampling and learning take turns on the CPU. Nothing crosses to a device."""

from __future__ import annotations

from torch import Tensor

from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import make_policy_step
from autoplace.train.sampler import HostSampler
from autoplace.train.schemes.base import Completed, InTurn, Setup


class CpuScheme(InTurn):
    """One network samples and learns; each phase has its own number of threads."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        hyper = setup.hyperparameters
        self._draws = setup.draws
        self._rollout = Rollout(
            setup.network.spec, rollout_steps=hyper.rollout_steps, num_envs=hyper.num_envs
        )
        self._sampler = HostSampler.of(setup, self._envs, self._rollout)
        self._policy_step = make_policy_step(setup.network, setup.engines.hear)
        self.learner = setup.make_learner(setup.network)

    def sample(self, iteration: int) -> None:
        """Fill the rollout."""
        self._sampler.sample(self._policy_step, self._draws.noise(iteration))

    def learn(self, permutations: Tensor, *, learning_rate: float, iteration: int) -> Completed:
        """Learn from the rollout."""
        update = self.learner.learn(
            self._rollout, permutations, learning_rate=learning_rate, iteration=iteration
        )
        return Completed(update=update, num_transitions=self._rollout.num_transitions)

    def publish(self) -> None:
        """Nothing to do: the weights that sample are those that learned."""
