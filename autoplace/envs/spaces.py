"""What of an environment's spaces the network sees, and what of an action the environment sees.

Training, evaluation and export post-process actions through the same :class:`ActionCodec`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from autoplace.errors import EnvError

_ACTION_INDEX_BYTES = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class ObservationCodec:
    """How observations become rows of float32.

    Attributes:
        shape: of one observation as the environment returns it; ``()`` for Discrete.
        size: numbers in the row.
        first: smallest value of a Discrete space, which is one-hot encoded; ``None`` for a Box.
    """

    shape: tuple[int, ...]
    size: int
    first: int | None = None

    def write(self, row: np.ndarray, observation: Any) -> None:  # noqa: ANN401 - the env's own
        """Write one observation into ``row``, a view ``[D]`` (Discrete) or ``shape`` (Box)."""
        if self.first is None:
            row[...] = observation
        else:
            row[...] = 0.0
            row[int(observation) - self.first] = 1.0

    def encode(self, observations: np.ndarray) -> np.ndarray:
        """Rows ``[B, D]`` of a stack of observations ``[B, *shape]``."""
        stack = np.asarray(observations)
        if self.first is None:
            return stack.reshape(len(stack), self.size).astype(np.float32)
        return np.eye(self.size, dtype=np.float32)[stack.astype(np.int64) - self.first]


@dataclass(frozen=True)
class ActionCodec:
    """How a policy's actions become the environment's.

    Attributes:
        size: logits, or numbers in a continuous action.
        continuous: whether the space is a Box.
        shape: of a continuous action.
        dtype: of a continuous action.
        low: ``[A]`` lower bounds, infinite ones as they are; ``None`` where none is finite.
        high: ``[A]`` upper bounds, likewise.
        first: smallest value of a Discrete space.
    """

    size: int
    continuous: bool
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    first: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of one action as it crosses between host and device."""
        return self.size * _FLOAT_BYTES if self.continuous else _ACTION_INDEX_BYTES

    def decode(self, actions: np.ndarray) -> Any:  # noqa: ANN401 - what the env takes
        """Actions for the environments: a list of ints, or clipped arrays ``[B, *shape]``.

        Clipping happens on the way to the environment only; the rollout keeps what was sampled,
        since that is what the log-probabilities are of.
        """
        if not self.continuous:
            return (actions + self.first).tolist() if self.first else actions.tolist()
        if self.low is not None:
            actions = np.maximum(actions, self.low)
        if self.high is not None:
            actions = np.minimum(actions, self.high)
        return actions.reshape(len(actions), *self.shape).astype(self.dtype, copy=False)


def observation_codec(space: spaces.Space[Any], env_id: str) -> ObservationCodec:
    """The codec of an observation space.

    Raises:
        EnvError: the space is of another kind, or has no numbers in it.
    """
    if isinstance(space, spaces.Discrete):
        return ObservationCodec((), int(space.n), int(space.start))
    if isinstance(space, spaces.Box):
        size = math.prod(space.shape)
        if size == 0:
            raise EnvError(
                f"{env_id} observes {space}, which holds no number: its space must not be empty"
            )
        return ObservationCodec(tuple(space.shape), size)
    raise EnvError(
        f"{env_id} observes {_kind(space)}, but an observation must be a Box or Discrete: "
        "flatten it with gymnasium.wrappers.FlattenObservation"
    )


def action_codec(space: spaces.Space[Any], env_id: str) -> ActionCodec:
    """The codec of an action space.

    Raises:
        EnvError: the space is of another kind, or has no numbers in it.
    """
    if isinstance(space, spaces.Discrete):
        return ActionCodec(size=int(space.n), continuous=False, first=int(space.start))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        size = math.prod(space.shape)
        if size == 0:
            raise EnvError(
                f"{env_id} acts in {space}, which holds no number: its space must not be empty"
            )
        low = np.asarray(space.low, np.float32).reshape(-1)
        high = np.asarray(space.high, np.float32).reshape(-1)
        return ActionCodec(
            size=size,
            continuous=True,
            shape=tuple(space.shape),
            dtype=str(space.dtype),
            low=low if np.isfinite(low).any() else None,
            high=high if np.isfinite(high).any() else None,
        )
    raise EnvError(
        f"{env_id} acts in {_kind(space)}, but an action must be Discrete or a Box of floats: "
        "wrap the environment"
    )


def _kind(space: spaces.Space[Any]) -> str:
    text = str(space)
    return text if len(text) <= 60 else f"a {type(space).__name__} space"
