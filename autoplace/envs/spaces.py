"""What of an environment's spaces the network sees, and what of an action the environment sees.

An observation becomes one row: the numbers of its parts side by side, what is a choice one-hot.
With images the row is one of bytes, so that images stay a byte per number in the rollout: first the
other numbers, four bytes each, then the images.

Training, evaluation and export post-process actions through the same :class:`ActionCodec`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from autoplace.errors import EnvError
from autoplace.workload import FLOAT_BYTES, NATURE_SIDE, ImageSpec

_ACTION_INDEX_BYTES = 8
_SMALLEST_SIDE = 5  # what has a shorter side is no image
_MOST_CHANNELS = 64  # what has more along its smallest axis is no image

Path = tuple["str | int", ...]


class Mismatch(NamedTuple):
    """How an observation differs from its space: where, what was expected, what came."""

    key: str
    expected: str
    got: str


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One part of an observation that is no Dict or Tuple itself.

    Attributes:
        path: keys and positions that lead to it.
        shape: as the environment returns it.
        start: its first column among the numbers of a row, or its first byte where it is an image.
        size: how many of them it takes.
        firsts: of a one-hot encoded part, the smallest value of each of its choices.
        counts: likewise, how many values each has; ``()`` where numbers pass as they are.
        image: where it is read by an encoder of its own.
    """

    path: Path
    shape: tuple[int, ...]
    start: int
    size: int
    firsts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    image: ImageSpec | None = None

    @property
    def key(self) -> str:
        """The path as one word, "" where it is the whole observation."""
        return ".".join(map(str, self.path))

    @property
    def stop(self) -> int:
        """One past its last column or byte."""
        return self.start + self.size

    def of(self, observation: Any) -> Any:  # noqa: ANN401 - the env's own
        """This part of an observation."""
        for step in self.path:
            observation = observation[step]
        return observation

    def columns(self, values: Any) -> np.ndarray:  # noqa: ANN401 - the env's own
        """Columns among the numbers that are 1 for choices: ``[B, choices]`` of a stack of them."""
        chosen = np.asarray(values, np.int64).reshape(-1, len(self.counts)) - self.firsts
        if (chosen < 0).any() or (chosen >= self.counts).any():
            raise ValueError(self._outside(values))
        return chosen + self.start + np.concatenate(([0], np.cumsum(self.counts)[:-1]))

    def column(self, value: Any) -> int:  # noqa: ANN401 - the env's own
        """The same of a single choice, many times faster."""
        chosen = int(value) - self.firsts[0]
        if not 0 <= chosen < self.size:
            raise ValueError(self._outside(value))
        return self.start + chosen

    def _outside(self, values: object) -> str:
        return f"{values} is outside of the observation space{_at(self.path)}"

    def mismatch(self, observation: Any) -> Mismatch | None:  # noqa: ANN401 - the env's own
        """How this part of an observation differs from its space."""
        try:
            part = self.of(observation)
        except (KeyError, IndexError, TypeError):
            return Mismatch(self.key, "a value there", "none")
        try:
            array = np.asarray(part)
        except ValueError:  # rows of different lengths
            return Mismatch(self.key, f"the shape {self.shape}", "a ragged sequence")
        if array.shape != self.shape:
            return Mismatch(self.key, f"the shape {self.shape}", str(array.shape))
        if self.image is not None and array.dtype not in (np.uint8, np.bool_):
            return Mismatch(self.key, "uint8", str(array.dtype))
        if self.counts and array.dtype.kind not in "iub":
            return Mismatch(self.key, "whole numbers", str(array.dtype))
        if array.dtype.kind not in "fiub":
            return Mismatch(self.key, "numbers", str(array.dtype))
        return None


