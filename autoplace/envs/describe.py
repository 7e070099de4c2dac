"""What has to be known of an environment before anything is planned."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from autoplace.envs.make import make_env
from autoplace.envs.spaces import ActionCodec, ObservationCodec, action_codec, observation_codec
from autoplace.workload import EnvSpec, Hyperparameters, NetworkSpec, Workload


@dataclass(frozen=True, kw_only=True)
class EnvDescription:
    """The sizes of an environment.

    Attributes:
        env: which environment.
        observations: how observations become rows of float32.
        actions: how a policy's actions become the environment's.
        episode_limit: steps after which episodes are truncated, where the env says so.
    """

    env: EnvSpec
    observations: ObservationCodec
    actions: ActionCodec
    episode_limit: int | None

    @property
    def observation_size(self) -> int:
        """Numbers in one observation row."""
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

    def network(self, hidden_sizes: tuple[int, ...]) -> NetworkSpec:
        """The actor and critic that fit."""
        return NetworkSpec(
            observation_size=self.observation_size,
            hidden_sizes=hidden_sizes,
            action_size=self.action_size,
            continuous=self.continuous,
        )

    def workload(self, hyperparameters: Hyperparameters) -> Workload:
        """One PPO iteration on it."""
        return Workload(
            env=self.env,
            network=self.network(hyperparameters.hidden_sizes),
            hyperparameters=hyperparameters,
            action_bytes=self.action_bytes,
            episode_limit=self.episode_limit,
        )


def inspect_env(spec: EnvSpec) -> EnvDescription:
    """Make the environment once, read its spaces, close it.

    Raises:
        EnvironmentFault: it cannot be made, or has a space that is not supported.
    """
    env = make_env(spec)
    try:
        return EnvDescription(
            env=spec,
            observations=observation_codec(env.observation_space, spec.id),
            actions=action_codec(env.action_space, spec.id),
            episode_limit=env.spec.max_episode_steps if env.spec is not None else None,
        )
    finally:
        with contextlib.suppress(Exception):  # a broken close must not hide what was found
            env.close()
