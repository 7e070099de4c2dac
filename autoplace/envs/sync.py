"""Environments stepped one after the other in the calling process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from autoplace.envs.description import EnvDescription
from autoplace.envs.make import make_env
from autoplace.envs.vector import Step
from autoplace.errors import AutoplaceError, EnvError


class SyncVectorEnv:
    """The lean loop: preallocated arrays, and nothing done per environment that can be done once.

    See :class:`autoplace.envs.vector.VectorEnv` for the interface.
    """

    def __init__(self, description: EnvDescription, num_envs: int) -> None:
        """Make ``num_envs`` environments.

        Raises:
            EnvError: one cannot be made.
        """
        self.description = description
        self.num_envs = num_envs
        size = num_envs * description.observation_size
        # Observations and rewards share a buffer, so that one look tells whether all are finite.
        self._numbers = np.zeros(size + num_envs, np.float32)
        self._zeros = np.zeros_like(self._numbers)
        self.observations = self._numbers[:size].reshape(num_envs, -1)
        self._rewards = self._numbers[size:]
        self._codec = description.observations
        self._decode = description.actions.decode
        self._envs = [make_env(description.env) for _ in range(num_envs)]
        self._steps = [env.step for env in self._envs]
        self._num_steps = 0

        box = self._codec.first is None
        shape = self._codec.shape if box else (self._codec.size,)
        self._rows = list(self.observations.reshape(num_envs, *shape))
        self._terminated = np.zeros(num_envs, np.bool_)
        self._truncated = np.zeros(num_envs, np.bool_)
        self._none = np.zeros((0, description.observation_size), np.float32)
        self._write = None if box else self._codec.write
        self._shape = shape

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
            if isinstance(error, ValueError) and observation is not None:
                self._check_shape(index, observation)  # it may not have fitted into its row
            self._explain(index, error)
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
            self._explain(index, error)
        self._check_shape(index, observation)
        if self._write is None:
            self._rows[index][...] = observation
        else:
            self._write(self._rows[index], observation)

    def _check_first(self, index: int, observation: Any, reward: Any) -> None:  # noqa: ANN401
        self._check_shape(index, observation)
        self._number(index, reward)

    def _number(self, index: int, reward: Any) -> float:  # noqa: ANN401 - the env's own
        if hasattr(reward, "__float__") and np.shape(reward) in ((), (1,)):
            return float(np.ravel(reward)[0])
        raise EnvError(
            f"a reward is one number, got {reward!r} from {self._where(index)}: return a float"
        )

    def _check_shape(self, index: int, observation: Any) -> None:  # noqa: ANN401
        got = np.shape(observation)
        if got != self._codec.shape:
            raise EnvError(
                f"an observation has the shape {self._codec.shape} of its space, got {got} from "
                f"{self._where(index)}: mend the environment's observation_space or its output"
            )

    def _check_finite(
        self, ended: Sequence[int] = (), final_observations: np.ndarray | None = None
    ) -> None:
        """Stop on NaN or infinity before it reaches a weight.

        A dot product with zeros is 0 where every number is finite and NaN where one is not; only
        then is each number looked at.
        """
        with np.errstate(invalid="ignore"):
            total = float(self._numbers.dot(self._zeros))
            if ended and final_observations is not None:
                total += float((final_observations * 0.0).sum())
        if total == 0.0:
            return
        for name, values, indices in (
            ("observation", self.observations, range(self.num_envs)),
            ("reward", self._rewards, range(self.num_envs)),
            ("observation", final_observations, ended),
        ):
            if values is None or not len(values):
                continue
            bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
            if len(bad):
                value = values[bad[0]]
                numbers = value[~np.isfinite(value)] if value.ndim else value
                raise EnvError(
                    f"every {name} must be finite, got {np.ravel(numbers)[0]} from "
                    f"{self._where(indices[int(bad[0])])}: mend the environment"
                )

    def _where(self, index: int) -> str:
        return f"{self.description.env.id}, environment {index}, vector step {self._num_steps}"

    def _explain(self, index: int, error: Exception) -> NoReturn:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise EnvError(f"{type(error).__name__} from {self._where(index)}: {first_line}") from error
