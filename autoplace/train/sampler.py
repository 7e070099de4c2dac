"""The sampler whose policy is on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.engines import EAGER
from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.vector import VectorEnv
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import Act, step_over
from autoplace.train.interrupt import StopRequest
from autoplace.train.stage_timer import StageTimer
from autoplace.train.vector_steps import VectorSteps

if TYPE_CHECKING:
    from autoplace.train.schemes.base import Setup


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
        self._steps = VectorSteps(envs, rollout.outcomes.numpy(), episodes=episodes, stop=stop)
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
        policy_steps = [
            step_over(policy_step, observations, noise[:, part], columns)
            for part, (observations, columns) in zip(steps.groups, self._groups, strict=True)
        ]
        last = rollout.rollout_steps - 1
        chunk_start = 0

        def act(t: int, group: int) -> np.ndarray:
            policy_steps[group](t)
            return self._actions[group][t]

        def complete() -> None:
            rollout.observation_rows[-1].copy_(self._observations)
            rollout.note_ends(*steps.finals, steps.valid_index)

        def on_row(t: int) -> None:
            nonlocal chunk_start
            assert on_chunk is not None
            if t == last:
                complete()
            if t + 1 - chunk_start == chunk_steps or t == last:
                on_chunk(chunk_start, t + 1)
                chunk_start = t + 1

        with devices.torch_threads(self._threads, self._engine):
            spent = steps.run(act, None if on_chunk is None else on_row)
            if on_chunk is None:
                complete()
        self._timer.add("policy_step", "sampler", spent.act_s)
        self._timer.add("env_step", "sampler", spent.env_s)
        if on_chunk is not None:
            self._timer.add("rollout_to_device", "sampler", spent.row_s)
