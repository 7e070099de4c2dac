"""The sampler processes as their coordinator knows them: started, told of weights, supervised."""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from autoplace import device as devices
from autoplace.device import MessageChannel, now
from autoplace.envs import BACKENDS
from autoplace.envs.make import registered_spec
from autoplace.envs.memory_watch import LOOK_INTERVAL_S, MemoryWatch
from autoplace.envs.workers import DEADLINE_S, START_DEADLINE_S, pickled
from autoplace.errors import EnvError, UsageError
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.rollout import Rollout
from autoplace.processes import ChildProcess, describe_exit, exit_hint, raise_packed
from autoplace.train.parts import Part
from autoplace.train.sampler_process import SamplerFailure, SamplerJob, run_sampler

if TYPE_CHECKING:
    from autoplace.train.schemes.base import Setup

log = logging.getLogger(__name__)

_GRACE_S = 5.0  # for a sampler to close its environments
_LINE = 8  # int64 in a cache line, so that no two samplers write to the same one


class _Worker:
    """One sampler: its process, its channels, and what it has sent."""

    def __init__(self, job: SamplerJob, number: int) -> None:
        envs = f"{job.start}" if job.stop - job.start == 1 else f"{job.start}-{job.stop - 1}"
        self.name = f"sampler process {number} (environments {envs})"
        self.versions, self.parts = devices.message_channel(), devices.message_channel()
        self.process = devices.spawn(
            run_sampler,
            self.versions,
            self.parts,
            job,
            name=f"autoplace sampler {number}",
            host_only=True,
        )
        self.beats = job.beats
        self.next_iteration = job.iterations.start  # what it is working on, or waits to begin
        self.complete: deque[Part] = deque()
        self.seen_beats = 0
        self.seen_s = now()  # when these were new


