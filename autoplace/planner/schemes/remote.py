"""What schemes share whose learner works in another process than samplers, at the same time.

Both sides see the rollouts in host memory. The learner has the only context on an accelerator: each
rollout crosses to it, and the state back, once an iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autoplace.device_names import CPU
from autoplace.measurement import Task
from autoplace.planner.plan import Placement
from autoplace.planner.schemes.base import Axes, Key, Rule, Timing, Work, reads
from autoplace.planner.schemes.work import copy_task, gae, rollout_bytes_per_row, update
from autoplace.workload import FLOAT_BYTES, Workload

_ORDER = ("handoff", "rollout_to_device", "gae", "update", "weights_to_host")


def learners(axes: Axes) -> Iterator[tuple[str, int]]:
    """(device, threads on the CPU) of every learner: one thread feeds an accelerator."""
    yield from ((CPU, threads) for threads in axes.learn_threads)
    yield from ((accelerator, 1) for accelerator in axes.accelerators)


def state_copy(workload: Workload, placement: Placement) -> Task:
    """Weights and both moments of Adam taken over, the order of minibatches handed over."""
    hyper = workload.hyperparameters
    rows = hyper.rollout_steps * placement.num_envs
    numbers = 3 * workload.network.num_parameters + 2 * hyper.epochs * rows
    return Task(op="elementwise", threads=placement.sample_threads, shape=(numbers,))


@reads("learn_device", "num_envs")
def _rollout(workload: Workload, placement: Placement) -> Work | None:
    """A whole rollout and the order of its minibatches cross to an accelerator."""
    hyper, device = workload.hyperparameters, placement.learn_device
    if device == CPU:
        return None
    rows = hyper.rollout_steps * placement.num_envs
    copies = tuple(
        (copy_task(device, "h2d", nbytes * rows), 1.0)
        for nbytes in (*rollout_bytes_per_row(workload).values(), 8 * hyper.epochs)
    )
    return Work(name="rollout_to_device", lane="learner", calls=1, parts=copies)


@reads("learn_device")
def _state(workload: Workload, placement: Placement) -> Work | None:
    """Weights and moments cross back from an accelerator."""
    if placement.learn_device == CPU:
        return None
    nbytes = FLOAT_BYTES * 3 * workload.network.num_parameters
    back = copy_task(placement.learn_device, "d2h", nbytes)
    return Work(name="weights_to_host", lane="learner", calls=1, parts=((back, 1.0),))


# Work of the learner once it has been told of a rollout.
LEARNER_WORK = (gae, update, _rollout, _state)


def message(lane: str, *copied: Callable[[Workload, Placement], Task], ways: int = 1) -> Rule:
    """A message on its way (1), or there and back (2), and what is copied with it."""

    @reads("num_envs", "sample_threads")
    def work(workload: Workload, placement: Placement) -> Work:
        copies = ((copy(workload, placement), 1.0) for copy in copied)
        parts = ((Task(op="hand_over"), ways / 2), *copies)
        return Work(name="handoff", lane=lane, calls=1, parts=parts)

    return work


def learner_keys(timing: Timing) -> list[Key]:
    """The learner's stages in their order."""
    return [(name, "learner") for name in _ORDER if (name, "learner") in timing.seconds]
