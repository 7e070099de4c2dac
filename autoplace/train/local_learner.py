"""A learner in this process, while others sample."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoplace.device_names import CPU
from autoplace.ppo.reward_normalizer import RewardNormalizer
from autoplace.ppo.rollout import Rollout
from autoplace.train.learner import OptimizerState
from autoplace.train.schemes.base import Completed, Lag, Setup
from autoplace.train.versions import Versions


class LocalLearner:
    """A learner on the CPU that is through with an order when :meth:`hand_over` returns.

    Attributes:
        network: that learns.
        device: where it is.
        version: how many updates of the run made its weights.
    """

    is_in_place = True
    is_at_work = False
    channels = processes = ()

    def __init__(self, setup: Setup, rollouts: Sequence[Rollout], *, max_policy_lag: int) -> None:
        """Learn from ``rollouts``, which are handed over by their number here.

        Args:
            setup: of the run.
            rollouts: in host memory.
            max_policy_lag: how many updates old the weights may be that sampled one.
        """
        self._rollouts, self._lag = rollouts, max_policy_lag
        self._learner = setup.make_learner(setup.network)
        self.network, self.device = setup.network, CPU
        self.version = setup.iterations.start
        self._versions = Versions(setup.network, max_policy_lag)
        self._versions.keep(self.version, self.network.flat)
        self._has_previous = setup.previous is not None and max_policy_lag > 0
        if self._has_previous and setup.previous is not None:
            self._versions.keep(self.version - 1, setup.previous)
        self._completed: Completed | None = None

    @property
    def updater(self) -> OptimizerState:
        """The optimiser."""
        return self._learner.updater

    @property
    def reward_normalizer(self) -> RewardNormalizer | None:
        """Statistics of the rewards."""
        return self._learner.reward_normalizer

    @property
    def previous(self) -> Tensor | None:
        """The network's buffer one version before, ``None`` where there was none."""
        return self._versions[self.version - 1].flat if self._has_previous else None

    def hand_over(
        self,
        buffer: int,
        permutations: Tensor,
        *,
        versions: tuple[int, ...],
        learning_rate: float,
        iteration: int,
    ) -> None:
        """Learn from a rollout."""
        rollout, lag = self._rollouts[buffer], Lag.of(versions, self.version)
        update = self._learner.learn(
            rollout,
            permutations,
            learning_rate=learning_rate,
            iteration=iteration,
            acted=[self._versions[version] for version in versions],
        )
        self.version += 1
        self._versions.keep(self.version, self.network.flat)
        self._has_previous = self._lag > 0
        self._completed = Completed(
            update=update,
            num_transitions=rollout.num_transitions,
            lag=lag,
        )

    def look(self) -> None:
        """Nothing comes from elsewhere."""

    def take(self) -> Completed | None:
        """What the last order came to, once."""
        completed, self._completed = self._completed, None
        return completed
