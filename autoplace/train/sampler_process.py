"""The process that samples a share of the environments, at its own pace.

It fills its columns of rollout after rollout, each in the memory that the rollout before it by
``max_policy_lag + 1`` was in, with the newest weights that a lag of 1 allows. Where all that it has
been told of are too old, it waits: so the bound holds for whatever is learned from, and nothing is
thrown away.

The weights lie in shared memory too, version ``v`` in row ``v mod (max_policy_lag + 1)``, and are
used where they are. That is sound: version ``v`` makes room only for version
``v + max_policy_lag + 1``, which is learned from a rollout that no sampler has completed before it
is through with the last part in which ``v`` may act.

A policy of numpy acts without torch, whose import would take five times the memory of all the rest.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autoplace.clock import MessageChannel, now
from autoplace.engines import Verdict
from autoplace.envs import Step, VectorEnv, make_vector_env
from autoplace.envs.elsewhere import unpacked
from autoplace.ppo.numpy_policy import NumpyPolicy, PolicyLayout
from autoplace.processes import pack_error
from autoplace.shared_array import SharedArray
from autoplace.train.interrupt import StopRequest, StopRequested
from autoplace.train.parts import Part
from autoplace.train.stage_timer import StageTimer
from autoplace.train.vector_steps import VectorSteps
from autoplace.workload import NetworkSpec


@dataclass(frozen=True, kw_only=True)
class SamplerJob:
    """Everything a sampler is made from, as it crosses to its process.

    Attributes:
        env: from :func:`autoplace.envs.elsewhere.packed`.
        env_backend: how its environments are stepped together.
        env_seeds: one for each of its environments.
        start: its first environment.
        stop: one past its last.
        iterations: of the run.
        begins_at: the first of them that it samples.
        is_restarted: whether it takes the place of a sampler that was lost.
        max_policy_lag: how many updates old the weights may be.
        oldest: version of the weights that may act.
        spec: of the network.
        engine: of the placement.
        normalize_observations: whether the network standardises observations.
        policy: where the policy is in the weights, if numpy may act by it without being compared
            with torch.
        weights: ``[max_policy_lag + 1, P]``.
        noise: ``[T, N, A]`` of each buffer.
        rollouts: (observations, actions, outcomes) of each buffer.
        beats: ``[W + 1, line]`` int64: vector steps so far of each sampler, in a cache line of its
            own; the last row is not 0 once the samplers are to end.
        number: of this sampler.
    """

    env: bytes
    env_backend: str
    env_seeds: Sequence[int]
    start: int
    stop: int
    iterations: range
    begins_at: int
    is_restarted: bool
    max_policy_lag: int
    oldest: int
    spec: NetworkSpec
    engine: str
    normalize_observations: bool
    policy: PolicyLayout | None
    weights: SharedArray
    noise: tuple[SharedArray, ...]
    rollouts: tuple[tuple[SharedArray, ...], ...]
    beats: SharedArray
    number: int

    @property
    def share(self) -> slice:
        """Its environments."""
        return slice(self.start, self.stop)


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
        beats = job.beats.array
        self._beats, self._stopping = beats[job.number], beats[-1]

    def check(self) -> None:
        self._beats[0] += 1
        if self._stopping[0]:
            raise StopRequested


class _Acting(Protocol):
    """Fills the sampler's columns of one rollout after the other."""

    @property
    def finals(self) -> tuple[np.ndarray, np.ndarray]:
        """Index and observations of the truncated episodes of the last rollout."""
        ...

    @property
    def valid_index(self) -> np.ndarray | None:
        """The rows of the last rollout that are transitions; ``None`` where all are."""
        ...

    def sample(self, iteration: int, version: int) -> None:
        """Fill the buffer of ``iteration`` by ``version`` of the weights."""
        ...

    def take_verdicts(self) -> tuple[Verdict, ...]:
        """What came of engines since the last time."""
        ...


class _NumpyActing:
    """By numpy on the shared arrays."""

    def __init__(
        self,
        job: SamplerJob,
        layout: PolicyLayout,
        envs: VectorEnv,
        timer: StageTimer,
        stop: StopRequest,
    ) -> None:
        share = job.share
        self._envs, self._timer = envs, timer
        self._policies = [NumpyPolicy(row, layout) for row in job.weights.array]
        self._noise = [shared.array[:, share] for shared in job.noise]
        rollouts = [[shared.array for shared in rollout] for rollout in job.rollouts]
        self._observations = [list(rollout[0][:, share]) for rollout in rollouts]
        self._actions = [list(rollout[1][:, share]) for rollout in rollouts]
        self._steps = [
            VectorSteps(envs, rollout[2][:, :, share], episodes=None, stop=stop)
            for rollout in rollouts
        ]

    def sample(self, iteration: int, version: int) -> None:
        buffer = iteration % len(self._steps)
        policy = self._policies[version % len(self._policies)]
        seen, recorded = self._envs.observations, self._observations[buffer]
        noise: list[np.ndarray] = list(self._noise[buffer])
        actions: list[np.ndarray] = self._actions[buffer]
        self._done = self._steps[buffer]

        def act(t: int, group: int) -> np.ndarray:
            recorded[t][:] = seen
            policy.act(recorded[t], noise[t], actions[t])
            return actions[t]

        spent = self._done.run(act)
        recorded[-1][:] = seen
        self._timer.add("policy_step", "sampler", spent.act_s)
        self._timer.add("env_step", "sampler", spent.env_s)

    @property
    def finals(self) -> tuple[np.ndarray, np.ndarray]:
        return self._done.finals

    @property
    def valid_index(self) -> np.ndarray | None:
        return self._done.valid_index

    def take_verdicts(self) -> tuple[Verdict, ...]:
        return ()  # the engine was tried before this process began


class _Sampler:
    def __init__(self, versions: MessageChannel, parts: MessageChannel, job: SamplerJob) -> None:
        self._versions, self._parts, self._job = versions, parts, job
        self._newest = self._version = -1  # that it was told of, that it acts by
        self._envs: VectorEnv = make_vector_env(
            unpacked(job.env),
            num_envs=job.stop - job.start,
            backend=job.env_backend,
            first_index=job.start,
        )
        if job.is_restarted:
            self._envs = AfterLoss(self._envs)
        self._timer, stop = StageTimer(), _Heartbeat(job)
        if job.policy is not None:
            self._acting: _Acting = _NumpyActing(job, job.policy, self._envs, self._timer, stop)
        else:
            from autoplace.train.torch_acting import TorchActing  # imports torch

            self._acting = TorchActing(job, self._envs, self._timer, stop)

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
        self._acting.sample(iteration, self._version)
        start_s = now()
        final_index, final_observations = self._acting.finals
        self._parts.put(
            Part(
                iteration=iteration,
                version=self._version,
                final_index=final_index,
                final_observations=final_observations,
                valid_index=self._acting.valid_index,
                stage_s=self._timer.take(),
                verdicts=self._acting.take_verdicts(),
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
