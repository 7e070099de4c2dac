"""Environments that Gymnasium steps together by arithmetic on whole arrays.

Such an environment registers a ``vector_entry_point`` of its own. Gymnasium has three ways in which
a vector environment treats an episode that ended (its ``autoreset_mode``), all of which end up as
the same transitions here:

- ``SAME_STEP``: it is reset at once. Asked for wherever the entry point takes the mode.
- ``NEXT_STEP``: the next step ignores its action and only resets it; that row is marked invalid.
- ``DISABLED``: it is reset here, by the mask of those that ended.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode

from autoplace.envs.checks import meet_non_finite, raise_from_env
from autoplace.envs.description import EnvDescription
from autoplace.envs.make import is_atari, raise_unmade, registered_spec
from autoplace.envs.vector import Step
from autoplace.errors import AutoplaceError, EnvError
from autoplace.workload import EnvSpec


class EntryPointVectorEnv:
    """Gymnasium's own vector environment behind :class:`autoplace.envs.vector.VectorEnv`."""

    def __init__(self, description: EnvDescription, num_envs: int) -> None:
        """Make ``num_envs`` environments.

        Raises:
            EnvError: they cannot be made, or do not say how they treat the end of an episode.
        """
        self.description = description
        self.num_envs = num_envs
        self._codec = codec = description.observations
        self.observations = np.zeros((num_envs, codec.size), codec.dtype)
        self._none = np.zeros((0, codec.size), codec.dtype)
        self._flat = codec.box_shape is not None and codec.dtype == "float32"
        self._rewards = np.zeros(num_envs, np.float32)
        self._ended_before = np.zeros(num_envs, np.bool_)
        self._num_steps = 0
        self._envs = self._make()
        mode = self._mode(self._envs.metadata)
        if not isinstance(mode, AutoresetMode):
            raise EnvError(
                f"a vector environment says how it resets in metadata['autoreset_mode'], got "
                f"{mode!r} from {description.env.id}: take another --env-backend"
            )
        self.autoreset_mode = mode

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start every environment afresh, from one seed made of all: they share one generator."""
        self._num_steps = 0
        self._ended_before[:] = False
        try:
            observations = self._reset_all(seeds)
            self._check_shapes(observations)
            self._write(observations)
        except AutoplaceError:
            raise
        except Exception as error:
            raise_from_env(error, self._where(None))
        self._check_finite((), None)
        return self.observations

    def step(self, actions: np.ndarray) -> Step:
        """Step every environment."""
        self._num_steps += 1
        final_observations, ended = self._none, []
        valid = None
        try:
            decoded = np.asarray(self.description.actions.decode(actions))
            observations, rewards, terminated, truncated, info = self._envs.step(decoded)
            if self._num_steps == 1:
                self._check_shapes(observations)
            self._write(observations)
            self._rewards[:] = rewards
            over = np.logical_or(terminated, truncated)
            if self.autoreset_mode is AutoresetMode.NEXT_STEP:
                before = self._ended_before
                if before.any():
                    valid = ~before
                    self._rewards[before] = 0.0
                    terminated, truncated = terminated & valid, truncated & valid
                    over &= valid
                self._ended_before = over
            if over.any():
                ended = np.flatnonzero(over).tolist()
                if self.autoreset_mode is AutoresetMode.SAME_STEP:
                    final_observations = self._reported_finals(info, ended)
                else:
                    final_observations = self.observations[over]
                if self.autoreset_mode is AutoresetMode.DISABLED:
                    options = {"reset_mask": over}
                    self._write(self._envs.reset(options=options)[0])
        except AutoplaceError:
            raise
        except Exception as error:
            raise_from_env(error, self._where(None))
        self._check_finite(ended, final_observations)
        return Step(
            self.observations,
            self._rewards,
            terminated,
            truncated,
            ended,
            final_observations,
            valid,
        )

    def close(self) -> None:
        """Free what the environments hold."""
        with contextlib.suppress(Exception):  # a broken close must not hide what happened before
            self._envs.close()

    def _make(self) -> gym.vector.VectorEnv[Any, Any, Any]:
        return _make(self.description.env, self.num_envs)

    def _mode(self, metadata: dict[str, Any]) -> object:
        return metadata.get("autoreset_mode")

    def _reset_all(self, seeds: Sequence[int]) -> Any:  # noqa: ANN401 - the env's own
        seed = int(np.random.SeedSequence(list(seeds)).generate_state(1)[0])
        return self._envs.reset(seed=seed)[0]

    def _write(self, observations: Any) -> None:  # noqa: ANN401 - the env's own
        if self._flat:
            self.observations[...] = np.reshape(observations, self.observations.shape)
        else:
            self.observations[...] = self._codec.encode(observations)

    def _reported_finals(self, info: dict[str, Any], ended: list[int]) -> np.ndarray:
        """The last observations of episodes whose environments have been reset already."""
        found = info.get("final_obs")
        if found is None:
            raise EnvError(
                "a vector environment that resets in the same step gives info['final_obs'], got "
                f"none from {self._where(ended[0])}: take another --env-backend"
            )
        if isinstance(found, np.ndarray) and found.dtype == object:
            rows = np.zeros((len(ended), self._codec.size), self._codec.dtype)
            for row, index in zip(rows, ended, strict=True):
                self._codec.write(row, found[index])
            return rows
        return self._codec.encode(found)[ended]

    def _check_shapes(self, observations: Any) -> None:  # noqa: ANN401 - the env's own
        for leaf in self._codec.leaves:
            expected, got = (self.num_envs, *leaf.shape), np.shape(leaf.of(observations))
            if expected != got:
                raise EnvError(
                    f"a stack of observations has the shape {expected} of its space, got {got} "
                    f"from {self._where(None)}: mend the environment"
                )

    def _check_finite(self, ended: Sequence[int], finals: np.ndarray | None) -> None:
        """Stop on NaN or infinity, or replace it; a product with 0 is NaN then."""
        total = _times_zero(self._codec.numbers(self.observations)) + _times_zero(self._rewards)
        if finals is not None and len(finals):
            total += _times_zero(self._codec.numbers(finals))
        if total != 0.0:
            meet_non_finite(
                self.description, self.observations, self._rewards, finals, ended, self._where
            )

    def _where(self, index: int | None) -> str:
        env = "" if index is None else f"environment {index}, "
        return f"{self.description.env.id}, {env}vector step {self._num_steps}"


def _times_zero(numbers: np.ndarray) -> float:
    """0, or NaN where a number is not finite."""
    return float(numbers.ravel().dot(np.zeros(numbers.size, numbers.dtype)))


def has_entry_point(description: EnvDescription) -> bool:
    """Whether the environment registers a vector entry point that can run it as it is asked for.

    Wrapped Atari games are left out: the vector environment of ale-py (as of 0.12.1) gives the same
    frames, rewards and ends as the usual wrappers, but begins an episode with three black frames
    where the wrappers repeat the first one, so the first three observations differ.
    """
    spec = description.env
    try:
        registered = registered_spec(spec)
        if registered is None or registered.vector_entry_point is None:
            return False
        if registered.additional_wrappers or (spec.wrappers and is_atari(registered)):
            return False
        taken = _parameters(registered)
    except Exception:  # what it needs may not be installed
        return False
    wanted = {**registered.kwargs, **spec.kwargs}
    limit = wanted.get("max_episode_steps", registered.max_episode_steps)
    if limit is not None:
        if limit < 1:  # gymnasium.make takes that for no limit, an entry point may not
            return False
        wanted["max_episode_steps"] = limit
    return "**" in taken or set(wanted) <= taken


def _parameters(registered: gym.envs.registration.EnvSpec) -> set[str]:
    """Names of what an entry point takes, ``**`` where it takes any."""
    entry_point = registered.vector_entry_point
    creator: Any = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    kinds = inspect.signature(creator).parameters
    return {
        "**" if parameter.kind is parameter.VAR_KEYWORD else name
        for name, parameter in kinds.items()
    }


def _make(spec: EnvSpec, num_envs: int) -> gym.vector.VectorEnv[Any, Any, Any]:
    try:
        registered = registered_spec(spec)
        assert registered is not None, spec
        kwargs = dict(spec.kwargs)
        if "autoreset_mode" in _parameters(registered):
            kwargs.setdefault("autoreset_mode", AutoresetMode.SAME_STEP)
        return gym.make_vec(
            registered, num_envs=num_envs, vectorization_mode="vector_entry_point", **kwargs
        )
    except AutoplaceError:
        raise
    except Exception as error:
        raise_unmade(spec, error)