class SamplerPool:
    """``W`` sampler processes, each with an equal share of the environments.

    Attributes:
        workers: the processes and their channels.
    """

    def __init__(self, setup: Setup, rollouts: Sequence[Rollout]) -> None:
        """Start them; they end with the run's resources.

        Args:
            setup: of the run.
            rollouts: as many as versions of the weights are kept, in shared memory.

        Raises:
            UsageError: the number of workers does not divide that of the environments, or these
                would step in processes of their own.
            EnvError: the environment cannot be sent to another process.
        """
        placement, num_envs = setup.placement, setup.hyperparameters.num_envs
        count = placement.num_workers
        if count < 1 or num_envs % count:
            raise UsageError(
                f"--num-workers must divide the {num_envs} environments of scheme async, "
                f"got {count}: use a divisor"
            )
        if any(entry.has_workers for entry in BACKENDS if entry.name == placement.env_backend):
            within = " or ".join(entry.name for entry in BACKENDS if not entry.has_workers)
            raise UsageError(
                "the samplers of scheme async step their environments themselves, got "
                f"--env-backend {placement.env_backend}: use {within}"
            )
        if setup.restarts.allowed:
            log.warning("--restart-workers: a sampler of scheme async that is lost ends the run")
        env = pickled(
            (setup.description, registered_spec(setup.description.env)), setup.description.env.id
        )
        network, width = setup.network, num_envs // count
        self._iterations = setup.iterations
        self._max_lag = len(rollouts) - 1
        self._newest = setup.iterations.start - 1  # version that the workers were told of
        self._deadline_s = setup.worker_deadline_s or DEADLINE_S
        self._start_deadline_s = max(self._deadline_s, START_DEADLINE_S)
        self._memory: MemoryWatch | None = None  # once all have started
        self._looked_s = now()
        self._weights = devices.shared_empty((len(rollouts), network.flat.numel()))
        beats = devices.shared_empty((count + 1, _LINE), torch.int64).zero_()
        self._stopping = beats[count, :1]
        self.workers: list[_Worker] = []
        setup.resources.callback(self._close)
        for w in range(count):
            share = slice(w * width, (w + 1) * width)
            job = SamplerJob(
                env=env,
                env_backend=placement.env_backend,
                env_seeds=setup.env_seeds[share],
                start=share.start,
                stop=share.stop,
                draws=setup.draws,
                iterations=setup.iterations,
                max_policy_lag=self._max_lag,
                spec=network.spec,
                engine=network.engine,
                normalize_observations=network.normalize_observations,
                weights=self._weights,
                rollouts=tuple((r.observations, r.actions, r.outcomes) for r in rollouts),
                beats=beats[w, :1],
                stopping=self._stopping,
            )
            self.workers.append(_Worker(job, w))

    def publish(self, version: int, network: ActorCritic) -> None:
        """Let the samplers act by weights that ``version`` updates have made."""
        self._weights[version % len(self._weights)].copy_(network.flat)
        self._newest = version
        for worker in self.workers:
            if self._may_work(worker):
                worker.seen_s = now()
            worker.versions.put(version)

    def receive(self, ready: Collection[MessageChannel]) -> bool:
        """Receive what has come by those channels that are ready; whether anything has.

        Raises:
            EnvError: a sampler leaks memory.
            Exception: whatever went wrong in one, with its traceback as the cause.
        """
        self._refuse_leaking()
        return any([self._receive(w) for w in self.workers if w.parts in ready])

    def check(self) -> None:
        """See whether all are well.

        Raises:
            EnvError: a sampler has ended, or has been silent for too long.
            Exception: whatever went wrong in one, with its traceback as the cause.
        """
        for worker in self.workers:
            was_alive = worker.process.is_alive()
            self._receive(worker)
            if not was_alive:
                code = getattr(worker.process, "exitcode", None)
                raise EnvError(f"{worker.name} {describe_exit(code)}{exit_hint(code)}")
            self._refuse_hung(worker)

    def has(self, iteration: int) -> bool:
        """Whether every part of a rollout is complete."""
        return all(worker.next_iteration > iteration for worker in self.workers)

    def take(self, iteration: int) -> list[Part]:
        """The parts of a rollout that is complete."""
        parts = [worker.complete.popleft() for worker in self.workers]
        if self._memory is None:
            processes = [w.process for w in self.workers if isinstance(w.process, ChildProcess)]
            self._memory = MemoryWatch([process.pid for process in processes])
        assert all(part.iteration == iteration for part in parts), (iteration, parts)
        return parts

    @property
    def is_at_rest(self) -> bool:
        """Whether every sampler waits for younger weights, or has sampled all there is to."""
        return not any(self._may_work(worker) for worker in self.workers)

    def _may_work(self, worker: _Worker) -> bool:
        following = worker.next_iteration
        if following not in self._iterations:
            return False
        return max(self._iterations.start, following - self._max_lag) <= self._newest

    def _receive(self, worker: _Worker) -> bool:
        before = worker.next_iteration
        try:
            while True:
                message = worker.parts.get(timeout=0.0)
                if isinstance(message, SamplerFailure):
                    raise_packed(message.error)
                worker.complete.append(message)
                worker.next_iteration += 1
        except queue.Empty:
            return worker.next_iteration > before

    def _refuse_hung(self, worker: _Worker) -> None:
        beats = int(worker.beats[0])
        if beats != worker.seen_beats or not self._may_work(worker):
            worker.seen_beats, worker.seen_s = beats, now()
            return
        deadline_s = self._deadline_s if beats else self._start_deadline_s
        if now() - worker.seen_s <= deadline_s:
            return
        where = ""
        if isinstance(worker.process, ChildProcess):
            where = f" (process {worker.process.pid}, killed)"
            worker.process.stop()
        raise EnvError(
            f"{worker.name} has not answered for {deadline_s:g} s{where}: look for an endless "
            "loop or a lock in the environment's step, reset or constructor"
        )

    def _refuse_leaking(self) -> None:
        if self._memory is None or now() - self._looked_s < LOOK_INTERVAL_S:
            return
        self._looked_s = now()
        leaking = self._memory.leaking()
        if leaking is not None:
            index, what = leaking
            raise EnvError(f"{self.workers[index].name} {what}")

    def _close(self) -> None:
        """Let every sampler close its environments, and kill those that have not."""
        self._stopping.fill_(1)
        for worker in self.workers:
            worker.versions.put(None)
        end_s = now() + _GRACE_S
        for worker in self.workers:
            if isinstance(worker.process, ChildProcess):
                worker.process.stop(max(0.0, end_s - now()))
            else:
                worker.process.join()
            for channel in (worker.versions, worker.parts):
                if hasattr(channel, "close"):
                    channel.close()
