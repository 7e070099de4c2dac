"""Vector environments behind one small interface."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from autoplace.envs.description import EnvDescription, describe, inspect_env
from autoplace.envs.entry_point import EntryPointVectorEnv, has_entry_point
from autoplace.envs.make import make_env
from autoplace.envs.pool import PoolVectorEnv, has_pool
from autoplace.envs.process import ProcessVectorEnv, Restarts
from autoplace.envs.sync import SyncVectorEnv
from autoplace.envs.vector import Step, VectorEnv, spawn_seeds
from autoplace.envs.workers import DEADLINE_S, NotPicklableError
from autoplace.errors import UsageError

__all__ = [
    "BACKENDS",
    "Backend",
    "EntryPointVectorEnv",
    "EnvDescription",
    "PoolVectorEnv",
    "ProcessVectorEnv",
    "Restarts",
    "Step",
    "SyncVectorEnv",
    "VectorEnv",
    "WorkerOptions",
    "describe",
    "inspect_env",
    "make_env",
    "make_vector_env",
    "spawn_seeds",
    "usable_backend",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a backend may need to know besides.

    Attributes:
        num_workers: processes.
        num_groups: 2 for split-half sampling.
        deadline_s: how long a vector step may take until its worker counts as hung.
        first_index: what the first environment is called in messages.
        restarts: what becomes of a worker that is lost.
    """

    num_workers: int = 1
    num_groups: int = 1
    deadline_s: float = DEADLINE_S
    first_index: int = 0
    restarts: Restarts = field(default_factory=Restarts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A way to step environments together.

    Attributes:
        name: as in a plan's ``env_backend``.
        make: builds one from a description, a number of environments and the rest.
        supports: whether it can run an environment.
        has_workers: whether its environments are spread over worker processes, or threads.
        joins: whether the process that uses it is one of those workers.
        has_groups: whether a part of its environments can step while another rests.
        has_own_dynamics: whether it runs another implementation of the environments, so that it
            is to be used only where it is asked for.
        needs: what must be so for it to run an environment, for messages.
    """

    name: str
    make: Callable[[EnvDescription, int, WorkerOptions], VectorEnv]
    supports: Callable[[EnvDescription], bool] = lambda description: True
    has_workers: bool = False
    joins: bool = False
    has_groups: bool = False
    has_own_dynamics: bool = False
    needs: str = ""


def _make_processes(
    description: EnvDescription, num_envs: int, options: WorkerOptions, *, joins: bool = False
) -> VectorEnv:
    try:
        return ProcessVectorEnv(
            description,
            num_envs,
            num_workers=max(1, options.num_workers),
            num_groups=options.num_groups,
            joins=joins,
            deadline_s=options.deadline_s,
            restarts=options.restarts,
        )
    except NotPicklableError as error:
        log.warning("%s; it runs in this process instead", error)
        return SyncVectorEnv(description, num_envs)


BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="sync",
        make=lambda description, n, options: SyncVectorEnv(
            description, n, first_index=options.first_index
        ),
    ),
    Backend(
        name="vector",
        make=lambda description, n, _: EntryPointVectorEnv(description, n),
        supports=has_entry_point,
    ),
    Backend(name="process", make=_make_processes, has_workers=True, has_groups=True),
    Backend(
        name="joint",
        make=functools.partial(_make_processes, joins=True),
        has_workers=True,
        joins=True,
    ),
    Backend(
        name="envpool",
        make=lambda description, n, options: PoolVectorEnv(
            description, n, num_threads=max(1, options.num_workers)
        ),
        supports=has_pool,
        has_workers=True,
        has_own_dynamics=True,
        needs="the package envpool, and in it this id with the same spaces and time limit",
    ),
)


def make_vector_env(
    description: EnvDescription,
    *,
    num_envs: int,
    backend: str = "sync",
    num_workers: int = 0,
    num_groups: int = 1,
    deadline_s: float = DEADLINE_S,
    first_index: int = 0,
    restarts: Restarts | None = None,
) -> VectorEnv:
    """``num_envs`` environments behind one interface.

    Args:
        description: of each environment.
        num_envs: how many.
        backend: one of :data:`BACKENDS`.
        num_workers: processes, for a backend that has them.
        num_groups: 2 for split-half sampling, for a backend that has worker processes.
        deadline_s: how long a vector step may take until such a process counts as hung.
        first_index: what the first environment is called in messages.
        restarts: what becomes of such a process that is lost; by default it ends the run.

    Raises:
        UsageError: there is no such backend, or it cannot run the environment as it is asked to.
        EnvError: an environment cannot be made.
    """
    entry = usable_backend(backend, description)
    if num_groups > 1 and not entry.has_groups:
        able = " or ".join(e.name for e in BACKENDS if e.has_groups)
        raise UsageError(
            f"--num-groups {num_groups} needs environments in worker processes, got "
            f"--env-backend {backend}: use {able}"
        )
    options = WorkerOptions(
        num_workers=num_workers,
        num_groups=num_groups,
        deadline_s=deadline_s,
        first_index=first_index,
        restarts=restarts or Restarts(),
    )
    return entry.make(description, num_envs, options)


def usable_backend(name: str, description: EnvDescription) -> Backend:
    """The backend ``name``, which can run the environment.

    Raises:
        UsageError: there is no such backend, or it cannot.
    """
    for entry in BACKENDS:
        if entry.name != name:
            continue
        if entry.supports(description):
            return entry
        usable = ", ".join(e.name for e in BACKENDS if e.supports(description))
        needs = f" ({entry.needs})" if entry.needs else ""
        raise UsageError(
            f"--env-backend {name} cannot run {description.env.id}{needs}: use {usable}"
        )
    names = ", ".join(entry.name for entry in BACKENDS)
    raise UsageError(f"--env-backend is one of {names}, got {name!r}: name one of them")
