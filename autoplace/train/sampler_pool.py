"""The sampler processes as their coordinator knows them: started, told of weights, supervised."""

from __future__ import annotations

import dataclasses
import logging
import queue
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from autoplace import device as devices
from autoplace.device import MessageChannel, now
from autoplace.engines import NUMPY
from autoplace.envs import BACKENDS
from autoplace.envs.elsewhere import packed
from autoplace.envs.memory_watch import LOOK_INTERVAL_S, MemoryWatch
from autoplace.envs.workers import DEADLINE_S, START_DEADLINE_S
from autoplace.errors import EnvError, UsageError
from autoplace.ppo.numpy_policy_step import policy_layout
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import passes_trial
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
        self._short_name = f"autoplace sampler {number}"
        self.next_iteration = job.begins_at  # what it is working on, or waits to begin
        self.complete: deque[Part] = deque()
        self._start(job)

    def _start(self, job: SamplerJob) -> None:
        self.job = job
        self._beats = job.beats.array[job.number]
        self._beats[:] = 0
        self.seen_beats = 0
        self.seen_s = now()  # when these were new
        self.versions, self.parts = devices.message_channel(), devices.message_channel()
        self.process = devices.spawn(
            run_sampler,
            self.versions,
            self.parts,
            job,
            name=self._short_name,
            host_only=True,
        )

    @property
    def beats(self) -> int:
        """Vector steps so far."""
        return int(self._beats[0])

    @property
    def is_untried(self) -> bool:
        """Whether it took a lost one's place and has completed no part since."""
        return self.job.is_restarted and self.next_iteration == self.job.begins_at

    def restart(self, seeds: Sequence[int]) -> None:
        """Let another process sample the part that this one was to sample next."""
        self.stop()
        job, begins_at = self.job, self.next_iteration
        self._start(
            dataclasses.replace(job, env_seeds=seeds, begins_at=begins_at, is_restarted=True)
        )

    def stop(self, grace_s: float = 0.0) -> None:
        """Wait so long for its end, and kill it if need be."""
        if isinstance(self.process, ChildProcess):
            self.process.stop(grace_s)
        else:
            self.process.join()
        for channel in (self.versions, self.parts):
            if hasattr(channel, "close"):
                channel.close()


