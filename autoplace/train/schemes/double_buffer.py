"""Scheme ``double-buffer``: one rollout is sampled on the CPU while the other is learned from.

With ``W(k)`` the weights after ``k`` updates and rollouts counted from 0, rollout ``k`` is sampled
with ``W(k - 1)`` (the first with ``W(0)``) while update ``k`` makes ``W(k)`` out of rollout
``k - 1``; then both wait for each other and hand over. So learning on rollout ``k`` starts from
``W(k)``: a policy lag of exactly one iteration. A run that is resumed after update ``k`` samples
rollout ``k`` anew, with the same ``W(k - 1)``. Log-probabilities and values are those of the
weights that acted, and PPO's ratio corrects for the difference.

    sampler   | rollout 0 | rollout 1 | rollout 2 | ...
    learner               | update 1  | update 2  | ...

The schedule is fixed, so a seed repeats to the bit on the CPU. Whatever ends a run early drops the
rollout that is being sampled and, where another process learns, the one that it learns from.

Either side may be the process that is started: where one thread samples and numpy acts, that is the
sampler, which needs no torch then, as in ``async`` with a single one; else the learner. An
environment that computes on an accelerator itself needs the latter (``--engine eager``), for
samplers see none.

Crossings: on the CPU, none. With an accelerator the learner's process, which alone has a context
there, copies each rollout to the device and the state back to the host, once an iteration.
"""

from __future__ import annotations

import contextlib
import dataclasses

from torch import Tensor

from autoplace import device as devices
from autoplace.device_names import CPU
from autoplace.engines import NUMPY
from autoplace.envs import BACKENDS
from autoplace.envs.workers import NotPicklableError
from autoplace.ppo.steps import Act, make_policy_step
from autoplace.train.remote_learner import RemoteLearner
from autoplace.train.sampler import HostSampler
from autoplace.train.schemes.asynchronous import AsyncScheme
from autoplace.train.schemes.base import Completed, Scheme, Setup


def make_double_buffer(setup: Setup) -> Scheme:
    """Lay it out with the sampler in a process of its own, or else the learner."""
    placement = setup.placement
    steps_here = any(
        entry.name == placement.env_backend and not entry.has_workers for entry in BACKENDS
    )
    if (
        placement.learn_device == CPU
        and placement.sample_threads == 1
        and steps_here
        and setup.network.engine_here == NUMPY
        and devices.spawns_processes()
    ):
        alone = dataclasses.replace(placement, num_workers=1, max_policy_lag=1)
        with contextlib.suppress(NotPicklableError):  # environments that stay where they are made
            return AsyncScheme(dataclasses.replace(setup, placement=alone))
    return DoubleBufferScheme(setup)


class DoubleBufferScheme:
    """Two rollouts in shared memory, and a learner in a process of its own."""

    overlaps = True

    def __init__(self, setup: Setup) -> None:
        self._timer, self._draws, self._seeds = setup.timer, setup.draws, setup.env_seeds
        rollouts = setup.shared_rollouts(2)
        self._envs = setup.make_envs()
        self.learner = RemoteLearner(setup, rollouts, max_policy_lag=1)
        self._policy_step = make_policy_step(self.learner.network, setup.engines.hear)
        self._samplers = [HostSampler.of(setup, self._envs, rollout) for rollout in rollouts]
        self._buffer = 0  # the one that is being filled
        self._version = 0  # of the weights that fill it
        self._previous_step: Act | None = None  # acts in the first rollout of a resumed run
        if self.learner.previous is not None:
            previous = setup.network.over(self.learner.previous)
            self._previous_step = make_policy_step(previous, setup.engines.hear)

    def start(self) -> None:
        """Reset the environments."""
        self._envs.reset(self._seeds)

    def sample(self, iteration: int) -> None:
        """Fill the rollout that the learner is not working on."""
        self._version, step = self.learner.version, self._policy_step
        if self._previous_step is not None:
            self._version, step = self._version - 1, self._previous_step
        self._samplers[self._buffer].sample(step, self._draws.noise(iteration))
        self._previous_step = None

    def learn(
        self, permutations: Tensor, *, learning_rate: float, iteration: int
    ) -> Completed | None:
        """Hand the rollout over once the learner has finished the one before, and return that."""
        completed = self.drain()
        self.learner.hand_over(
            self._buffer,
            permutations,
            versions=(self._version,),
            learning_rate=learning_rate,
            iteration=iteration,
        )
        self._buffer = 1 - self._buffer
        if completed is None:
            self._timer.take()  # only the pipeline was filled: no iteration yet
        return completed

    def publish(self) -> None:
        """Nothing to do: the new weights were taken at the hand-over."""

    def drain(self) -> Completed | None:
        """Wait for the update in flight, and take its weights."""
        self.learner.wait()
        return self.learner.take()

    def rest(self) -> None:
        """Wait for the update in flight, and take it at the next hand-over as ever."""
        self.learner.wait()
