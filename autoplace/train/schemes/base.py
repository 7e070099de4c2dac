"""What the loop asks of a scheme, and what a scheme is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.vector import VectorEnv
from autoplace.planner.plan import Placement
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.update import UpdateStats
from autoplace.train.interrupt import StopRequest
from autoplace.train.learner import Learned
from autoplace.train.stage_timer import StageTimer
from autoplace.workload import Hyperparameters


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything a scheme lays out on the devices.

    Attributes:
        placement: where and how, from the plan.
        hyperparameters: how PPO learns.
        envs: the environments, already reset.
        network: on the host; the weights that the run starts from.
        episodes: told of every vector step.
        timer: told of every stage.
        stop: checked between vector steps.
    """

    placement: Placement
    hyperparameters: Hyperparameters
    envs: VectorEnv
    network: ActorCritic
    episodes: EpisodeTracker
    timer: StageTimer = field(default_factory=StageTimer)
    stop: StopRequest = field(default_factory=StopRequest)


@dataclass(frozen=True, slots=True)
class Lag:
    """How old the weights that sampled a rollout were when it was learned from, in iterations.

    Attributes:
        mean: over the rollout's rows.
        max: the oldest.
    """

    mean: float = 0.0
    max: int = 0


class Scheme(Protocol):
    """One iteration laid out on the devices. Owns every crossing between them."""

    @property
    def lag(self) -> Lag:
        """Of the rollout that the last complete update learned from."""
        ...

    @property
    def learner(self) -> Learned:
        """Whose network, optimiser and statistics are checkpointed."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether a rollout is learned from while the next one is sampled."""
        ...

    def sample(self, noise: Tensor) -> None:
        """Fill the rollout; ``noise`` is ``[T, N, A]`` on the host."""
        ...

    def learn(
        self, permutations: Tensor, *, learning_rate: float, iteration: int
    ) -> UpdateStats | None:
        """Learn from the rollout, or hand it over and take what became of the one before.

        Args:
            permutations: ``[epochs, T N]`` on the host.
            learning_rate: Adam's step size.
            iteration: counted from 1, for messages.

        Returns:
            What the update that is complete now said; ``None`` where there is none yet.
        """
        ...

    def publish(self) -> None:
        """Bring the weights that sample up to date with those that learned."""
        ...

    def drain(self) -> UpdateStats | None:
        """Wait for the update in flight; ``None`` where there is none."""
        ...

    def rest(self) -> None:
        """Wait until nothing of this scheme is at work, until the next ``sample``."""
        ...

    def close(self) -> None:
        """End what the scheme has started; an update in flight is dropped."""
        ...


class InTurn:
    """Of schemes that sample and learn in turn: nothing is ever in flight."""

    overlaps = False
    lag = Lag()

    def drain(self) -> None:
        """Nothing is in flight."""

    def rest(self) -> None:
        """Nothing is at work."""

    def close(self) -> None:
        """Nothing was started."""
