"""What one PPO iteration has to do: the sizes that its time follows from.

A :class:`Workload` refers to an environment and to a network by their descriptions. It holds no
measurement and no placement: the same workload is planned for any machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass, field
from typing import Any

from autoplace.errors import UsageError

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """An environment by name.

    Attributes:
        id: a Gymnasium id, ``module:EnvId``, or ``path/to/file.py:make_env``.
        kwargs_json: the keyword arguments it is made with, as JSON with sorted keys.
    """

    id: str
    kwargs_json: str = "{}"

    @classmethod
    def make(cls, env_id: str, kwargs: dict[str, Any] | None = None) -> EnvSpec:
        """The spec of ``env_id`` made with ``kwargs``."""
        return cls(id=env_id, kwargs_json=json.dumps(kwargs or {}, sort_keys=True))

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments the environment is made with."""
        return dict(json.loads(self.kwargs_json))


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """The shape of an actor and a critic, two multilayer perceptrons apart.

    Attributes:
        observation_size: numbers in one flattened observation.
        hidden_sizes: width of each hidden layer, the same for actor and critic.
        action_size: logits of a categorical policy, or dimensions of a Gaussian one.
        continuous: whether the policy is Gaussian.
    """

    observation_size: int
    hidden_sizes: tuple[int, ...]
    action_size: int
    continuous: bool = False

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

    @property
    def actor_layers(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the actor's linear layers."""
        return self._layers(self.action_size)

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of every linear layer, the actor's and then the critic's."""
        return self._layers(self.action_size) + self._layers(1)

    def _layers(self, outputs: int) -> tuple[tuple[int, int], ...]:
        widths = (self.observation_size, *self.hidden_sizes, outputs)
        return tuple(itertools.pairwise(widths))

    @property
    def num_parameters(self) -> int:
        """Weights and biases, and the log standard deviations of a Gaussian policy."""
        linear = sum(inputs * outputs + outputs for inputs, outputs in self.layers)
        return linear + (self.action_size if self.continuous else 0)


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
        """Bytes of one observation as it crosses between host and device (float32)."""
        return FLOAT_BYTES * self.network.observation_size

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Workload:
        """The inverse of :meth:`to_json`."""

        def with_sizes(row: dict[str, Any]) -> dict[str, Any]:
            return {**row, "hidden_sizes": tuple(row["hidden_sizes"])}

        return cls(
            env=EnvSpec(**data["env"]),
            network=NetworkSpec(**with_sizes(data["network"])),
            hyperparameters=Hyperparameters(**with_sizes(data["hyperparameters"])),
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
