"""How a sampler process acts where its policy needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from autoplace import device as devices
from autoplace.engines import Verdict
from autoplace.envs import VectorEnv
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import make_policy_step
from autoplace.train.interrupt import StopRequest
from autoplace.train.sampler import HostSampler
from autoplace.train.stage_timer import StageTimer

if TYPE_CHECKING:
    from autoplace.train.sampler_process import SamplerJob


class TorchActing:
    """By a network of torch on the shared arrays, on one thread."""

    def __init__(
        self, job: SamplerJob, envs: VectorEnv, timer: StageTimer, stop: StopRequest
    ) -> None:
        self._verdicts: list[Verdict] = []
        plain = ActorCritic(
            job.spec, normalize_observations=job.normalize_observations, engine=job.engine
        )
        self._policy_steps = [
            make_policy_step(plain.over(row), self._verdicts.append)
            for row in devices.shared_tensor(job.weights).unbind(0)
        ]
        self._noise = [devices.shared_tensor(shared)[:, job.share] for shared in job.noise]
        self._rollouts = []
        for shared in job.rollouts:
            steps, num_envs = shared[1].shape[:2]
            whole = Rollout(job.spec, rollout_steps=steps, num_envs=num_envs, shared=shared)
            self._rollouts.append(whole.columns(job.share))
        self._samplers = [
            HostSampler(envs, rollout, threads=1, episodes=None, timer=timer, stop=stop)
            for rollout in self._rollouts
        ]

    def sample(self, iteration: int, version: int) -> None:
        """Fill the buffer of ``iteration`` by ``version`` of the weights."""
        buffer = iteration % len(self._samplers)
        policy_step = self._policy_steps[version % len(self._policy_steps)]
        self._samplers[buffer].sample(policy_step, self._noise[buffer])
        self._done = self._rollouts[buffer]

    @property
    def finals(self) -> tuple[np.ndarray, np.ndarray]:
        """Index and observations of the truncated episodes of the last rollout."""
        return self._done.final_index.numpy(), self._done.final_observations.numpy()

    @property
    def valid_index(self) -> np.ndarray | None:
        """The rows of the last rollout that are transitions; ``None`` where all are."""
        valid = self._done.valid_index
        return None if valid is None else valid.numpy()

    def take_verdicts(self) -> tuple[Verdict, ...]:
        """What came of engines since the last time."""
        verdicts, self._verdicts[:] = tuple(self._verdicts), []
        return verdicts
