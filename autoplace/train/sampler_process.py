"""The process that samples a share of the environments, at its own pace.

It fills its columns of rollout after rollout, each in the memory that the rollout before it by
``max_policy_lag + 1`` was in, with the newest weights that a lag of 1 allows. Where all that it has
been told of are too old, it waits: so the bound holds for whatever is learned from, and nothing is
thrown away.

The weights lie in shared memory too, version ``v`` in row ``v mod (max_policy_lag + 1)``, and are
used where they are. That is sound: version ``v`` makes room only for version
``v + max_policy_lag + 1``, which is learned from a rollout that no sampler has completed before it
is through with the last part in which ``v`` may act.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle
import gymnasium as gym
import numpy as np
from torch import Tensor

from autoplace import device as devices
from autoplace.device import MessageChannel, now
from autoplace.engines import Verdict
from autoplace.envs import Step, VectorEnv, make_vector_env
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import make_policy_step
from autoplace.processes import pack_error
from autoplace.train.draws import Draws
from autoplace.train.interrupt import StopRequest, StopRequested
from autoplace.train.parts import Part
from autoplace.train.sampler import HostSampler
from autoplace.train.stage_timer import StageTimer
from autoplace.workload import NetworkSpec


@dataclass(frozen=True, kw_only=True)
class SamplerJob:
    """Everything a sampler is made from, as it crosses to its process.

    Attributes:
        env: (description, what Gymnasium has registered under its name), by cloudpickle.
        env_backend: how its environments are stepped together.
        env_seeds: one for each of its environments.
        start: its first environment.
        stop: one past its last.
        draws: the run's randomness.
        iterations: of the run.
        begins_at: the first of them that it samples.
        is_restarted: whether it takes the place of a sampler that was lost.
        max_policy_lag: how many updates old the weights may be.
        oldest: version of the weights that may act.
        spec: of the network.
        engine: of the placement.
        normalize_observations: whether the network standardises observations.
        weights: ``[max_policy_lag + 1, P]``, shared.
        rollouts: (observations, actions, outcomes) of each buffer, shared.
        beats: ``[1]`` int64, shared: vector steps so far.
        stopping: ``[1]`` int64, shared: not 0 once the sampler is to end.
    """

    env: bytes
    env_backend: str
    env_seeds: Sequence[int]
    start: int
    stop: int
    draws: Draws
    iterations: range
    begins_at: int
    is_restarted: bool
    max_policy_lag: int
    oldest: int
    spec: NetworkSpec
    engine: str
    normalize_observations: bool
    weights: Tensor
    rollouts: tuple[tuple[Tensor, Tensor, Tensor], ...]
    beats: Tensor
    stopping: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerFailure:
    """What went wrong in a sampler, with its traceback."""

    error: tuple[BaseException, str]


def run_sampler(versions: MessageChannel, parts: MessageChannel, job: SamplerJob) -> None:
    """Sample all iterations, and end once told to.

    Args:
        versions: of the weights, as they come to be; ``None`` ends the sampler.
        parts: where each :class:`Part` goes, or a :class:`SamplerFailure`.
        job: what is sampled.
    """
    try:
        with devices.torch_threads(1):
            _Sampler(versions, parts, job).run()
    except StopRequested:
        pass
    except Exception as error:
        parts.put(SamplerFailure(error=pack_error(error)))


class AfterLoss:
    """Environments in place of some whose episodes were lost: the first step only says that.

    See :class:`autoplace.envs.vector.VectorEnv`.
    """

    def __init__(self, envs: VectorEnv) -> None:
        self.num_envs, self.description = envs.num_envs, envs.description
        self.observations = envs.observations
        self.reset, self.close = envs.reset, envs.close
        self._envs = envs
        self._is_told = False

    def step(self, actions: np.ndarray) -> Step:
        """Step all, but for the first time."""
        if self._is_told:
            return self._envs.step(actions)
        self._is_told = True
        none = np.zeros(self.num_envs, np.bool_)
        rewards = np.zeros(self.num_envs, np.float32)
        return Step(self.observations, rewards, none, ~none, (), self.observations[:0], none)


class _Heartbeat(StopRequest):
    """Shows at each vector step that the sampler is alive, and stops it between two of them."""

    def __init__(self, job: SamplerJob) -> None:
        super().__init__()
        self._beats, self._stopping = job.beats.numpy(), job.stopping.numpy()

    def check(self) -> None:
        self._beats[0] += 1
        if self._stopping[0]:
            raise StopRequested


class _Sampler:
    def __init__(self, versions: MessageChannel, parts: MessageChannel, job: SamplerJob) -> None:
        self._versions, self._parts, self._job = versions, parts, job
        self._newest = self._version = -1  # that it was told of, that it acts by
        description, registered = cloudpickle.loads(job.env)
        if registered is not None:
            gym.registry[registered.id] = registered
        self._envs: VectorEnv = make_vector_env(
            description,
            num_envs=job.stop - job.start,
            backend=job.env_backend,
            first_index=job.start,
        )
        if job.is_restarted:
            self._envs = AfterLoss(self._envs)
        plain = ActorCritic(
            job.spec, normalize_observations=job.normalize_observations, engine=job.engine
        )
        self._verdicts: list[Verdict] = []
        self._policy_steps = [
            make_policy_step(plain.over(row), self._verdicts.append)
            for row in job.weights.unbind(0)
        ]
        self._timer = StageTimer()
        stop = _Heartbeat(job)
        self._rollouts = []
        for tensors in job.rollouts:
            steps, num_envs = tensors[1].shape[:2]
            whole = Rollout(job.spec, rollout_steps=steps, num_envs=num_envs, tensors=tensors)
            self._rollouts.append(whole.columns(slice(job.start, job.stop)))
        self._samplers = [
            HostSampler(self._envs, rollout, threads=1, episodes=None, timer=self._timer, stop=stop)
            for rollout in self._rollouts
        ]

    def run(self) -> None:
        """Sample part after part, and wait for the end."""
        job = self._job
        try:
            self._envs.reset(job.env_seeds)
            for iteration in range(job.begins_at, job.iterations.stop):
                self._find_version(iteration)
                self._sample(iteration)
            while True:
                self._receive()
        finally:
            self._envs.close()

    def _sample(self, iteration: int) -> None:
        job, buffer = self._job, iteration % len(self._rollouts)
        rollout = self._rollouts[buffer]
        noise = job.draws.noise(iteration)[:, job.start : job.stop]
        policy_step = self._policy_steps[self._version % len(self._policy_steps)]
        self._samplers[buffer].sample(policy_step, noise)
        verdicts, self._verdicts[:] = tuple(self._verdicts), []
        valid, start_s = rollout.valid_index, now()
        self._parts.put(
            Part(
                iteration=iteration,
                version=self._version,
                final_index=rollout.final_index.numpy(),
                final_observations=rollout.final_observations.numpy(),
                valid_index=None if valid is None else valid.numpy(),
                stage_s=self._timer.take(),
                verdicts=verdicts,
            )
        )
        self._timer.add("handoff", "sampler", now() - start_s)  # keeps the next part waiting

    def _find_version(self, iteration: int) -> None:
        """Take the newest version whose lag is not below 1; wait for one that is young enough.

        Now and then, where a sampler pauses for long between two parts, the learner is through with
        the rollout just completed. A bound of 1 would allow both versions then, and chance choose.
        """
        oldest, lag = self._job.oldest, self._job.max_policy_lag
        start_s = now()
        try:
            while True:
                self._receive(0.0)
        except queue.Empty:
            pass
        self._timer.add("handoff", "sampler", now() - start_s)
        while self._newest < max(oldest, iteration - lag):
            self._receive()
        self._version = min(self._newest, max(oldest, iteration - min(1, lag)))

    def _receive(self, timeout_s: float | None = None) -> None:
        version = self._versions.get(timeout=timeout_s)
        if version is None:
            raise StopRequested
        self._newest = version
