"""Environments stepped one after the other in the calling process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from autoplace.envs.checks import meet_non_finite, raise_from_env
from autoplace.envs.description import EnvDescription
from autoplace.envs.make import Env, make_env
from autoplace.envs.vector import Step
from autoplace.errors import AutoplaceError, EnvError


class SyncVectorEnv:
    """The lean loop: preallocated arrays, and nothing done per environment that can be done once.

    See :class:`autoplace.envs.vector.VectorEnv` for the interface.
    """

    def __init__(
        self,
        description: EnvDescription,
        num_envs: int,
        *,
        first_index: int = 0,
        first_env: Env | None = None,
    ) -> None:
        """Make ``num_envs`` environments, called ``first_index`` and on in messages.

        Args:
            description: of each.
            num_envs: how many.
            first_index: number of the first.
            first_env: the first itself, where it is there already.

        Raises:
            EnvError: one cannot be made.
        """
        self.description = description
        self.num_envs = num_envs
        self._first_index = first_index
        self._codec = codec = description.observations
        if codec.dtype == "float32":
            # Observations and rewards share a buffer, so that one look tells whether all are
            # finite.
            size = num_envs * codec.size
            self._numbers = np.zeros(size + num_envs, np.float32)
            self.observations = self._numbers[:size].reshape(num_envs, -1)
            self._rewards = self._numbers[size:]
            self._vectors = None
        else:
            self._numbers = self._rewards = np.zeros(num_envs, np.float32)
            self.observations = np.zeros((num_envs, codec.size), codec.dtype)
            vectors = codec.numbers(self.observations)  # what of the bytes may be NaN
            self._vectors = vectors if vectors.size else None
        self._zeros = np.zeros_like(self._numbers)
        self._decode = description.actions.decode
        self._envs = [first_env] if first_env is not None else []
        self._envs += [make_env(description.env) for _ in range(num_envs - len(self._envs))]
        self._steps = [env.step for env in self._envs]
        self._num_steps = 0

        shape = codec.box_shape
        self._rows = list(self.observations.reshape(num_envs, *(shape or (codec.size,))))
        self._terminated = np.zeros(num_envs, np.bool_)
        self._truncated = np.zeros(num_envs, np.bool_)
        self._none = np.zeros((0, codec.size), codec.dtype)
        self._write = None if shape is not None else codec.writer

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Start every environment afresh, each from its own seed."""
        for index, seed in enumerate(seeds):
            self._reset_one(index, seed)
        self._check_finite()
        self._num_steps = 0
        return self.observations

    def step(self, actions: np.ndarray) -> Step:
        """Step every environment, resetting at once those whose episode ended."""
        rewards, terminated, truncated = self._rewards, self._terminated, self._truncated
        rows, write, first = self._rows, self._write, self._num_steps == 0
        self._num_steps += 1
        ended: list[int] = []
        finals: list[np.ndarray] = []
        index, observation = -1, None
        try:
            for index, (step, action) in enumerate(
                zip(self._steps, self._decode(actions), strict=True)
            ):
                observation, reward, over, cut, _ = step(action)
                if first:
                    self._check_first(index, observation, reward)
                if write is None:
                    rows[index][...] = observation
                else:
                    write(rows[index], observation)
                try:
                    rewards[index] = reward
                except (TypeError, ValueError):  # an array of one number, at best
                    rewards[index] = self._number(index, reward)
                terminated[index] = over
                truncated[index] = cut
                if over or cut:
                    ended.append(index)
                    finals.append(self.observations[index].copy())
                    self._reset_one(index, None)
        except AutoplaceError:
            raise
        except Exception as error:
            if isinstance(error, (ValueError, LookupError, TypeError)) and observation is not None:
                self._check_observation(index, observation)  # it may not have fitted into its row
            raise_from_env(error, self._where(index))
        final_observations = np.stack(finals) if finals else self._none
        self._check_finite(ended, final_observations)
        return Step(self.observations, rewards, terminated, truncated, ended, final_observations)

    def close(self) -> None:
        """Close every environment; one that fails to close does not keep the others open."""
        for env in self._envs:
            with contextlib.suppress(Exception):
                env.close()

    def _reset_one(self, index: int, seed: int | None) -> None:
        try:
            observation, _ = self._envs[index].reset(seed=seed)
        except Exception as error:
            raise_from_env(error, self._where(index))
        self._check_observation(index, observation)
        if self._write is None:
            self._rows[index][...] = observation
        else:
            self._write(self._rows[index], observation)

    def _check_first(self, index: int, observation: Any, reward: Any) -> None:  # noqa: ANN401
        self._check_observation(index, observation)
        self._number(index, reward)

    def _number(self, index: int, reward: Any) -> float:  # noqa: ANN401 - the env's own
        if hasattr(reward, "__float__") and np.shape(reward) in ((), (1,)):
            return float(np.ravel(reward)[0])
        raise EnvError(
            f"a reward is one number, got {reward!r} from {self._where(index)}: return a float"
        )

    def _check_observation(self, index: int, observation: Any) -> None:  # noqa: ANN401
        found = self._codec.mismatch(observation)
        if found is not None:
            key = f"the part {found.key!r} of an observation" if found.key else "an observation"
            raise EnvError(
                f"{key} has {found.expected} of its space, got {found.got} from "
                f"{self._where(index)}: mend the environment's observation_space or its output"
            )

    def _check_finite(
        self, ended: Sequence[int] = (), final_observations: np.ndarray | None = None
    ) -> None:
        """Stop on NaN or infinity, or replace it, before it reaches a weight.

        A dot product with zeros is 0 where every number is finite and NaN where one is not; only
        then is each number looked at.
        """
        with np.errstate(invalid="ignore"):
            total = float(self._numbers.dot(self._zeros))
            if self._vectors is not None:
                total += float((self._vectors * 0.0).sum())
            if ended and final_observations is not None:
                total += float((self._codec.numbers(final_observations) * 0.0).sum())
        if total == 0.0:
            return
        meet_non_finite(
            self.description,
            self.observations,
            self._rewards,
            final_observations,
            ended,
            self._where,
        )

    def _where(self, index: int) -> str:
        index += self._first_index
        return f"{self.description.env.id}, environment {index}, vector step {self._num_steps}"
