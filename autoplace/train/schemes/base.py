"""What the loop asks of a scheme, and what a scheme is given."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from autoplace.envs import Restarts, VectorEnv, make_vector_env
from autoplace.envs.description import EnvDescription
from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.workers import DEADLINE_S
from autoplace.planner.plan import Placement
from autoplace.ppo.draws import Draws
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.rollout import Rollout, shared_memory
from autoplace.ppo.update import UpdateStats
from autoplace.train.engine_log import EngineLog
from autoplace.train.interrupt import StopRequest
from autoplace.train.learner import Learned, Learner
from autoplace.train.stage_timer import StageTimer
from autoplace.workload import Hyperparameters


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything a scheme lays out on the devices.

    Attributes:
        placement: where and how, from the plan.
        hyperparameters: how PPO learns.
        description: of the environments.
        env_seeds: one per environment, for its first reset.
        draws: all other randomness.
        network: on the host; the weights that the run starts from.
        previous: its buffer before the last update, where the first rollout is to be sampled by
            that and sides overlap.
        iterations: those that this call is to complete, counted from 0.
        episodes: told of every rollout.
        resources: closed when the run ends, however it does, the latest first.
        timer: told of every stage.
        stop: checked between vector steps.
        worker_deadline_s: how long any other process may be silent until it counts as hung, where
            that is not left to each kind of them.
        restarts: what becomes of a worker of the environments that is lost, and what became.
        engines: told what came of every engine that was tried.
    """

    placement: Placement
    hyperparameters: Hyperparameters
    description: EnvDescription
    env_seeds: Sequence[int]
    draws: Draws
    network: ActorCritic
    iterations: range
    episodes: EpisodeTracker
    resources: contextlib.ExitStack
    timer: StageTimer = field(default_factory=StageTimer)
    stop: StopRequest = field(default_factory=StopRequest)
    worker_deadline_s: float | None = None
    restarts: Restarts = field(default_factory=Restarts)
    previous: Tensor | None = None
    engines: EngineLog = field(default_factory=EngineLog)

    def make_envs(self) -> VectorEnv:
        """All environments behind one interface, still to be reset.

        Raises:
            EnvError: one cannot be made.
        """
        envs = make_vector_env(
            self.description,
            num_envs=self.hyperparameters.num_envs,
            backend=self.placement.env_backend,
            num_workers=self.placement.num_workers,
            num_groups=self.placement.num_groups,
            deadline_s=self.worker_deadline_s or DEADLINE_S,
            restarts=self.restarts,
        )
        self.resources.callback(envs.close)
        return envs

    def shared_rollouts(self, count: int) -> list[Rollout]:
        """So many rollouts, in memory that other processes see."""
        hyper = self.hyperparameters
        return [
            Rollout(
                self.network.spec,
                rollout_steps=hyper.rollout_steps,
                num_envs=hyper.num_envs,
                shared=shared_memory(
                    self.network.spec,
                    rollout_steps=hyper.rollout_steps,
                    num_envs=hyper.num_envs,
                    pinned_for=self.placement.learn_device,
                ),
            )
            for _ in range(count)
        ]

    def make_learner(self, network: ActorCritic) -> Learner:
        """A learner in this process; ``network`` is on the device where it learns."""
        placement = self.placement
        return Learner(
            network,
            self.hyperparameters,
            minibatch_rows=placement.minibatch_rows,
            precision=placement.precision,
            accumulation_steps=placement.accumulation_steps,
            device=placement.learn_device,
            threads=placement.learn_threads,
            timer=self.timer,
            hear=self.engines.hear,
        )


@dataclass(frozen=True, slots=True)
class Lag:
    """How old the weights that sampled a rollout were when it was learned from, in iterations.

    Attributes:
        mean: over the rollout's rows.
        max: the oldest.
    """

    mean: float = 0.0
    max: int = 0

    @classmethod
    def of(cls, versions: Sequence[int], learned: int) -> Lag:
        """Of a rollout that ``versions`` sampled in equal shares, learned from in ``learned``."""
        ages = [learned - version for version in versions]
        return cls(mean=sum(ages) / len(ages), max=max(ages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """An iteration whose update is complete.

    Attributes:
        update: what the update said.
        num_transitions: env steps in the rollout that it learned from.
        lag: of that rollout.
    """

    update: UpdateStats
    num_transitions: int
    lag: Lag = Lag()


class Scheme(Protocol):
    """One iteration laid out on the devices. Owns every crossing between them."""

    @property
    def learner(self) -> Learned:
        """Whose network, optimiser and statistics are checkpointed."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether a rollout is learned from while the next one is sampled."""
        ...

    def start(self) -> None:
        """Reset the environments; called once, before the first rollout."""
        ...

    def sample(self, iteration: int) -> None:
        """Fill the rollout of ``iteration``, counted from 0.

        Raises:
            StopRequested: a stop was asked for between two vector steps.
        """
        ...

    def learn(
        self, permutations: Tensor, *, learning_rate: float, iteration: int
    ) -> Completed | None:
        """Learn from the rollout, or hand it over and take what became of the one before.

        Args:
            permutations: ``[epochs, T N]`` on the host.
            learning_rate: Adam's step size.
            iteration: counted from 1, for messages.

        Returns:
            The iteration that is complete now; ``None`` where there is none yet.
        """
        ...

    def publish(self) -> None:
        """Bring the weights that sample up to date with those that learned."""
        ...

    def drain(self) -> Completed | None:
        """Wait for the update in flight; ``None`` where there is none."""
        ...

    def rest(self) -> None:
        """Wait until nothing of this scheme is at work, until the next ``sample``."""
        ...


class InTurn:
    """Of schemes that sample and learn in turn: nothing is ever in flight."""

    overlaps = False

    def __init__(self, setup: Setup) -> None:
        self._seeds = setup.env_seeds
        self._envs = setup.make_envs()

    def start(self) -> None:
        """Reset the environments."""
        self._envs.reset(self._seeds)

    def drain(self) -> None:
        """Nothing is in flight."""

    def rest(self) -> None:
        """Nothing is at work."""
