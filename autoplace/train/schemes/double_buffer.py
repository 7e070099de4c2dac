"""Scheme ``double-buffer``: one rollout is sampled on the CPU while the other is learned from.

With ``W(k)`` the weights after ``k`` updates and rollouts counted from 0, rollout ``k`` is sampled
with ``W(k - 1)`` (the first with ``W(0)``) while update ``k`` makes ``W(k)`` out of rollout
``k - 1``; then both wait for each other and hand over. So learning on rollout ``k`` starts from
``W(k)``: a policy lag of exactly one iteration. Log-probabilities and values are those of the
weights that acted, and PPO's ratio corrects for the difference.

    sampler   | rollout 0 | rollout 1 | rollout 2 | ...
    learner               | update 1  | update 2  | ...

The schedule is fixed, so a seed repeats to the bit on the CPU. Whatever ends a run early drops the
rollout that is being sampled and the one that is being learned from.

Crossings: on the CPU, none. With an accelerator the learner's process, which alone has a context
there, copies each rollout to the device and the state back to the host, once an iteration.
"""

from __future__ import annotations

from torch import Tensor

from autoplace import device as devices
from autoplace.device import now
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.update import UpdateStats
from autoplace.train.remote_learner import Answer, RemoteLearner
from autoplace.train.sampler import HostSampler
from autoplace.train.schemes.base import Lag, Setup


class DoubleBufferScheme:
    """Two rollouts in shared memory, and a learner in a process of its own."""

    overlaps = True

    def __init__(self, setup: Setup) -> None:
        hyper, placement = setup.hyperparameters, setup.placement
        self._timer = setup.timer
        self._threads = placement.sample_threads
        rollouts = tuple(
            Rollout(
                setup.network.spec,
                rollout_steps=hyper.rollout_steps,
                num_envs=hyper.num_envs,
                pinned_for=placement.learn_device,
                shared=True,
            )
            for _ in range(2)
        )
        self.learner = RemoteLearner(
            setup.network,
            hyper,
            rollouts,
            minibatch_rows=placement.minibatch_rows,
            device=placement.learn_device,
            threads=placement.learn_threads,
        )
        self._samplers = [HostSampler(setup, self.learner.network, rollout) for rollout in rollouts]
        self._buffer = 0  # the one that is being filled
        self._answer: Answer | None = None  # what the learner said while at rest
        self.lag = Lag()
        self._next_lag = Lag()  # the first rollout is sampled by the weights that learn from it

    def sample(self, noise: Tensor) -> None:
        """Fill the rollout that the learner is not working on."""
        self._samplers[self._buffer].sample(noise)

    def learn(
        self, permutations: Tensor, *, learning_rate: float, iteration: int
    ) -> UpdateStats | None:
        """Hand the rollout over once the learner has finished the one before, and return that."""
        update = self.drain()
        start_s = now()
        with devices.torch_threads(self._threads):
            self.learner.hand_over(
                self._buffer, permutations, learning_rate=learning_rate, iteration=iteration
            )
        self._buffer = 1 - self._buffer
        self._timer.add("handoff", "sampler", now() - start_s)
        if update is None:
            self._timer.take()  # only the pipeline was filled: no iteration yet
        return update

    def publish(self) -> None:
        """Nothing to do: the new weights were taken at the hand-over."""

    def drain(self) -> UpdateStats | None:
        """Wait for the update in flight, and take its weights."""
        answer = self._answer if self._answer is not None else self.learner.wait()
        self._answer = None
        if answer is None:
            return None
        start_s = now()
        assert answer.update is not None and answer.stage_s is not None
        with devices.torch_threads(self._threads):
            self.learner.take_state(answer.update)
        for (name, lane), seconds in answer.stage_s.items():
            self._timer.add(name, lane, seconds)
        self._timer.add("handoff", "sampler", now() - start_s)
        self.lag, self._next_lag = self._next_lag, Lag(mean=1.0, max=1)
        return answer.update

    def rest(self) -> None:
        """Wait for the update in flight, and take it at the next hand-over as ever."""
        if self._answer is None:
            self._answer = self.learner.wait()

    def close(self) -> None:
        """End the learner's process."""
        self.learner.close()
