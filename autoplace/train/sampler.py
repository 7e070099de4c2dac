"""Sampling on the host: policy and environments both on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.device import now
from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.recorder import OutcomeRecorder
from autoplace.envs.vector import VectorEnv
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.rollout import Rollout
from autoplace.train.interrupt import StopRequest
from autoplace.train.schemes.base import Setup
from autoplace.train.stage_timer import StageTimer


class HostSampler:
    """Fills a rollout in host memory."""

    def __init__(
        self,
        envs: VectorEnv,
        rollout: Rollout,
        *,
        threads: int,
        episodes: EpisodeTracker | None,
        timer: StageTimer,
        stop: StopRequest,
    ) -> None:
        """Tell ``episodes``, ``timer`` and ``stop`` what a scheme's setup tells them."""
        self._envs = envs
        self._rollout = rollout
        self._threads = threads
        self._timer = timer
        self._stop = stop
        self._recorder = OutcomeRecorder(rollout.outcomes, episodes)

    @classmethod
    def of(cls, setup: Setup, envs: VectorEnv, rollout: Rollout) -> HostSampler:
        """The sampler of a scheme that samples in its own process."""
        return cls(
            envs,
            rollout,
            threads=setup.placement.sample_threads,
            episodes=setup.episodes,
            timer=setup.timer,
            stop=setup.stop,
        )

    def sample(
        self,
        policy_step: PolicyStep,
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
        envs, rollout, timer = self._envs, self._rollout, self._timer
        record, stop = self._recorder.record, self._stop
        observations = torch.from_numpy(envs.observations)  # shared memory, no copy
        actions = list(rollout.actions.numpy())
        last = rollout.rollout_steps - 1
        policy_s = env_s = chunk_s = 0.0
        chunk_start = 0
        self._recorder.take_finals(rollout.spec.observation_size)  # of an interrupted rollout
        with devices.torch_threads(self._threads):
            for t, noise_row in enumerate(noise.unbind(0)):
                stop.check()
                start_s = now()
                policy_step(observations, noise_row, rollout, t)
                acted_s = now()
                record(t, envs.step(actions[t]))
                if t == last:
                    self._finish()
                stepped_s = now()
                policy_s += acted_s - start_s
                env_s += stepped_s - acted_s
                if on_chunk is not None and (t + 1 - chunk_start == chunk_steps or t == last):
                    on_chunk(chunk_start, t + 1)
                    chunk_start = t + 1
                    chunk_s += now() - stepped_s
        timer.add("policy_step", "sampler", policy_s)
        timer.add("env_step", "sampler", env_s)
        if on_chunk is not None:
            timer.add("rollout_to_device", "sampler", chunk_s)

    def _finish(self) -> None:
        rollout = self._rollout
        rollout.observation_rows[-1].copy_(torch.from_numpy(self._envs.observations))
        finals = self._recorder.take_finals(rollout.spec.observation_size)
        rollout.final_index, rollout.final_observations = finals
        rollout.valid_index = self._recorder.valid_index
