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
    with pytest.raises(UsageError, match="there is no preset for Taxi-v3"):
        preset_hyperparameters("auto", "Taxi-v3")


def test_the_mujoco_presets_are_those_of_the_paper_whatever_the_version():
    # Schulman et al. 2017, table 3: horizon 2048, minibatch 64, 10 epochs, Adam 3e-4.
    for env_id in ("Hopper-v4", "HalfCheetah-v5", "Walker2d-v5", "Humanoid-v5"):
        hyper = Hyperparameters(**preset_hyperparameters("auto", env_id))
        assert (hyper.rollout_rows, hyper.minibatch_rows, hyper.epochs) == (2048, 64, 10)
        assert (hyper.learning_rate, hyper.gamma, hyper.gae_lambda) == (3e-4, 0.99, 0.95)
    assert preset_hyperparameters("auto", "Swimmer-v5")["gamma"] == 0.9999
