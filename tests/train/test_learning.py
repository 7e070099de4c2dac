"""Whether it learns. The slow ones are the promises of the README."""

import pytest

from autoplace.presets import preset_hyperparameters
from autoplace.train import Callback, StopRequested, evaluate, train
from autoplace.workload import Hyperparameters
from tests.train.plans import Listener, make_plan


def defaults(**changes):
    """Every hyperparameter at its default, but ``changes``."""
    plain = Hyperparameters()
    names = ("num_envs", "rollout_steps", "epochs", "hidden_sizes")
    return {**{name: getattr(plain, name) for name in names}, **changes}


class StopAtReturn(Callback):
    def __init__(self, target):
        self.target, self.reached = target, None

    def on_start(self, start):
        self.snapshot = start.snapshot

    def on_iteration(self, report):
        if report.iteration % 3:
            return
        if evaluate(self.snapshot(), episodes=20).mean_return >= self.target:
            self.reached = report.env_steps
            raise StopRequested


def test_cartpole_balances_within_30000_steps():
    stop = StopAtReturn(475)
    train(make_plan(rows=256, **defaults()), total_steps=30_000, seed=1, callbacks=[stop])
    assert stop.reached is not None


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 128, 256, 512])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_with_the_defaults_holds_475_after_100000_steps(seed, rows):
    listener = Listener()
    result = train(
        make_plan(rows=rows, **defaults()), total_steps=100_000, seed=seed, callbacks=[listener]
    )
    assert result.env_steps <= 100_000
    assert evaluate(listener.policy, episodes=20).mean_return >= 475


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pendulum_with_its_preset_reaches_minus_250_within_200000_steps(seed):
    values = preset_hyperparameters("auto", "Pendulum-v1")
    rows = values.pop("minibatch_rows")
    listener = Listener()
    train(
        make_plan("Pendulum-v1", rows=rows, **defaults(**values)),
        total_steps=200_000,
        seed=seed,
        callbacks=[listener],
    )
    assert evaluate(listener.policy, episodes=100).mean_return >= -250
