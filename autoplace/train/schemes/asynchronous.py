"""Scheme ``async``: several processes sample, each at its own pace, while one learns.

With ``W(k)`` the weights after ``k`` updates and rollouts counted from 0, each of ``W`` sampler
processes fills the columns of its own environments in rollout after rollout: *parts*. It acts by
the newest weights that it has been told of but ``W(k)``, ``W(v)`` in rollout ``k``, and waits for
younger ones where ``k - v`` would exceed ``max_policy_lag``. Update ``k``, which makes ``W(k +
1)``, begins once all parts of rollout ``k`` are complete and update ``k - 1`` is through: it learns
from rollout ``k`` starting from ``W(k)``, so the policy lag of a part is ``k - v``.
Log-probabilities and values are those of the weights that acted, part by part, and PPO's ratio
corrects for the difference.

    sampler 0 | part 0 | part 1 | part 2 | ...
    sampler 1 | part 0  | part 1 | part 2  | ...
    learner             | update 0 | update 1 | ...

A sampler begins part ``k`` when it is through with part ``k - 1``, before ``W(k)`` can have been
learned from that. So the lag is at least 1, except in the first rollout of a run, and where 0 is
all that is allowed. With a bound of 1 it is exactly 1: a seed then repeats to the bit on the CPU,
and what is learned is what ``double-buffer`` learns. With a higher one samplers work ahead, which
evens out rollouts that take some longer than others, and which weights act follows from how long
everything took. A sampler that was lost and is started anew samples its part again, in new
episodes, and loses their first row. Whatever ends a run early drops the parts that are under way
and, where another process learns, the rollout that it learns from; a resumed run samples them anew,
the first by ``W(k - 1)`` again.

On the CPU the process of the run itself learns. With an accelerator it coordinates, and sleeps in
between; crossings between host and device are those of ``double-buffer`` then.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from autoplace import device as devices
from autoplace.device import now
from autoplace.device_names import CPU
from autoplace.train.local_learner import LocalLearner
from autoplace.train.parts import Part, merge
from autoplace.train.remote_learner import LOOK_S, RemoteLearner
from autoplace.train.sampler_pool import SamplerPool
from autoplace.train.schemes.base import Completed, Setup


class AsyncScheme:
    """As many rollouts in shared memory as there may be versions of the weights in use."""

    overlaps = True

    def __init__(self, setup: Setup) -> None:
        self._setup, self._timer = setup, setup.timer
        lag = setup.placement.max_policy_lag
        self._rollouts = setup.shared_rollouts(lag + 1)
        keeps_previous = setup.previous is not None and lag > 0
        oldest = setup.iterations.start - keeps_previous
        self._pool = SamplerPool(setup, self._rollouts, oldest)
        self.learner: LocalLearner | RemoteLearner
        if setup.placement.learn_device == CPU:
            self.learner = LocalLearner(setup, self._rollouts, max_policy_lag=lag)
        else:
            self.learner = RemoteLearner(
                setup, self._rollouts, max_policy_lag=lag, handoff_lane="learner"
            )
        self._versions: tuple[int, ...] = ()  # that sampled the rollout which was complete last
        self._completed: Completed | None = None  # published, and not reported yet

    def start(self) -> None:
        """Let the samplers begin; they reset their environments as soon as they have them."""
        if self.learner.previous is not None:
            self._pool.publish(self.learner.version - 1, self.learner.previous)
        self._pool.publish(self.learner.version, self.learner.network.flat)

    def sample(self, iteration: int) -> None:
        """Wait for all parts of the rollout."""
        self._wait_until(lambda: self._pool.has(iteration))
        rollout, parts = self._rollouts[iteration % len(self._rollouts)], self._pool.take(iteration)
        start_s = now()
        merge(parts, rollout)
        self._timer.add("handoff", "learner", now() - start_s)
        valid = rollout.valid_index
        self._setup.episodes.add_rollout(
            rollout.outcomes.numpy(), None if valid is None else valid.numpy()
        )
        self._versions = tuple(part.version for part in parts)
        for verdict in (verdict for part in parts for verdict in part.verdicts):
            self._setup.engines.hear(verdict)
        self._add_stages(parts)

    def learn(
        self, permutations: Tensor, *, learning_rate: float, iteration: int
    ) -> Completed | None:
        """Learn from the rollout.

        A learner elsewhere is handed it once it has finished the one before, which is returned.
        """
        completed = None if self.learner.is_in_place else self.drain()
        self.learner.hand_over(
            (iteration - 1) % len(self._rollouts),
            permutations,
            versions=self._versions,
            learning_rate=learning_rate,
            iteration=iteration,
        )
        if self.learner.is_in_place:
            return self._publish()
        if completed is None:
            self._timer.take()  # only the pipeline was filled: no iteration yet
        return completed

    def publish(self) -> None:
        """Nothing to do: the samplers were told at once."""

    def drain(self) -> Completed | None:
        """Wait for the update in flight; one in place never is."""
        if not self.learner.is_in_place:
            self._wait_until(lambda: not self.learner.is_at_work)
        self._completed = self._publish() or self._completed
        completed, self._completed = self._completed, None
        return completed

    def rest(self) -> None:
        """Wait for the update in flight, and for the samplers to need its weights."""
        self._wait_until(
            lambda: not self.learner.is_at_work and self._pool.is_at_rest, publishes=False
        )

    def _wait_until(self, done: Callable[[], bool], *, publishes: bool = True) -> None:
        """Do what comes up until ``done()``.

        Raises:
            StopRequested: a stop was asked for.
        """
        while True:
            self._setup.stop.check()
            if publishes:
                self._completed = self._publish() or self._completed
            if done():
                return
            workers = self._pool.workers  # each may have been started anew
            ready = devices.wait_any(
                [*self.learner.channels, *(worker.parts for worker in workers)],
                [*self.learner.processes, *(worker.process for worker in workers)],
                timeout_s=LOOK_S,
            )
            heard = self._pool.receive(ready)
            if not heard or any(channel in ready for channel in self.learner.channels):
                self.learner.look()
            if not heard:
                self._pool.check()

    def _publish(self) -> Completed | None:
        """Tell the samplers of the weights that the learner has made since the last time."""
        completed = self.learner.take()
        if completed is not None:
            start_s = now()
            self._pool.publish(self.learner.version, self.learner.network.flat)
            self._timer.add("handoff", "learner", now() - start_s)
        return completed

    def _add_stages(self, parts: list[Part]) -> None:
        """Account for the samplers' stages: the mean over them all."""
        for part in parts:
            for (name, lane), seconds in part.stage_s.items():
                self._timer.add(name, lane, seconds / len(parts))
