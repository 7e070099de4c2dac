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
from autoplace.train.learner import Learner
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


class Scheme(Protocol):
    """One iteration laid out on the devices. Owns every crossing between them.

    Attributes:
        learner: whose network, optimiser and statistics are checkpointed.
    """

    learner: Learner

    def __init__(self, setup: Setup) -> None:
        """Allocate everything; nothing is allocated later."""
        ...

    def sample(self, noise: Tensor) -> None:
        """Fill the rollout; ``noise`` is ``[T, N, A]`` on the host."""
        ...

    def learn(self, permutations: Tensor, *, learning_rate: float, iteration: int) -> UpdateStats:
        """Learn from the rollout; ``permutations`` is ``[epochs, T N]`` on the host."""
        ...

    def publish(self) -> None:
        """Bring the weights that sample up to date with those that learned."""
        ...
