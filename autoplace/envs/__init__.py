"""Vector environments behind one small interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoplace.envs.description import EnvDescription, describe, inspect_env
from autoplace.envs.make import make_env
from autoplace.envs.sync import SyncVectorEnv
from autoplace.envs.vector import Step, VectorEnv, spawn_seeds
from autoplace.errors import UsageError

__all__ = [
    "BACKENDS",
    "Backend",
    "EnvDescription",
    "Step",
    "SyncVectorEnv",
    "VectorEnv",
    "describe",
    "inspect_env",
    "make_env",
    "make_vector_env",
    "spawn_seeds",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A way to step environments together.

    Attributes:
        name: as in a plan's ``env_backend``.
        make: builds one from a description and a number of environments.
        supports: whether it can run an environment.
    """

    name: str
    make: Callable[[EnvDescription, int], VectorEnv]
    supports: Callable[[EnvDescription], bool] = lambda description: True


BACKENDS: tuple[Backend, ...] = (Backend(name="sync", make=SyncVectorEnv),)


def make_vector_env(
    description: EnvDescription, *, num_envs: int, backend: str = "sync"
) -> VectorEnv:
    """``num_envs`` environments behind one interface.

    Raises:
        UsageError: there is no such backend.
        EnvError: an environment cannot be made.
    """
    for entry in BACKENDS:
        if entry.name == backend:
            return entry.make(description, num_envs)
    names = ", ".join(entry.name for entry in BACKENDS)
    raise UsageError(f"--env-backend is one of {names}, got {backend!r}: name one of them")
