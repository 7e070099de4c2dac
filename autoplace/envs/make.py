"""From the name of an environment to one that can be stepped."""

from __future__ import annotations

import copy
import difflib
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from autoplace.envs.checks import own_traceback
from autoplace.errors import AutoplaceError, EnvError, first_line
from autoplace.files import load_module
from autoplace.workload import EnvSpec

Env = gym.Env[Any, Any]

_STACKED_FRAMES = 4  # of an Atari game in one observation (Mnih et al. 2015)

# What to install for the packages that Gymnasium's own environments need.
_INSTALL = {
    "mujoco": "gymnasium[mujoco]",
    "ale_py": "gymnasium[atari]",
    "Box2D": "gymnasium[box2d]",
    "pygame": "gymnasium[classic-control]",
    "jax": "gymnasium[jax]",
}


def make_env(spec: EnvSpec, *, render_mode: str | None = None) -> Env:
    """A single environment.

    Args:
        spec: a Gymnasium id, ``module:EnvId`` (the module registers the id), or
            ``path/to/file.py:function`` (the function returns the environment).
        render_mode: passed on where it is not ``None``.

    Raises:
        EnvError: it cannot be made; the message says why and what to do.
    """
    kwargs = spec.kwargs if render_mode is None else {**spec.kwargs, "render_mode": render_mode}
    try:
        path, _, function = spec.id.rpartition(":")
        if path.endswith(".py"):
            env = _load_function(Path(path), function)(**kwargs)
        else:
            env = _make_registered(spec, kwargs)
    except AutoplaceError:
        raise
    except Exception as error:
        raise_unmade(spec, error)
    if not isinstance(env, gym.Env):
        raise EnvError(
            f"{spec.id} must give a gymnasium.Env, got {type(env).__name__}: return an environment"
        )
    return env


def registered_spec(spec: EnvSpec) -> gym.envs.registration.EnvSpec | None:
    """A copy of what Gymnasium has registered; ``None`` for a function in a file."""
    module, _, name = spec.id.rpartition(":")
    if module.endswith(".py"):
        return None
    if module:
        importlib.import_module(module)
    elif name.startswith("ALE/"):
        gym.register_envs(importlib.import_module("ale_py"))
    found = copy.deepcopy(gym.spec(name))
    if isinstance(found.entry_point, str) and found.entry_point.startswith("__main__:"):
        # Another process has another __main__: what is meant goes there by value.
        creator: Any = gym.envs.registration.load_env_creator(found.entry_point)
        found.entry_point = creator
    return found


def is_atari(registered: gym.envs.registration.EnvSpec) -> bool:
    """Whether what is registered is an Atari game."""
    return registered.id.startswith("ALE/") or str(registered.entry_point).startswith("ale_py")


def _make_registered(spec: EnvSpec, kwargs: dict[str, Any]) -> Env:
    registered = registered_spec(spec)
    assert registered is not None, spec
    # Both wrappers only re-check, at every step, what is checked here once.
    registered.order_enforce = False
    registered.disable_env_checker = True
    if not (spec.wrappers and is_atari(registered)):
        return gym.make(registered, **kwargs)
    # The game itself must not skip frames: the wrapper does, and takes the maximum of the last two.
    env: Env = AtariPreprocessing(gym.make(registered, **{"frameskip": 1, **kwargs}))
    return FrameStackObservation(env, _STACKED_FRAMES)


def is_wrapped_atari(env: Env) -> bool:
    """Whether ``env`` is an Atari game in the usual wrappers."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, AtariPreprocessing):
            return True
        env = env.env
    return False


def _load_function(path: Path, function: str) -> Callable[..., Any]:
    if not path.is_file():
        raise EnvError(f"there is no file {path}: name one as path/to/file.py:make_env")
    found = getattr(load_module(path, "autoplace_env"), function, None)
    if not callable(found):
        raise EnvError(f"{path} has no function {function!r}: define it, or name another")
    return found  # type: ignore[no-any-return]


def raise_unmade(spec: EnvSpec, error: Exception) -> NoReturn:
    """Say why an environment cannot be made and what to do, in one line.

    Raises:
        EnvError: always; its cause is what went wrong.
    """
    known = _known_failure(spec.id, error)
    if known is not None:
        raise EnvError(known) from error
    message = f"{spec.id} cannot be made: {type(error).__name__}: {first_line(error)}"
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    is_asked_for = unknown is not None and unknown[1] in spec.kwargs
    raise EnvError(message, evidence="" if is_asked_for else own_traceback(error)) from error


def _known_failure(env_id: str, error: Exception) -> str | None:
    """A failure that its one-line message explains."""
    missing = _missing_package(error)
    if missing is not None:
        package = _INSTALL.get(missing, missing)
        return f"{env_id} needs {missing}, which is not installed: pip install '{package}'"
    if isinstance(error, (gym.error.NameNotFound, gym.error.NamespaceNotFound)):
        close = difflib.get_close_matches(env_id, list(gym.registry), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "name a Gymnasium id"
        return f"there is no environment {env_id!r}: {hint}"
    if isinstance(error, (gym.error.VersionNotFound, gym.error.DeprecatedEnv)):
        base = env_id.rpartition("-v")[0]
        have = sorted(name for name in gym.registry if name.rpartition("-v")[0] == base)
        return f"there is no environment {env_id!r}: this Gymnasium has {', '.join(have)}"
    return None


def _missing_package(error: BaseException | None) -> str | None:
    """The module whose import failed somewhere behind ``error``."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return None