class SamplerPool:
    """``W`` sampler processes, each with an equal share of the environments.

    Attributes:
        workers: the processes and their channels.
    """

    def __init__(self, setup: Setup, rollouts: Sequence[Rollout], oldest: int) -> None:
        """Start them; they end with the run's resources.

        Args:
            setup: of the run.
            rollouts: as many as versions of the weights are kept, in shared memory.
            oldest: version of the weights that may act.

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
        env = packed(setup.description)
        network, width = setup.network, num_envs // count
        self._restarts = setup.restarts
        self._iterations = setup.iterations
        self._max_lag = len(rollouts) - 1
        self._oldest = oldest
        self._newest = oldest - 1  # version that the workers were told of
        self._deadline_s = setup.worker_deadline_s or DEADLINE_S
        self._start_deadline_s = max(self._deadline_s, START_DEADLINE_S)
        self._memory: MemoryWatch | None = None  # once all have started
        self._looked_s = now()
        weights = devices.shared_array((len(rollouts), network.flat.numel()))
        self._weights = devices.shared_tensor(weights)
        shape = setup.hyperparameters.rollout_steps, num_envs, network.spec.action_size
        noise = tuple(devices.shared_array(shape) for _ in rollouts)
        self._noise = [devices.shared_tensor(shared) for shared in noise]
        self._draws = setup.draws
        first = setup.iterations.start
        for iteration in range(first, first + len(rollouts)):
            self._draw(iteration)
        beats = devices.shared_array((count + 1, _LINE), "int64")
        self._stopping = beats.array[count]
        self._stopping[:] = 0
        may_act_in_numpy = network.engine_here == NUMPY and passes_trial(
            network, num_rows=width, hear=setup.engines.hear
        )
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
                iterations=setup.iterations,
                begins_at=setup.iterations.start,
                is_restarted=False,
                max_policy_lag=self._max_lag,
                oldest=oldest,
                spec=network.spec,
                engine=network.engine,
                normalize_observations=network.normalize_observations,
                policy=policy_layout(network) if may_act_in_numpy else None,
                weights=weights,
                noise=noise,
                rollouts=tuple(rollout.shared for rollout in rollouts),
                beats=beats,
                number=w,
            )
            self.workers.append(_Worker(job, w))

    def publish(self, version: int, flat: Tensor) -> None:
        """Let the samplers act by the buffer of a network that ``version`` updates have made."""
        self._weights[version % len(self._weights)].copy_(flat)
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
        self._look_at_memory()
        return any([self._receive(w) for w in self.workers if w.parts in ready])

    def check(self) -> None:
        """See whether all are well, and start anew those that are not, where that is wanted.

        Raises:
            EnvError: a sampler has ended, or has been silent for too long.
            Exception: whatever went wrong in one, with its traceback as the cause.
        """
        for index, worker in enumerate(self.workers):
            was_alive = worker.process.is_alive()
            self._receive(worker)
            if was_alive:
                self._look_whether_hung(index)
            else:
                code = getattr(worker.process, "exitcode", None)
                self._lose(index, f"{describe_exit(code)}{exit_hint(code)}")

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
        self._draw(iteration + len(self._noise))  # nobody reads the noise of this one any more
        return parts

    def _draw(self, iteration: int) -> None:
        """Draw the noise of a rollout that is still to be sampled."""
        if iteration in self._iterations:
            buffer = self._noise[iteration % len(self._noise)]
            buffer.copy_(self._draws.noise(iteration))

    @property
    def is_at_rest(self) -> bool:
        """Whether every sampler waits for younger weights, or has sampled all there is to."""
        return not any(self._may_work(worker) for worker in self.workers)

    def _may_work(self, worker: _Worker) -> bool:
        following = worker.next_iteration
        if following not in self._iterations:
            return False
        return max(self._oldest, following - self._max_lag) <= self._newest

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

    def _look_whether_hung(self, index: int) -> None:
        worker = self.workers[index]
        beats = worker.beats
        if beats != worker.seen_beats or not self._may_work(worker):
            worker.seen_beats, worker.seen_s = beats, now()
            return
        deadline_s = self._deadline_s if beats else self._start_deadline_s
        if now() - worker.seen_s <= deadline_s:
            return
        where = ""
        if isinstance(worker.process, ChildProcess):
            where = f" (process {worker.process.pid}, killed)"
        self._lose(
            index,
            f"has not answered for {deadline_s:g} s{where}: look for an endless "
            "loop or a lock in the environment's step, reset or constructor",
        )

    def _look_at_memory(self) -> None:
        if self._memory is None or now() - self._looked_s < LOOK_INTERVAL_S:
            return
        self._looked_s = now()
        leaking = self._memory.leaking()
        if leaking is not None:
            self._lose(*leaking)

    def _lose(self, index: int, what: str) -> None:
        """End a sampler that is of no use any more, and start another one in its place.

        The part that was under way is sampled anew, in new episodes.

        Raises:
            EnvError: that is not wanted, or was done before and has not helped.
        """
        worker, restarts = self.workers[index], self._restarts
        fault = f"{worker.name} {what}"
        if not restarts.allowed or worker.is_untried:
            worker.stop()
            since = "; it had been restarted and has completed no part of a rollout since"
            raise EnvError(fault + since * worker.is_untried)
        restarts.count += 1
        log.warning("%s; it is restarted, and its environments begin new episodes", fault)
        entropies = [(seed, restarts.count) for seed in worker.job.env_seeds]
        worker.restart([int(np.random.SeedSequence(e).generate_state(1)[0]) for e in entropies])
        worker.versions.put(self._newest)
        if self._memory is not None and isinstance(worker.process, ChildProcess):
            self._memory.replace(index, worker.process.pid)

    def _close(self) -> None:
        """Let every sampler close its environments, and kill those that have not."""
        self._stopping[:] = 1
        for worker in self.workers:
            worker.versions.put(None)
        end_s = now() + _GRACE_S
        for worker in self.workers:
            worker.stop(max(0.0, end_s - now()))
