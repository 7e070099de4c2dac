import pytest

from autoplace.errors import UsageError
from autoplace.presets import PRESETS, preset_hyperparameters
from autoplace.workload import Hyperparameters


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_every_preset_is_valid_and_says_where_it_comes_from(preset):
    Hyperparameters(**preset.values)
    assert preset.source and preset.total_steps > 0


@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("auto", "Pendulum-v1"),
        ("pendulum", "CartPole-v1"),
        ("Pendulum", "mine:X-v3"),
        ("auto", "module:Pendulum-v9"),
    ],
)
def test_a_preset_is_found_by_name_or_by_its_environment(name, env_id):
    assert preset_hyperparameters(name, env_id)["gamma"] == 0.9


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="--preset is auto or one of cartpole, pendulum"):
        preset_hyperparameters("cartpol", "CartPole-v1")
    with pytest.raises(UsageError, match="there is no preset for Hopper-v5"):
        preset_hyperparameters("auto", "Hopper-v5")
