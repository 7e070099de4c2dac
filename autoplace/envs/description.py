"""What has to be known of an environment before anything is planned."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoplace.envs.make import is_wrapped_atari, make_env
from autoplace.envs.spaces import (
    ActionCodec,
    ObservationCodec,
    action_codec,
    describe_images,
    observation_codec,
)
from autoplace.errors import CalibrationError, UsageError
from autoplace.workload import EnvSpec, Hyperparameters, NetworkSpec, Workload

if TYPE_CHECKING:  # what steps environments in another process does without
    from autoplace.measurement import Calibration

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EnvDescription:
    """The sizes of an environment.

    Attributes:
        env: which environment.
        observations: how observations become rows.
        actions: how a policy's actions become the environment's.
        episode_limit: steps after which episodes are truncated, where the env says so.
        is_wrapped_atari: whether it is an Atari game in its usual wrappers.
    """

    env: EnvSpec
    observations: ObservationCodec
    actions: ActionCodec
    episode_limit: int | None
    is_wrapped_atari: bool = False

    @property
    def observation_size(self) -> int:
        """Columns of one observation row."""
        return self.observations.size

    @property
    def action_size(self) -> int:
        """Logits, or numbers in a continuous action."""
        return self.actions.size

    @property
    def continuous(self) -> bool:
        """Whether actions are continuous."""
        return self.actions.continuous

    @property
    def action_bytes(self) -> int:
        """Bytes of one action as it crosses between host and device."""
        return self.actions.num_bytes

    def network(self, hidden_sizes: tuple[int, ...], *, factory: str = "") -> NetworkSpec:
        """The actor and critic that fit, or the user's own network that ``factory`` makes.

        Raises:
            UsageError: the factory does not exist or gives no network that fits.
        """
        spec = NetworkSpec(
            observation_size=self.observation_size,
            hidden_sizes=hidden_sizes,
            action_size=self.action_size,
            continuous=self.continuous,
            action_heads=self.actions.heads,
            images=self.observations.images,
        )
        if not factory:
            return spec
        from autoplace.ppo.factory import own_network_spec  # imports torch, as the user's file does

        return own_network_spec(spec, factory)

    def workload(self, hyperparameters: Hyperparameters) -> Workload:
        """One PPO iteration on it."""
        if hyperparameters.clip_rewards is None and self.is_wrapped_atari:
            hyperparameters = dataclasses.replace(hyperparameters, clip_rewards=True)
        return Workload(
            env=self.env,
            network=self.network(
                hyperparameters.hidden_sizes, factory=hyperparameters.network_factory
            ),
            hyperparameters=hyperparameters,
            action_bytes=self.action_bytes,
            episode_limit=self.episode_limit,
        )


def inspect_env(spec: EnvSpec) -> EnvDescription:
    """Make the environment once, read its spaces, close it.

    Raises:
        EnvError: it cannot be made, or has a space that is not supported.
    """
    env = make_env(spec)
    try:
        return EnvDescription(
            env=spec,
            observations=observation_codec(env.observation_space, spec.id, images=spec.images),
            actions=action_codec(env.action_space, spec.id),
            episode_limit=env.spec.max_episode_steps if env.spec is not None else None,
            is_wrapped_atari=is_wrapped_atari(env),
        )
    finally:
        with contextlib.suppress(Exception):  # a broken close must not hide what was found
            env.close()


_HYPERPARAMETERS = tuple(field.name for field in dataclasses.fields(Hyperparameters))


def describe(
    env: str | EnvSpec,
    *,
    calibration: Calibration | None = None,
    env_kwargs: dict[str, Any] | None = None,
    **hyperparameters: Any,  # noqa: ANN401 - each has its own type, checked by Hyperparameters
) -> Workload:
    """The workload of PPO on an environment.

    Args:
        env: a Gymnasium id, ``module:EnvId``, ``path/to/file.py:make_env``, or a spec.
        calibration: where given, it must hold the environment's step time, so that the workload
            can be planned with it.
        env_kwargs: keyword arguments the environment is made with.
        **hyperparameters: fields of :class:`Hyperparameters` that differ from their defaults.

    Raises:
        UsageError: a hyperparameter that does not exist or cannot work.
        EnvError: the environment cannot be made or has a space that is not supported.
        CalibrationError: ``calibration`` lacks the environment's step time.
    """
    unknown = [name for name in hyperparameters if name not in _HYPERPARAMETERS]
    if unknown:
        raise UsageError(
            f"hyperparameters are {', '.join(_HYPERPARAMETERS)}, got {unknown[0]!r}: "
            "use one of these"
        )
    spec = env if isinstance(env, EnvSpec) else EnvSpec.make(env, env_kwargs)
    hyper = Hyperparameters(**hyperparameters)
    description = inspect_env(spec)
    for line in describe_images(description.observations, spec.id, images=spec.images):
        _log.warning("%s", line)
    workload = description.workload(hyper)
    if calibration is not None and not any(
        m.task.op == "env_step" and m.task.env == spec for m in calibration.measurements
    ):
        raise CalibrationError(
            f"the calibration has no step time of {spec.id}: "
            f"run `autoplace calibrate --env {spec.id}`"
        )
    return workload
