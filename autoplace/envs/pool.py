"""Environments of EnvPool: C++ on threads of its own, where the package is installed.

EnvPool (Weng et al. 2022) writes environments anew under the ids of Gymnasium's. Their physics and
their random numbers are not Gymnasium's to the bit, so what is learned may differ: this backend
runs only where it is asked for by name, and a plan says so among what it changes. What an
environment *is* must agree, or it is not offered: observations, actions and the time limit.

EnvPool resets an episode that ended in the next step, which ignores its action; that row is no
transition. Its seeds are fixed when a pool is made, so a reset from seeds makes a new one.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from autoplace.envs.description import EnvDescription
from autoplace.envs.entry_point import EntryPointVectorEnv
from autoplace.envs.make import raise_unmade
from autoplace.envs.spaces import (
    ActionCodec,
    ObservationCodec,
    action_codec,
    observation_codec,
)
from autoplace.errors import AutoplaceError

_NO_LIMIT = 2**31 - 1  # EnvPool's max_episode_steps where there is none


class PoolVectorEnv(EntryPointVectorEnv):
    """EnvPool behind :class:`autoplace.envs.vector.VectorEnv`."""

    def __init__(self, description: EnvDescription, num_envs: int, *, num_threads: int = 1) -> None:
        """Make ``num_envs`` environments, stepped by ``num_threads`` threads.

        Raises:
            EnvError: they cannot be made.
        """
        self._num_threads = num_threads
        super().__init__(description, num_envs)

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start every environment afresh, from one seed made of all."""
        self.close()
        self._envs = self._make(_seed(seeds))
        return super().reset(seeds)

    def _make(self, seed: int = 0) -> gym.vector.VectorEnv[Any, Any, Any]:
        return _make_pool(self.description, self.num_envs, self._num_threads, seed)

    def _reset_all(self, seeds: Sequence[int]) -> Any:  # noqa: ANN401 - the env's own
        return self._envs.reset()[0]

    def _mode(self, metadata: dict[str, Any]) -> object:
        # Pools from before Gymnasium 1 do not say it; they do the same.
        return metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)


def has_pool(description: EnvDescription) -> bool:
    """Whether EnvPool is installed and has an environment of this id, spaces and time limit."""
    try:
        envpool: Any = importlib.import_module("envpool")
        if description.is_wrapped_atari or description.env.id not in envpool.list_all_envs():
            return False
        pool = _make_pool(description, 1, 1, 0)
    except Exception:  # what it needs may not be installed, or its arguments are others
        return False
    try:
        spec = description.env
        observations = observation_codec(pool.single_observation_space, spec.id, images=spec.images)
        actions = action_codec(pool.single_action_space, spec.id)
        limit = pool.config["max_episode_steps"]  # type: ignore[attr-defined]
        return (
            _observed(observations) == _observed(description.observations)
            and _acted(actions) == _acted(description.actions)
            and (None if limit >= _NO_LIMIT else limit) == description.episode_limit
        )
    except AutoplaceError:  # a space that is not supported
        return False
    finally:
        with contextlib.suppress(Exception):
            pool.close()


def _observed(codec: ObservationCodec) -> list[tuple[object, ...]]:
    return [(leaf.path, leaf.shape, leaf.counts, leaf.image) for leaf in codec.leaves]


def _acted(codec: ActionCodec) -> tuple[object, ...]:
    low, high, firsts = (
        None if bound is None else bound.tolist() for bound in (codec.low, codec.high, codec.firsts)
    )
    return codec.size, codec.continuous, codec.shape, codec.heads, codec.first, low, high, firsts


def _seed(seeds: Sequence[int]) -> int:
    """One seed made of all, of 31 bits as EnvPool takes them."""
    return int(np.random.SeedSequence(list(seeds)).generate_state(1)[0]) >> 1


def _make_pool(
    description: EnvDescription, num_envs: int, num_threads: int, seed: int
) -> gym.vector.VectorEnv[Any, Any, Any]:
    try:
        envpool: Any = importlib.import_module("envpool")
        pool: gym.vector.VectorEnv[Any, Any, Any] = envpool.make(
            description.env.id,
            env_type="gymnasium",
            num_envs=num_envs,
            num_threads=min(num_threads, num_envs),
            seed=seed,
            **description.env.kwargs,
        )
    except Exception as error:
        raise_unmade(description.env, error)
    return pool
