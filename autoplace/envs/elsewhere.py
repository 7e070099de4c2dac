"""Environments on their way to another process, which may not know what is registered here."""

from __future__ import annotations

import cloudpickle
import gymnasium as gym

from autoplace.envs.description import EnvDescription
from autoplace.envs.make import registered_spec
from autoplace.envs.workers import pickled


def packed(description: EnvDescription) -> bytes:
    """A description with what Gymnasium has registered under its name, for :func:`unpacked`.

    Raises:
        NotPicklableError: it cannot be sent.
    """
    return pickled((description, registered_spec(description.env)), description.env.id)


def unpacked(env: bytes) -> EnvDescription:
    """The description, whose environment can be made here from now on."""
    description, registered = cloudpickle.loads(env)
    register_here(registered)
    return description  # type: ignore[no-any-return]


def register_here(registered: gym.envs.registration.EnvSpec | None) -> None:
    """Let Gymnasium know what another process has registered, if it has."""
    if registered is not None:
        gym.registry[registered.id] = registered
