"""What one PPO iteration has to do: the sizes that its time follows from.

A :class:`Workload` refers to an environment and to a network by their descriptions. It holds no
measurement and no placement: the same workload is planned for any machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplace.device_names import is_accelerator
from autoplace.errors import UsageError

FLOAT_BYTES = 4
# What bounds the activations of a pass over a whole rollout: its rows, and with an encoder of
# images or a network of the user's own the numbers that its layers put out. Those of the host are
# to be less than what a gradient step holds; an accelerator is to be busy.
PASS_ROWS = 65536
HOST_PASS_NUMBERS, PASS_NUMBERS = 1 << 22, 1 << 24
_ROW_BLOCK = 8  # kernels take rows by so many, and round what remains in another way
# How image observations are read: the channel axis found by its size, forced to be the last or the
# first one, or no image at all but numbers in a row.
IMAGE_READINGS = ("auto", "hwc", "chw", "flat")

# (output channels, kernel, stride) of each convolution, and the width of the linear layer behind.
_NATURE = (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512)  # Mnih et al. 2015, methods
_SMALL = (((16, 3, 1),), 128)  # Young and Tian 2019 (MinAtar), section 4
NATURE_SIDE = 36  # the smallest side that three convolutions of the former leave a pixel of


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """An environment by name.

    Attributes:
        id: a Gymnasium id, ``module:EnvId``, or ``path/to/file.py:make_env``.
        kwargs_json: the keyword arguments it is made with, as JSON with sorted keys.
        wrappers: whether Atari games get their usual wrappers.
        images: how image observations are read, one of :data:`IMAGE_READINGS`.
        replace_non_finite: whether 0 stands in for observations and rewards that are NaN or
            infinite, which stop a run otherwise. No time depends on it: it is not compared.
    """

    id: str
    kwargs_json: str = "{}"
    wrappers: bool = True
    images: str = "auto"
    replace_non_finite: bool = dataclasses.field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.images not in IMAGE_READINGS:
            raise UsageError(
                f"--images is one of {', '.join(IMAGE_READINGS)}, got {self.images!r}: name one"
            )

    @classmethod
    def make(
        cls,
        env_id: str,
        kwargs: dict[str, Any] | None = None,
        *,
        wrappers: bool = True,
        images: str = "auto",
        replace_non_finite: bool = False,
    ) -> EnvSpec:
        """The spec of ``env_id`` made with ``kwargs``."""
        kwargs_json = json.dumps(kwargs or {}, sort_keys=True)
        return cls(
            id=env_id,
            kwargs_json=kwargs_json,
            wrappers=wrappers,
            images=images,
            replace_non_finite=replace_non_finite,
        )

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments the environment is made with."""
        return dict(json.loads(self.kwargs_json))

    def to_json(self) -> dict[str, Any]:
        """A JSON object; what is as it is for most environments is left out."""
        row = dataclasses.asdict(self)
        if self.wrappers:
            del row["wrappers"]
        if self.images == "auto":
            del row["images"]
        if not self.replace_non_finite:
            del row["replace_non_finite"]
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One convolution, as the matrix product that it amounts to.

    Attributes:
        in_channels: of its input.
        out_channels: of its output.
        kernel: side of the square that each output sees.
        stride: pixels between two outputs.
        height: of its output.
        width: of its output.
    """

    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    height: int
    width: int

    @property
    def matmul(self) -> tuple[int, int, int]:
        """(positions, inputs, outputs): rows of the product per image, and its two widths."""
        inputs = self.in_channels * self.kernel**2
        return self.height * self.width, inputs, self.out_channels


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """An image in an observation, and the encoder that reads it.

    Images with sides of 36 pixels and more are read by the convolutions of Mnih et al. (2015),
    smaller ones by a single convolution (Young and Tian 2019); a linear layer follows either.

    Attributes:
        key: where it is in the observation, "" where it is all of it.
        height: in pixels.
        width: in pixels.
        channels: numbers per pixel.
        channels_first: whether the environment gives ``(C, H, W)`` instead of ``(H, W, C)``.
        high: the largest value, which becomes 1 in the network.
    """

    key: str
    height: int
    width: int
    channels: int
    channels_first: bool = False
    high: int = 255

    @property
    def size(self) -> int:
        """Bytes of one image."""
        return self.height * self.width * self.channels

    @property
    def encoder(self) -> str:
        """``NatureCNN`` or ``small CNN``."""
        return "NatureCNN" if self._is_large else "small CNN"

    @property
    def _is_large(self) -> bool:
        return min(self.height, self.width) >= NATURE_SIDE

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """What the encoder begins with."""
        layers, _ = _NATURE if self._is_large else _SMALL
        found = []
        channels, height, width = self.channels, self.height, self.width
        for out_channels, kernel, stride in layers:
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            found.append(
                Convolution(
                    in_channels=channels,
                    out_channels=out_channels,
                    kernel=kernel,
                    stride=stride,
                    height=height,
                    width=width,
                )
            )
            channels = out_channels
        return tuple(found)

    @property
    def linear(self) -> tuple[int, int]:
        """(inputs, outputs) of the linear layer that the encoder ends with."""
        last = self.convolutions[-1]
        _, width = _NATURE if self._is_large else _SMALL
        return last.out_channels * last.height * last.width, width


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """The shape of an actor and a critic.

    Without images they are two multilayer perceptrons apart. With images both read what one shared
    trunk makes of an observation: an encoder per image, its outputs and the numbers beside the
    images side by side. With a ``factory`` the network is the user's own.

    Attributes:
        observation_size: columns of one observation row: numbers, or with images bytes.
        hidden_sizes: width of each hidden layer, the same for actor and critic.
        action_size: logits of all heads of a categorical policy, or dimensions of a Gaussian one.
        continuous: whether the policy is Gaussian.
        action_heads: choices of each part of an action; ``()`` where it is a single choice (or
            continuous).
        images: what of an observation is an image. Its row is one of bytes then: first the other
            numbers, four bytes each, then the images one after the other.
        factory: ``path/to/file.py:function`` that makes the user's own network, "" where none.
        factory_parameters: how many numbers that network learns.
    """

    observation_size: int
    hidden_sizes: tuple[int, ...]
    action_size: int
    continuous: bool = False
    action_heads: tuple[int, ...] = ()
    images: tuple[ImageSpec, ...] = ()
    factory: str = ""
    factory_parameters: int = 0

    def __post_init__(self) -> None:
        if self.observation_size < 1 or self.action_size < 1:
            raise UsageError(
                "observations and actions need at least one number each, got "
                f"{self.observation_size} and {self.action_size}: use another environment"
            )
        if any(width < 1 for width in self.hidden_sizes):
            raise UsageError(
                "hidden layers are at least 1 wide, got --hidden-sizes "
                f"{','.join(map(str, self.hidden_sizes))}: use for example 64,64"
            )
        assert not self.action_heads or sum(self.action_heads) == self.action_size, self
        assert self.observation_size == self._image_bytes + self.vector_size * self._number_bytes

    @property
    def _image_bytes(self) -> int:
        return sum(image.size for image in self.images)

    @property
    def _number_bytes(self) -> int:
        """Columns that a number of an observation takes."""
        return FLOAT_BYTES if self.images else 1

    @property
    def observation_dtype(self) -> str:
        """Of the rows that observations are kept in: ``uint8`` with images, else ``float32``."""
        return "uint8" if self.images else "float32"

    @property
    def observation_bytes(self) -> int:
        """Bytes of one observation row."""
        return self.observation_size * (1 if self.images else FLOAT_BYTES)

    @property
    def vector_size(self) -> int:
        """Numbers of an observation that are no part of an image."""
        return (self.observation_size - self._image_bytes) // self._number_bytes

    @property
    def action_columns(self) -> int:
        """Numbers in one action as it is recorded."""
        return self.action_size if self.continuous else max(1, len(self.action_heads))

    @property
    def is_plain(self) -> bool:
        """Whether actor and critic are two perceptrons apart, which read the rows as they are."""
        return not self.images and not self.factory

    @property
    def family(self) -> str:
        """Networks of one family cost alike: ``mlp``, ``cnn``, or the user's own by name."""
        return self.factory or ("cnn" if self.images else "mlp")

    @property
    def trunk(self) -> tuple[tuple[int, int, int], ...]:
        """(positions, inputs, outputs) of each matrix product that actor and critic share.

        A user's own network counts as a single one with as many weights.
        """
        if self.factory:
            return ((1, 1, self.factory_parameters),)
        products: list[tuple[int, int, int]] = []
        for image in self.images:
            products += [convolution.matmul for convolution in image.convolutions]
            products.append((1, *image.linear))
        return tuple(products)

    @property
    def actor_layers(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the actor's own linear layers."""
        return self._layers(self.action_size)

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of every own linear layer, the actor's and then the critic's."""
        return self._layers(self.action_size) + self._layers(1)

    def matmuls(self, *, critic: bool = True) -> tuple[tuple[int, int, int], ...]:
        """(positions, inputs, outputs) of every matrix product of one pass.

        A convolution runs once per position of its output, anything else once.
        """
        layers = self.layers if critic else self.actor_layers
        return (*self.trunk, *((1, inputs, outputs) for inputs, outputs in layers))

    @property
    def activation_size(self) -> int:
        """Numbers that the layers put out for one observation."""
        return sum(positions * outputs for positions, _, outputs in self.matmuls())

    def pass_rows(self, device: str) -> int:
        """Rows of one pass over a whole rollout on a device."""
        if self.is_plain:
            return PASS_ROWS
        numbers = PASS_NUMBERS if is_accelerator(device) else HOST_PASS_NUMBERS
        rows = min(PASS_ROWS, numbers // self.activation_size)
        return rows - rows % _ROW_BLOCK if rows > _ROW_BLOCK else max(1, rows)

    @property
    def feature_size(self) -> int:
        """Numbers that the first own layers of actor and critic read."""
        return self.vector_size + sum(image.linear[1] for image in self.images)

    def _layers(self, outputs: int) -> tuple[tuple[int, int], ...]:
        if self.factory:
            return ()
        widths = (self.feature_size, *self.hidden_sizes, outputs)
        return tuple(itertools.pairwise(widths))

    @property
    def num_parameters(self) -> int:
        """Weights and biases, and the log standard deviations of a Gaussian policy."""
        if self.factory:
            learned = self.factory_parameters
        else:
            products = [(inputs, outputs) for _, inputs, outputs in self.trunk]
            learned = sum(i * o + o for i, o in (*products, *self.layers))
        return learned + (self.action_size if self.continuous else 0)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; what most networks lack is left out where this one lacks it too."""
        row = dataclasses.asdict(self)
        for name in ("action_heads", "images", "factory", "factory_parameters"):
            if not row[name]:
                del row[name]
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> NetworkSpec:
        """The inverse of :meth:`to_json`."""
        values = dict(row)
        values["hidden_sizes"] = tuple(values["hidden_sizes"])
        values["action_heads"] = tuple(values.get("action_heads", ()))
        values["images"] = tuple(
            image if isinstance(image, ImageSpec) else ImageSpec(**image)
            for image in values.get("images", ())
        )
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """What decides how PPO learns, placement aside. Defaults are the same for every environment.

    Attributes:
        num_envs: environments stepped together.
        rollout_steps: vector steps in one rollout.
        minibatch_rows: rows of one gradient step; ``None`` leaves the choice to the planner.
        epochs: passes over each rollout.
        hidden_sizes: widths of the hidden layers of actor and critic.
        learning_rate: Adam's step size at the start of the run.
        anneal_learning_rate: whether it falls linearly over the run's total steps: iteration i of
            n (counted from 0) uses ``learning_rate * (1 - i / n)``, so the first has all of it
            and the last 1/n of it.
        gamma: discount per step.
        gae_lambda: decay of the advantage estimate (Schulman et al. 2016, eq. 16).
        clip_range: allowed change of the probability ratio (Schulman et al. 2017, eq. 7).
        entropy_coef: weight of the entropy bonus.
        value_coef: weight of the value loss.
        max_grad_norm: gradients are scaled down to this norm.
        normalize_advantages: whether each minibatch's advantages are made zero-mean, unit-spread.
        normalize_observations: whether observations are standardised by running statistics.
        normalize_rewards: whether rewards are divided by the spread of the discounted return.
        clip_rewards: whether only the sign of a reward is learned from (Mnih et al. 2015);
            ``None`` clips those of Atari games with their usual wrappers. Returns that are
            reported, and evaluations, have the rewards as they are.
        value_clip: how far a value may move from the one that acted before its loss stops falling;
            ``None`` does not clip.
        target_kl: an update ends with the first epoch whose mean KL divergence from the policy
            that acted exceeds this; ``None`` runs every epoch.
        network_factory: ``path/to/file.py:function`` that makes the user's own network.
    """

    num_envs: int = 8
    rollout_steps: int = 128
    minibatch_rows: int | None = None
    epochs: int = 10
    hidden_sizes: tuple[int, ...] = (64, 64)
    learning_rate: float = 3e-4
    anneal_learning_rate: bool = True
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    entropy_coef: float = 0.0
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    normalize_advantages: bool = True
    normalize_observations: bool = True
    normalize_rewards: bool = True
    clip_rewards: bool | None = None
    value_clip: float | None = None
    target_kl: float | None = None
    network_factory: str = ""

    def __post_init__(self) -> None:
        for name in ("num_envs", "rollout_steps", "epochs"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "a whole number from 1")
        for name in ("gamma", "gae_lambda"):
            value = getattr(self, name)
            _require(0 <= value <= 1, name, value, "between 0 and 1")
        for name in ("learning_rate", "clip_range", "max_grad_norm"):
            value = getattr(self, name)
            _require(value > 0 and math.isfinite(value), name, value, "above 0")
        for name in ("entropy_coef", "value_coef"):
            value = getattr(self, name)
            _require(value >= 0 and math.isfinite(value), name, value, "0 or more")
        for name in ("value_clip", "target_kl"):
            value = getattr(self, name)
            good = value is None or (value > 0 and math.isfinite(value))
            _require(good, name, value, "above 0")
        if self.rollout_rows < 2:
            raise UsageError(
                "a rollout needs at least 2 rows to normalise advantages, got "
                f"--num-envs {self.num_envs} x --rollout-steps {self.rollout_steps}: raise either"
            )
        if self.minibatch_rows is not None:
            if self.minibatch_rows < 2:
                raise UsageError(
                    "a minibatch needs at least 2 rows to normalise advantages, got "
                    f"--minibatch-rows {self.minibatch_rows}: use 2 or more"
                )
            if self.minibatch_rows > self.rollout_rows:
                raise UsageError(
                    f"a minibatch is at most the rollout of {self.rollout_rows} rows, got "
                    f"--minibatch-rows {self.minibatch_rows}: lower it or raise --rollout-steps"
                )

    @property
    def rollout_rows(self) -> int:
        """Env steps in one rollout."""
        return self.num_envs * self.rollout_steps


def minibatch_sizes(rollout_rows: int, minibatch_rows: int) -> tuple[int, ...]:
    """Rows of each minibatch of one epoch.

    The last one is smaller where the sizes do not divide; a rest of a single row, whose advantages
    cannot be normalised, joins the minibatch before it.

    >>> minibatch_sizes(300, 64)
    (64, 64, 64, 64, 44)
    >>> minibatch_sizes(65, 64)
    (65,)
    """
    full, rest = divmod(rollout_rows, minibatch_rows)
    sizes = [minibatch_rows] * full
    if rest == 1 and sizes:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return tuple(sizes)


def _require(good: bool, name: str, value: object, rule: str) -> None:
    if not good:
        flag = "--" + name.replace("_", "-")
        raise UsageError(f"{flag} must be {rule}, got {value}: change it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One PPO iteration on one environment.

    Attributes:
        env: which environment.
        network: actor and critic.
        hyperparameters: how PPO learns, with the sizes of an iteration among them.
        action_bytes: bytes of one action as it crosses between host and device.
        episode_limit: steps after which episodes are truncated, where that is known.
    """

    env: EnvSpec
    network: NetworkSpec
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    action_bytes: int
    episode_limit: int | None = None

    @property
    def observation_bytes(self) -> int:
        """Bytes of one observation as it crosses between host and device."""
        return self.network.observation_bytes

    @property
    def standardizes_observations(self) -> bool:
        """Whether a task of it does; of other networks than perceptrons it is little of a step."""
        return self.hyperparameters.normalize_observations or not self.network.is_plain

    @property
    def scales_rewards(self) -> bool:
        """Whether a task of it does; see :attr:`standardizes_observations`."""
        return self.hyperparameters.normalize_rewards or not self.network.is_plain

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        row = dataclasses.asdict(self)
        return {**row, "env": self.env.to_json(), "network": self.network.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Workload:
        """The inverse of :meth:`to_json`."""
        hyperparameters = dict(data["hyperparameters"])
        hyperparameters["hidden_sizes"] = tuple(hyperparameters["hidden_sizes"])
        return cls(
            env=EnvSpec(**data["env"]),
            network=NetworkSpec.from_json(data["network"]),
            hyperparameters=Hyperparameters(**hyperparameters),
            action_bytes=int(data["action_bytes"]),
            episode_limit=data["episode_limit"],
        )

    def replace(self, **changes: Any) -> Workload:  # noqa: ANN401 - forwards to dataclasses
        """A copy with hyperparameters (by name) or other fields changed."""
        own = {f.name for f in dataclasses.fields(self)}
        hyper = {name: value for name, value in changes.items() if name not in own}
        direct = {name: value for name, value in changes.items() if name in own}
        if hyper:
            direct["hyperparameters"] = dataclasses.replace(self.hyperparameters, **hyper)
        if "hidden_sizes" in hyper:
            direct["network"] = dataclasses.replace(
                self.network, hidden_sizes=tuple(hyper["hidden_sizes"])
            )
        return dataclasses.replace(self, **direct)
