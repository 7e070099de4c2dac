"""From an environment's name and a user's hyperparameters to a workload."""

from __future__ import annotations

import dataclasses
from typing import Any

from autoplace.envs import inspect_env
from autoplace.errors import UsageError
from autoplace.measurement import Calibration
from autoplace.workload import EnvSpec, Hyperparameters, Workload

_NAMES = tuple(field.name for field in dataclasses.fields(Hyperparameters))


def describe(
    env: str | EnvSpec,
    *,
    calibration: Calibration | None = None,
    env_kwargs: dict[str, Any] | None = None,
    **hyperparameters: Any,  # noqa: ANN401 - checked by name below
) -> Workload:
    """The workload of PPO on ``env``.

    Args:
        env: a Gymnasium id, ``module:EnvId``, ``path/to/file.py:make_env``, or a spec.
        calibration: where given, it must hold the environment's step time already.
        env_kwargs: keyword arguments the environment is made with.
        **hyperparameters: fields of :class:`Hyperparameters` that differ from their defaults.

    Raises:
        UsageError: a hyperparameter that does not exist or cannot work.
        EnvironmentFault: the environment cannot be made or has a space that is not supported.
    """
    unknown = [name for name in hyperparameters if name not in _NAMES]
    if unknown:
        raise UsageError(
            f"hyperparameters are {', '.join(_NAMES)}, got {unknown[0]!r}: use one of these"
        )
    spec = env if isinstance(env, EnvSpec) else EnvSpec.make(env, env_kwargs)
    hyper = Hyperparameters(**hyperparameters)
    return inspect_env(spec).workload(hyper)
