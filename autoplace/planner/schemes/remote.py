"""What schemes share whose learner works in a process of its own while the next rollout is sampled.

Both sides see the rollouts in host memory. The learner has the only context on an accelerator: each
rollout crosses to it, and the state back, once an iteration.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplace.measurement import Task
from autoplace.planner.plan import Placement
from autoplace.planner.schemes.base import Axes, Key, Timing, Work
from autoplace.planner.schemes.work import copy_task, gae, rollout_bytes_per_row, update
from autoplace.workload import FLOAT_BYTES, Workload

_ORDER = ("handoff", "rollout_to_device", "gae", "update", "weights_to_host")


def learners(axes: Axes) -> Iterator[tuple[str, int]]:
    """(device, threads on the CPU) of every learner: one thread feeds an accelerator."""
    yield from (("cpu", threads) for threads in axes.learn_threads)
    yield from ((accelerator, 1) for accelerator in axes.accelerators)


def state_copy(workload: Workload, placement: Placement) -> Task:
    """Weights and both moments of Adam taken over, the order of minibatches handed over."""
    hyper = workload.hyperparameters
    rows = hyper.rollout_steps * placement.num_envs
    numbers = 3 * workload.network.num_parameters + 2 * hyper.epochs * rows
    return Task(op="elementwise", threads=placement.sample_threads, shape=(numbers,))


def learner_works(workload: Workload, placement: Placement) -> list[Work]:
    """Work of the learner once it has been told of a rollout."""
    hyper = workload.hyperparameters
    works = [gae(workload, placement), update(workload, placement)]
    device = placement.learn_device
    if device != "cpu":
        rows = hyper.rollout_steps * placement.num_envs
        copies = tuple(
            (copy_task(device, "h2d", nbytes * rows), 1.0)
            for nbytes in (*rollout_bytes_per_row(workload).values(), 8 * hyper.epochs)
        )
        state = FLOAT_BYTES * 3 * workload.network.num_parameters
        back = ((copy_task(device, "d2h", state), 1.0),)
        works += [
            Work(name="rollout_to_device", lane="learner", calls=1, parts=copies),
            Work(name="weights_to_host", lane="learner", calls=1, parts=back),
        ]
    return works


def learner_keys(timing: Timing) -> list[Key]:
    """The learner's stages in their order."""
    return [(name, "learner") for name in _ORDER if (name, "learner") in timing.seconds]


def message(lane: str, *copied: Task, ways: int = 1) -> Work:
    """A message on its way (1), or there and back (2), and what is copied with it."""
    parts = ((Task(op="handoff"), ways / 2), *((task, 1.0) for task in copied))
    return Work(name="handoff", lane=lane, calls=1, parts=parts)
