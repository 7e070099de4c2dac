"""A process that makes environments: how long until it steps them, and what they hold in memory.

It is started as a sampler's is that acts by numpy: what is timed is the interpreter, the packages
of the environment and its first reset. The memory is what belongs to no file, since the pages of
files can be dropped and read again.
"""

from __future__ import annotations

import logging
import os
import queue
import time

import numpy as np
import psutil

from autoplace import clock
from autoplace.clock import MessageChannel
from autoplace.envs import EnvDescription, inspect_env, make_vector_env, spawn_seeds
from autoplace.envs.elsewhere import packed, unpacked
from autoplace.envs.workers import NotPicklableError
from autoplace.measurement import Measurement, env_start
from autoplace.ppo import numpy_policy  # noqa: F401 - as a sampler imports it
from autoplace.processes import ChildProcess
from autoplace.workload import EnvSpec

log = logging.getLogger(__name__)

DEADLINE_S = 120.0
_STEPS = 100  # that an environment has made when its memory is looked at
# Environments beside the first: one at least, then as long as this many seconds allow.
_MOST_OTHERS = 8
_OTHERS_S = 0.5


def measure_env_start(env: EnvSpec, description: EnvDescription | None = None) -> list[Measurement]:
    """Start one such process; nothing where none can be started.

    Args:
        env: that it makes.
        description: of ``env``, where it has been made before.

    Raises:
        EnvError: the environment cannot be made.
    """
    if not clock.spawns_processes():
        return []
    description = description or inspect_env(env)
    try:
        job = packed(description)
    except NotPicklableError:  # it cannot be stepped by other processes either
        return []
    answers = clock.message_channel()
    start_s = clock.now()
    process = clock.spawn(_make, answers, job, name="autoplace environment", host_only=True)
    try:
        answers.get(timeout=DEADLINE_S)
        seconds = clock.now() - start_s
        process_bytes, env_bytes = answers.get(timeout=DEADLINE_S)
    except queue.Empty:
        log.warning("the memory of %s is not known: a process that made it gave no answer", env.id)
        return []
    finally:
        assert isinstance(process, ChildProcess)
        process.stop()
    return [
        Measurement(
            task=env_start(env),
            times_s=(seconds,),
            process_bytes=process_bytes,
            env_bytes=env_bytes,
        )
    ]


def _make(answers: MessageChannel, job: bytes) -> None:
    """Make environments, and answer when the first is ready and what all of them hold.

    What they print was seen already, where the environment was inspected.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    before = _held_bytes()
    description = unpacked(job)
    kept = [_Stepped(description)]
    answers.put(None)
    kept[0].go_on()
    first = _held_bytes()
    start_s = time.perf_counter()
    while len(kept) <= _MOST_OTHERS and (
        len(kept) == 1 or time.perf_counter() - start_s < _OTHERS_S
    ):
        kept.append(_Stepped(description))
        kept[-1].go_on()
    each = max(0, _held_bytes() - first) // (len(kept) - 1)
    answers.put((max(0, first - before - each), each))


class _Stepped:
    """An environment under random actions."""

    def __init__(self, description: EnvDescription) -> None:
        self._envs = make_vector_env(description, num_envs=1, backend="sync")
        self._envs.reset(spawn_seeds(0, 1))
        self._actions = description.actions.random(np.random.default_rng(0), _STEPS, 1)

    def go_on(self) -> None:
        for action in self._actions:
            self._envs.step(action)


def _held_bytes() -> int:
    """Memory of this process that belongs to no file, where the system tells it apart."""
    known = psutil.Process().memory_info()
    return int(known.rss - getattr(known, "shared", 0))