@dataclass(frozen=True, kw_only=True)
class ObservationCodec:
    """How observations become rows.

    Attributes:
        leaves: the parts of an observation, in the order of their columns; images last.
        size: columns of a row.
        dtype: of a row: ``uint8`` with images, else ``float32``.
    """

    leaves: tuple[Leaf, ...]
    size: int
    dtype: str

    @property
    def writer(self) -> Callable[[np.ndarray, Any], None]:
        """The fastest way to write one observation into a row ``[D]``."""
        first, *more = self.leaves
        if more or first.path or first.shape or not first.counts:
            return self.write
        column = first.column

        def write_choice(row: np.ndarray, observation: Any) -> None:  # noqa: ANN401
            row[...] = 0.0
            row[column(observation)] = 1.0

        return write_choice

    @property
    def images(self) -> tuple[ImageSpec, ...]:
        """The images of an observation, as they follow each other in a row."""
        return tuple(leaf.image for leaf in self.leaves if leaf.image is not None)

    @property
    def box_shape(self) -> tuple[int, ...] | None:
        """The shape of an observation that is a row but for its shape; ``None`` for any other."""
        (first, *more) = self.leaves
        return None if more or first.path or first.counts else first.shape

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of rows ``[..., D]`` that are no part of an image: a float32 view."""
        if self.dtype == "float32":
            return rows
        end = self.size - sum(image.size for image in self.images)
        return rows[..., :end].view(np.float32)

    def key_of(self, column: int) -> str:
        """The key of what is in a column of :meth:`numbers`."""
        for leaf in self.leaves:
            if leaf.image is None and leaf.start <= column < leaf.stop:
                return leaf.key
        raise AssertionError(column)

    def write(self, row: np.ndarray, observation: Any) -> None:  # noqa: ANN401 - the env's own
        """Write one observation into ``row``, ``[D]``."""
        numbers = self.numbers(row)
        for leaf in self.leaves:
            part = leaf.of(observation) if leaf.path else observation
            if leaf.image is not None:
                row[leaf.start : leaf.stop] = np.reshape(part, -1)
            elif not leaf.counts:
                numbers[leaf.start : leaf.stop] = np.reshape(part, -1)
            else:
                numbers[leaf.start : leaf.stop] = 0.0
                numbers[leaf.columns(part) if leaf.shape else leaf.column(part)] = 1.0

    def encode(self, observations: Any) -> np.ndarray:  # noqa: ANN401 - the env's own
        """Rows ``[B, D]`` of a stack of observations: every part of it ``[B, *shape]``."""
        parts = [np.asarray(leaf.of(observations)) for leaf in self.leaves]
        count = len(parts[0])
        rows = np.zeros((count, self.size), self.dtype)
        numbers = self.numbers(rows)
        for leaf, part in zip(self.leaves, parts, strict=True):
            if leaf.counts:
                numbers[np.arange(count)[:, None], leaf.columns(part)] = 1.0
            else:
                target = numbers if leaf.image is None else rows
                target[:, leaf.start : leaf.stop] = part.reshape(count, leaf.size)
        return rows

    def is_single(self, observations: Any) -> bool:  # noqa: ANN401 - the env's own
        """Whether these are one observation, not a stack of them."""
        return bool(np.shape(self.leaves[0].of(observations)) == self.leaves[0].shape)

    def encode_one(self, observation: Any) -> np.ndarray:  # noqa: ANN401 - the env's own
        """The row of one observation, as a stack of one: ``[1, D]``."""
        rows = np.zeros((1, self.size), self.dtype)
        self.write(rows[0], observation)
        return rows

    def mismatch(self, observation: Any) -> Mismatch | None:  # noqa: ANN401 - the env's own
        """How an observation differs from its space; ``None`` where it does not."""
        for leaf in self.leaves:
            found = leaf.mismatch(observation)
            if found is not None:
                return found
        return None


@dataclass(frozen=True)
class ActionCodec:
    """How a policy's actions become the environment's.

    Attributes:
        size: logits of all heads, or numbers in a continuous action.
        continuous: whether the space is a Box.
        shape: of an action that is no single choice.
        dtype: likewise.
        low: ``[A]`` lower bounds, infinite ones as they are; ``None`` where none is finite.
        high: ``[A]`` upper bounds, likewise.
        first: smallest value of a Discrete space.
        heads: choices of each part of a MultiDiscrete or MultiBinary action.
        firsts: smallest value of each part; ``None`` where all are 0.
    """

    size: int
    continuous: bool
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    first: int = 0
    heads: tuple[int, ...] = ()
    firsts: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of one action as it crosses between host and device."""
        if self.continuous:
            return self.size * FLOAT_BYTES
        return _ACTION_INDEX_BYTES * max(1, len(self.heads))

    def decode(self, actions: np.ndarray) -> Any:  # noqa: ANN401 - what the env takes
        """Actions for the environments: a list of ints, or arrays ``[B, *shape]``.

        Continuous ones are clipped, on the way to the environment only; the rollout keeps what was
        sampled, since that is what the log-probabilities are of.
        """
        if self.heads:
            if self.firsts is not None:
                actions = actions + self.firsts
            return actions.reshape(len(actions), *self.shape).astype(self.dtype, copy=False)
        if not self.continuous:
            return (actions + self.first).tolist() if self.first else actions.tolist()
        if self.low is not None:
            actions = np.maximum(actions, self.low)
        if self.high is not None:
            actions = np.minimum(actions, self.high)
        return actions.reshape(len(actions), *self.shape).astype(self.dtype, copy=False)

    def random(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        """Random actions as a fresh policy might sample them, ``[*shape]`` or ``[*shape, A]``."""
        if self.continuous:
            return rng.standard_normal((*shape, self.size), dtype=np.float32)
        if self.heads:
            return rng.integers(self.heads, size=(*shape, len(self.heads)))
        return rng.integers(self.size, size=shape)


# --------------------------------------------------------------------------------------------------
# From spaces to codecs


def observation_codec(
    space: spaces.Space[Any], env_id: str, *, images: str = "auto"
) -> ObservationCodec:
    """The codec of an observation space.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of such.
        env_id: for messages.
        images: how images are read, one of :data:`autoplace.workload.IMAGE_READINGS`.

    Raises:
        EnvError: the space is of another kind, or has no numbers in it.
    """
    found = [_leaf(part, path, env_id, images) for path, part in _parts(space, (), env_id)]
    vectors = [leaf for leaf in found if leaf.image is None]
    pictures = [leaf for leaf in found if leaf.image is not None]
    placed: list[Leaf] = []
    start = 0
    for leaf in vectors:
        placed.append(dataclasses.replace(leaf, start=start))
        start += leaf.size
    if pictures:
        start *= FLOAT_BYTES
    for leaf in pictures:
        placed.append(dataclasses.replace(leaf, start=start))
        start += leaf.size
    return ObservationCodec(
        leaves=tuple(placed), size=start, dtype="uint8" if pictures else "float32"
    )


def _parts(
    space: spaces.Space[Any], path: Path, env_id: str
) -> Iterator[tuple[Path, spaces.Space[Any]]]:
    """Every part of a space that is no Dict or Tuple itself, with the way there."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        items: Iterator[tuple[str | int, spaces.Space[Any]]]
        items = iter(
            space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        )
        if not space.spaces:
            raise EnvError(_empty("observes", space, path, env_id))
        for key, part in items:
            yield from _parts(part, (*path, key), env_id)
    else:
        yield path, space


def _leaf(space: spaces.Space[Any], path: Path, env_id: str, images: str) -> Leaf:
    if isinstance(space, spaces.Discrete):
        count, first = int(space.n), int(space.start)
        return Leaf(path=path, shape=(), start=0, size=count, firsts=(first,), counts=(count,))
    shape = tuple(space.shape or ())
    size = math.prod(shape)
    known = (spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)
    if isinstance(space, known) and size == 0:
        raise EnvError(_empty("observes", space, path, env_id))
    if isinstance(space, spaces.MultiDiscrete):
        counts = _whole_numbers(space.nvec)
        firsts = _whole_numbers(space.start)
        return Leaf(path=path, shape=shape, start=0, size=sum(counts), firsts=firsts, counts=counts)
    if isinstance(space, spaces.MultiBinary):
        return Leaf(path=path, shape=shape, start=0, size=size)
    if isinstance(space, spaces.Box):
        image = None if images == "flat" else _image(space, path, env_id, images)
        return Leaf(path=path, shape=shape, start=0, size=size, image=image)
    raise EnvError(
        f"{env_id} observes {_kind(space)}{_at(path)}, but an observation is made of Box, "
        "Discrete, MultiDiscrete and MultiBinary, in a Dict or a Tuple: leave that part out with "
        "gymnasium.wrappers.TransformObservation"
    )


def _image(space: spaces.Box, path: Path, env_id: str, images: str) -> ImageSpec | None:
    """The image that a Box is, ``None`` where it is none."""
    shape = tuple(space.shape)
    if len(shape) < 2 or min(sorted(shape)[-2:]) < _SMALLEST_SIDE:
        return None
    if space.dtype not in (np.uint8, np.bool_):
        looks_like_one = bool((space.low == 0).all() and (space.high == 255).all())
        if looks_like_one:
            fault = "looks like one" if len(shape) > 2 else "has no channel axis"
            raise EnvError(
                f"an image is a Box of uint8, but {env_id} observes {shape} numbers from 0 to 255 "
                f"of {space.dtype}{_at(path)}, which {fault}: give its Box "
                "dtype=numpy.uint8, or have it read as plain numbers by --images flat"
            )
        return None
    if len(shape) > 3:
        raise EnvError(
            f"an image has two or three axes, but {env_id} observes {shape}{_at(path)}: merge the "
            "others into its channels, or have it read as plain numbers by --images flat"
        )
    key = ".".join(map(str, path))
    high = max(1, int(np.max(space.high)))
    if len(shape) == 2:
        return ImageSpec(key=key, height=shape[0], width=shape[1], channels=1, high=high)
    channels_first = images == "chw" or (
        images == "auto" and shape[0] == min(shape) and shape[0] < shape[2]
    )
    channels, height, width = shape if channels_first else (shape[2], shape[0], shape[1])
    if min(height, width) < _SMALLEST_SIDE or channels > _MOST_CHANNELS:
        return None
    return ImageSpec(
        key=key,
        height=height,
        width=width,
        channels=channels,
        channels_first=channels_first,
        high=high,
    )


def describe_images(
    codec: ObservationCodec, env_id: str, *, images: str = "auto"
) -> tuple[str, ...]:
    """How each image, and what has the shape of a large one, was understood, a line for each."""
    lines = []
    for leaf in codec.leaves:
        image = leaf.image
        if image is None:
            if images != "flat" and _has_the_shape_of_an_image(leaf):
                lines.append(
                    f"{env_id} observes {leaf.shape}{_at(leaf.path)}, taken as {leaf.size:,} plain "
                    "numbers of 4 bytes: make its Box one of uint8 where it is an image "
                    "(--images flat says that none is)"
                )
            continue
        layout = "channels first" if image.channels_first else "channels last"
        if len(leaf.shape) == 2:
            layout = "no channel axis, so one channel"
        lines.append(
            f"{env_id} observes an image{_at(leaf.path)}, {leaf.shape} taken as {image.height} x "
            f"{image.width} pixels of {image.channels} channel(s) ({layout}; --images hwc, chw or "
            f"flat says otherwise): read by a {image.encoder} that actor and critic share"
        )
    return tuple(lines)


def _has_the_shape_of_an_image(leaf: Leaf) -> bool:
    return len(leaf.shape) in (2, 3) and min(sorted(leaf.shape)[-2:]) >= NATURE_SIDE


def action_codec(space: spaces.Space[Any], env_id: str) -> ActionCodec:
    """The codec of an action space.

    Raises:
        EnvError: the space is of another kind, or has no numbers in it.
    """
    if isinstance(space, spaces.Discrete):
        return ActionCodec(size=int(space.n), continuous=False, first=int(space.start))
    known = (spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)
    if isinstance(space, known) and math.prod(space.shape or ()) == 0:
        raise EnvError(_empty("acts in", space, (), env_id))
    if isinstance(space, spaces.MultiDiscrete):
        heads = _whole_numbers(space.nvec)
        firsts = np.asarray(space.start, np.int64).reshape(-1)
        return ActionCodec(
            size=sum(heads),
            continuous=False,
            shape=tuple(space.shape),
            dtype=str(space.dtype),
            heads=heads,
            firsts=firsts if firsts.any() else None,
        )
    if isinstance(space, spaces.MultiBinary):
        # A coin is a choice between two.
        heads = (2,) * math.prod(space.shape)
        return ActionCodec(
            size=sum(heads),
            continuous=False,
            shape=tuple(space.shape),
            dtype=str(space.dtype),
            heads=heads,
        )
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low = np.asarray(space.low, np.float32).reshape(-1)
        high = np.asarray(space.high, np.float32).reshape(-1)
        return ActionCodec(
            size=math.prod(space.shape),
            continuous=True,
            shape=tuple(space.shape),
            dtype=str(space.dtype),
            low=low if np.isfinite(low).any() else None,
            high=high if np.isfinite(high).any() else None,
        )
    raise EnvError(
        f"{env_id} acts in {_kind(space)}, but an action must be Discrete, MultiDiscrete, "
        "MultiBinary or a Box of floats: wrap the environment"
    )


def _whole_numbers(values: Any) -> tuple[int, ...]:  # noqa: ANN401 - Gymnasium's own
    return tuple(int(value) for value in np.asarray(values).reshape(-1))


def _empty(verb: str, space: spaces.Space[Any], path: Path, env_id: str) -> str:
    return f"{env_id} {verb} {space}{_at(path)}, which holds no number: its space must not be empty"


def _at(path: Path) -> str:
    return f" at {'.'.join(map(str, path))!r}" if path else ""


def _kind(space: spaces.Space[Any]) -> str:
    text = str(space)
    return text if len(text) <= 60 else f"a {type(space).__name__} space"
