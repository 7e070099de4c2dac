"""Sampling: the loop over vector steps, and the sampler whose policy is on the host.

In one group, acting and stepping take turns. In two (split-half sampling), one half of each
worker's environments steps while the actions of the other half are computed:

    policy   | act A | act B  | act A  | act B  | ...
    workers          | step A | step B | step A | ...

With p seconds for the policy step of a half, E for all environments to step once, and h to hand
actions over and results back, a vector step takes ``p_N + E + h`` in one group (p_N the policy step
of all) and, where every side has cores of its own, ``max(2 p, E, p + E / 2 + h)`` in two: the
policy's lane, the workers' lane, or the way of one half round both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.device import now
from autoplace.engines import EAGER
from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.recorder import OutcomeRecorder
from autoplace.envs.vector import VectorEnv, in_groups
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import Act
from autoplace.train.interrupt import StopRequest
from autoplace.train.stage_timer import StageTimer

if TYPE_CHECKING:
    from autoplace.train.schemes.base import Setup


@dataclass(slots=True)
class Spent:
    """Seconds of one rollout.

    Attributes:
        act_s: in ``act``.
        env_s: in stepping, waiting for and recording the environments.
        row_s: in ``on_row``.
    """

    act_s: float = 0.0
    env_s: float = 0.0
    row_s: float = 0.0


class VectorSteps:
    """Steps environments through a rollout, group by group.

    Attributes:
        groups: the environments of each group.
        finals: index and observations of the truncated episodes of a complete rollout, on the host.
    """

    finals: tuple[Tensor, Tensor]

    def __init__(
        self,
        envs: VectorEnv,
        outcomes: Tensor,
        *,
        episodes: EpisodeTracker | None,
        stop: StopRequest,
    ) -> None:
        """Record what the environments answer in ``outcomes``, ``[T, 3, N]`` on the host."""
        self._num_steps = outcomes.shape[0]
        self._observation_size = envs.observations.shape[1]
        self._stop = stop
        self._envs = in_groups(envs)
        self.groups = self._envs.groups
        self._recorder = OutcomeRecorder(outcomes, episodes)

    def run(
        self, act: Callable[[int, int], np.ndarray], on_row: Callable[[int], None] | None = None
    ) -> Spent:
        """Step every environment through the whole rollout.

        Args:
            act: from the vector step and the group's number, the actions of that group.
            on_row: called with each vector step as soon as all of it is recorded.

        Raises:
            StopRequested: a stop was asked for between two vector steps.
        """
        envs, steps, spent = self._envs, self._num_steps, Spent()
        groups = [(number, part.start) for number, part in enumerate(self.groups)]
        last = groups[-1][0]
        envs.settle()
        self._recorder.take_finals(self._observation_size)  # of an interrupted rollout
        then_s = now()
        for t in range(steps + 1):
            if t < steps:
                self._stop.check()
            for number, first in groups:
                if t > 0:
                    self._recorder.record(t - 1, envs.step_wait(number), first)
                    if t == steps and number == last:
                        self.finals = self._recorder.take_finals(self._observation_size)
                    stepped_s = now()
                    spent.env_s += stepped_s - then_s
                    then_s = stepped_s
                    if number == last and on_row is not None:
                        on_row(t - 1)
                        then_s = now()
                        spent.row_s += then_s - stepped_s
                if t < steps:
                    actions = act(t, number)
                    acted_s = now()
                    spent.act_s += acted_s - then_s
                    then_s = acted_s
                    envs.step_async(actions, number)
        return spent

    @property
    def valid_index(self) -> Tensor | None:
        """As :attr:`OutcomeRecorder.valid_index`, of a complete rollout."""
        return self._recorder.valid_index


class HostSampler:
    """Fills a rollout in host memory."""

    def __init__(
        self,
        envs: VectorEnv,
        rollout: Rollout,
        *,
        threads: int,
        engine: str = EAGER,
        episodes: EpisodeTracker | None,
        timer: StageTimer,
        stop: StopRequest,
    ) -> None:
        """Tell ``episodes``, ``timer`` and ``stop`` what a scheme's setup tells them."""
        self._rollout = rollout
        self._threads, self._engine = threads, engine
        self._timer = timer
        self._steps = VectorSteps(envs, rollout.outcomes, episodes=episodes, stop=stop)
        # Memory that is shared with the environments, no copies.
        self._observations = torch.from_numpy(envs.observations)
        self._groups = [
            (self._observations[part], rollout.columns(part)) for part in self._steps.groups
        ]
        self._actions: list[list[np.ndarray]] = [
            list(columns.actions.numpy()) for _, columns in self._groups
        ]

    @classmethod
    def of(cls, setup: Setup, envs: VectorEnv, rollout: Rollout) -> HostSampler:
        """The sampler of a scheme that samples in its own process."""
        return cls(
            envs,
            rollout,
            threads=setup.placement.sample_threads,
            engine=setup.network.engine_here,
            episodes=setup.episodes,
            timer=setup.timer,
            stop=setup.stop,
        )

    def sample(
        self,
        policy_step: Act,
        noise: Tensor,
        *,
        chunk_steps: int | None = None,
        on_chunk: Callable[[int, int], None] | None = None,
    ) -> None:
        """Fill the rollout, handing over each chunk of steps as soon as it is complete.

        Args:
            policy_step: acts, by the weights of its network.
            noise: ``[T, N, A]`` on the host.
            chunk_steps: vector steps in a chunk; the last one may be shorter.
            on_chunk: called with the first and one past the last step of each chunk.

        Raises:
            StopRequested: a stop was asked for between two vector steps.
        """
        rollout, steps = self._rollout, self._steps
        noise_rows = [noise[:, part].unbind(0) for part in steps.groups]
        last = rollout.rollout_steps - 1
        chunk_start = 0

        def act(t: int, group: int) -> np.ndarray:
            observations, columns = self._groups[group]
            policy_step(observations, noise_rows[group][t], columns, t)
            return self._actions[group][t]

        def on_row(t: int) -> None:
            nonlocal chunk_start
            if t == last:
                rollout.observation_rows[-1].copy_(self._observations)
                rollout.final_index, rollout.final_observations = steps.finals
                rollout.valid_index = steps.valid_index
            if on_chunk is not None and (t + 1 - chunk_start == chunk_steps or t == last):
                on_chunk(chunk_start, t + 1)
                chunk_start = t + 1

        with devices.torch_threads(self._threads, self._engine):
            spent = steps.run(act, on_row)
        self._timer.add("policy_step", "sampler", spent.act_s)
        self._timer.add("env_step", "sampler", spent.env_s)
        if on_chunk is not None:
            self._timer.add("rollout_to_device", "sampler", spent.row_s)
