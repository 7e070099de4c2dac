"""Sizes of an iteration, and which hyperparameters are refused."""

from __future__ import annotations

import json

import pytest

from autoplace.errors import UsageError
from autoplace.workload import (
    EnvSpec,
    Hyperparameters,
    NetworkSpec,
    Workload,
    minibatch_sizes,
)


@pytest.mark.parametrize(
    ("rows", "minibatch", "sizes"),
    [
        (1024, 256, (256,) * 4),
        (300, 64, (64, 64, 64, 64, 44)),
        (65, 64, (65,)),  # a single row joins the minibatch before it
        (129, 64, (64, 65)),
        (64, 64, (64,)),
        (3, 2, (3,)),
        (2, 2, (2,)),
    ],
)
def test_minibatches_cover_the_rollout_and_none_has_one_row(
    rows: int, minibatch: int, sizes: tuple[int, ...]
) -> None:
    assert minibatch_sizes(rows, minibatch) == sizes
    assert sum(sizes) == rows
    assert min(sizes) >= 2


def test_parameters_are_counted_as_by_hand() -> None:
    # actor 4x64+64, 64x64+64, 64x2+2; critic 4x64+64, 64x64+64, 64x1+1
    network = NetworkSpec(observation_size=4, hidden_sizes=(64, 64), action_size=2)
    assert network.num_parameters == (320 + 4160 + 130) + (320 + 4160 + 65)
    assert network.layers == ((4, 64), (64, 64), (64, 2), (4, 64), (64, 64), (64, 1))
    gaussian = NetworkSpec(
        observation_size=4, hidden_sizes=(64, 64), action_size=2, continuous=True
    )
    assert gaussian.num_parameters == network.num_parameters + 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_envs": 0}, "--num-envs must be a whole number from 1, got 0"),
        ({"epochs": 0}, "--epochs must be a whole number from 1, got 0"),
        ({"gamma": 1.5}, "--gamma must be between 0 and 1, got 1.5"),
        ({"learning_rate": 0.0}, "--learning-rate must be above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate must be above 0"),
        ({"entropy_coef": -1.0}, "--entropy-coef must be 0 or more"),
        ({"num_envs": 1, "rollout_steps": 1}, "a rollout needs at least 2 rows"),
        ({"minibatch_rows": 1}, "a minibatch needs at least 2 rows to normalise advantages"),
        ({"minibatch_rows": 2000}, "a minibatch is at most the rollout of 1024 rows"),
    ],
)
def test_what_cannot_work_is_refused_with_rule_value_and_next_step(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        Hyperparameters(**{"num_envs": 8, "rollout_steps": 128, **values})  # type: ignore[arg-type]
    assert message in str(error.value)


def test_hidden_layers_are_at_least_one_wide() -> None:
    with pytest.raises(UsageError, match="hidden layers are at least 1 wide"):
        NetworkSpec(observation_size=4, hidden_sizes=(64, 0), action_size=2)


def workload() -> Workload:
    return Workload(
        env=EnvSpec.make("Known-v0", {"b": 1, "a": [2]}),
        network=NetworkSpec(observation_size=4, hidden_sizes=(64, 64), action_size=2),
        action_bytes=8,
        episode_limit=500,
    )


def test_a_workload_survives_json() -> None:
    assert Workload.from_json(json.loads(json.dumps(workload().to_json()))) == workload()


def test_replacing_hidden_sizes_changes_the_network_too() -> None:
    changed = workload().replace(hidden_sizes=(32,), epochs=3)
    assert changed.network.hidden_sizes == changed.hyperparameters.hidden_sizes == (32,)
    assert changed.hyperparameters.epochs == 3
    assert changed.env == workload().env


def test_the_order_of_keyword_arguments_makes_no_other_environment() -> None:
    assert EnvSpec.make("A", {"x": 1, "y": 2}) == EnvSpec.make("A", {"y": 2, "x": 1})
    assert EnvSpec.make("A", {"x": 1}) != EnvSpec.make("A", {"x": 2})
    replacing = EnvSpec.make("A", replace_non_finite=True)  # its steps take no other time
    assert replacing == EnvSpec.make("A") and EnvSpec(**replacing.to_json()).replace_non_finite
    assert EnvSpec.make("A", {"x": 1}).kwargs == {"x": 1}
