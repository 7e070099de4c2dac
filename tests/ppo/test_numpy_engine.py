"""The numpy engine computes what the eager one computes, and its loss by hand."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from autoplace.engines import EAGER, NUMPY
from autoplace.ppo import numpy_loss
from autoplace.ppo.batch import Batch, make_batch
from autoplace.ppo.distribution import draw_noise
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import make_policy_step, make_updater
from autoplace.ppo.update import draw_permutations
from autoplace.workload import Hyperparameters, NetworkSpec

SPECS = {
    "choice": {"action_size": 3},
    "choices": {"action_size": 7, "action_heads": (2, 4, 1)},
    "gaussian": {"action_size": 2, "continuous": True},
    "gaussian, no hidden layer": {"action_size": 1, "continuous": True, "hidden_sizes": ()},
}
LOSSES = {
    "default": {},
    "entropy": {"entropy_coef": 0.05},
    "value clipping": {"value_clip": 0.1},
    "raw advantages, tight clipping": {"normalize_advantages": False, "max_grad_norm": 0.01},
    "stop by KL": {"target_kl": 1e-3, "learning_rate": 0.01},
}
STEPS, ENVS, ROWS = 6, 8, 16


def spec_of(name):
    return NetworkSpec(**{"observation_size": 5, "hidden_sizes": (16, 12), **SPECS[name]})


def network_of(spec, engine):
    network = ActorCritic(spec, seed=1, normalize_observations=True, engine=engine)
    network.update_statistics(3.0 + 2.0 * torch.randn(64, 5, generator=seeded(5)))
    with torch.no_grad():  # off the start, where ratios and log standard deviations are trivial
        network.flat[: network.num_trainable] += 0.05 * torch.randn(
            network.num_trainable, generator=seeded(6)
        )
    return network


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def recorded(network):
    """A rollout of actions that the network chose, and those actions."""
    spec = network.spec
    rollout = Rollout(spec, rollout_steps=STEPS, num_envs=ENVS)
    step = make_policy_step(network)
    noise = draw_noise(
        (STEPS, ENVS, spec.action_size), continuous=spec.continuous, generator=seeded(2)
    )
    observations = torch.randn(STEPS + 1, ENVS, 5, generator=seeded(3))
    for t in range(STEPS):
        step(observations[t], noise[t], rollout, t)
    rollout.observations[-1] = observations[-1]
    rollout.outcomes.zero_()
    rollout.rewards.copy_(torch.randn(STEPS, ENVS, generator=seeded(4)))
    rollout.terminated[2, 1] = 1.0
    return rollout


@pytest.mark.parametrize("name", SPECS)
def test_a_policy_step_records_the_same_actions(name):
    one, other = (recorded(network_of(spec_of(name), engine)) for engine in (EAGER, NUMPY))
    assert len(torch.unique(one.actions)) > 1 or name == "choices"
    torch.testing.assert_close(one.actions, other.actions)
    assert torch.equal(one.observations, other.observations)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("loss", LOSSES)
def test_an_update_ends_with_the_same_weights_and_statistics(name, loss):
    hyper = Hyperparameters(num_envs=ENVS, rollout_steps=STEPS, **LOSSES[loss])
    results = []
    for engine in (EAGER, NUMPY):
        network = network_of(spec_of(name), engine)
        rollout = recorded(network_of(spec_of(name), EAGER))
        with torch.no_grad():  # so that ratios leave 1 and some are clipped
            network.flat[:64] += 0.1
        acted = network_of(spec_of(name), engine)
        batch = make_batch(network, rollout, hyper, acted=[acted])
        before = network.flat.clone()
        updater = make_updater(network, hyper, minibatch_rows=ROWS)
        orders = draw_permutations(STEPS * ENVS, hyper.epochs, seeded(7)).unbind(0)
        stats = updater.update(batch, orders, learning_rate=hyper.learning_rate, iteration=1)
        assert (network.flat - before).abs().max() > 1e-4
        results.append((network.flat, stats, updater.optimizer_state()))
    (flat, stats, state), (numpy_flat, numpy_stats, numpy_state) = results
    torch.testing.assert_close(numpy_flat, flat, rtol=0, atol=2e-6)
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm"):
        assert getattr(numpy_stats, name) == pytest.approx(getattr(stats, name), abs=2e-5), name
    assert numpy_stats.num_minibatches == stats.num_minibatches
    assert state.keys() == numpy_state.keys()
    for key in state:
        torch.testing.assert_close(numpy_state[key], state[key], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("engine", [EAGER, NUMPY])
def test_an_update_by_minibatches_of_all_rows_is_that_in_any_order_of_them(engine):
    hyper = Hyperparameters(num_envs=ENVS, rollout_steps=STEPS, value_clip=0.1)
    orders = draw_permutations(STEPS * ENVS, hyper.epochs, seeded(7)).unbind(0)
    ends = []
    for in_one_order in (True, False):
        network = network_of(spec_of("choice"), engine)
        updater = make_updater(network, hyper, minibatch_rows=STEPS * ENVS)
        updater.set_learning_rate(1e-3)
        for iteration in range(2):  # the second rollout is another one
            batch = make_batch(network, recorded(network), hyper)
            if in_one_order:
                updater.update(batch, orders, learning_rate=1e-3, iteration=iteration)
            else:
                for order in orders:
                    updater.minibatch_step(batch, order)
            ends.append(network.flat.clone())
    for one, other in zip(ends[:2], ends[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-6)
    assert (ends[1] - ends[0]).abs().max() > 1e-4


def test_adams_state_crosses_between_the_engines():
    """Two updates in one engine are one in each, the state handed over between them."""
    hyper = Hyperparameters(num_envs=ENVS, rollout_steps=STEPS)
    orders = draw_permutations(STEPS * ENVS, hyper.epochs, seeded(7)).unbind(0)
    ends = []
    for first, second in ((EAGER, EAGER), (EAGER, NUMPY), (NUMPY, EAGER), (NUMPY, NUMPY)):
        network = network_of(spec_of("choice"), first)
        batch = make_batch(network, recorded(network), hyper)
        updater = make_updater(network, hyper, minibatch_rows=ROWS)
        updater.update(batch, orders, learning_rate=1e-3, iteration=1)
        state = {key: value.clone() for key, value in updater.optimizer_state().items()}
        network = ActorCritic(network.spec, engine=second, flat=network.flat.clone())
        updater = make_updater(network, hyper, minibatch_rows=ROWS)
        updater.load_optimizer_state(state)
        updater.update(batch, orders, learning_rate=1e-3, iteration=2)
        ends.append(network.flat)
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=5e-6)


def test_adams_moments_may_be_the_callers_own():
    hyper = Hyperparameters(num_envs=ENVS, rollout_steps=STEPS)
    network = network_of(spec_of("gaussian"), NUMPY)
    batch = make_batch(network, recorded(network), hyper)
    first, second = torch.zeros(network.num_trainable), torch.zeros(network.num_trainable)
    updater = make_updater(network, hyper, minibatch_rows=ROWS)
    updater.use_moments(first, second, 0)
    updater.minibatch_step(batch, torch.arange(ROWS))
    assert first.abs().max() > 0
    assert second.max() > 0


def test_the_loss_of_a_choice_by_hand():
    """Two choices, logits (0, log 3), so p = (1/4, 3/4); the second was taken.

    With old log-probability log(1/2) the ratio is 3/2. Advantage +1 is clipped at 1.2: no
    gradient. Advantage -1 is not: g = -(3/2)(-1)/2 = 3/4, and by the logits 3/4 (-1/4, 1/4).
    """
    logits = np.array([[0.0, 0.0], [np.log(3), np.log(3)]], np.float32)
    loss = numpy_loss.categorical(
        logits,
        np.array([[1.0, 1.0]], np.float32),
        np.full(2, np.log(0.5), np.float32),
        np.array([1.0, -1.0], np.float32),
        heads=[slice(0, 2)],
        clip_range=0.2,
        entropy_coef=0.0,
        needs_entropy=True,
    )
    np.testing.assert_allclose(loss.surrogate.ratio, [1.5, 1.5], rtol=1e-6)
    np.testing.assert_allclose(loss.surrogate.terms, [1.2, -1.5], rtol=1e-6)
    np.testing.assert_allclose(loss.by_outputs, [[0, -0.1875], [0, 0.1875]], atol=1e-6)
    assert loss.entropy == pytest.approx(0.25 * np.log(4) + 0.75 * np.log(4 / 3))


def test_the_loss_of_a_gaussian_by_hand():
    """Mean 1, standard deviation 2, action 3: z = 1, log-probability -1/2 - log 2 - log(2 pi)/2.

    With that as the old one the ratio is 1; advantage 2 of one sample gives g = -2, by the mean
    g z / s = -1, by the log standard deviation g (1 - 1) = 0 less the entropy's 0.1.
    """
    log_prob = -0.5 - np.log(2) - 0.5 * np.log(2 * np.pi)
    loss = numpy_loss.gaussian(
        np.array([[1.0]], np.float32),
        np.array([np.log(2)], np.float32),
        np.array([[3.0]], np.float32),
        np.array([log_prob], np.float32),
        np.array([2.0], np.float32),
        clip_range=0.2,
        entropy_coef=0.1,
    )
    np.testing.assert_allclose(loss.surrogate.ratio, [1.0], rtol=1e-6)
    np.testing.assert_allclose(loss.by_outputs, [[-1.0]], rtol=1e-6)
    np.testing.assert_allclose(loss.by_log_std, [-0.1], atol=1e-6)
    assert loss.entropy == pytest.approx(np.log(2) + 0.5 * (1 + np.log(2 * np.pi)))


@pytest.mark.parametrize("seed", range(3))
def test_the_values_loss_is_that_of_the_eager_engine(seed):
    values, returns, old = torch.randn(3, 64, generator=seeded(seed))
    values.requires_grad_()
    near = old + (values - old).clamp(-0.3, 0.3)
    loss = torch.max((values - returns).square(), (near - returns).square())
    loss.sum().backward()
    squares, slope = numpy_loss.value_loss(
        values.detach().numpy(), returns.numpy(), old.numpy(), 0.3
    )
    np.testing.assert_allclose(squares, loss.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(slope, values.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_a_minibatch_of_another_size_uses_none_of_the_rows_before():
    spec = spec_of("choice")
    hyper = Hyperparameters(num_envs=ENVS, rollout_steps=STEPS)
    network, fresh = network_of(spec, NUMPY), network_of(spec, NUMPY)
    rows = make_batch(network, recorded(network), hyper).rows
    batch = Batch(rows, spec)
    updater = make_updater(network, hyper, minibatch_rows=ROWS)
    updater.minibatch_step(batch, torch.arange(ROWS))
    with torch.no_grad():
        fresh.flat.copy_(network.flat)
    other = make_updater(fresh, hyper, minibatch_rows=ROWS)
    other.load_optimizer_state({k: v.clone() for k, v in updater.optimizer_state().items()})
    for each in (updater, other):
        each.minibatch_step(batch, torch.arange(5))
    assert torch.equal(network.flat, fresh.flat)


def test_its_gradient_steps_do_not_import_torchs_compiler() -> None:
    code = """
import sys, torch
from autoplace.ppo.batch import Batch
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.steps import make_updater
from autoplace.workload import Hyperparameters, NetworkSpec
spec = NetworkSpec(observation_size=3, hidden_sizes=(8,), action_size=2)
hyper = Hyperparameters(num_envs=2, rollout_steps=4, hidden_sizes=(8,))
verdicts = []
network = ActorCritic(spec, engine="numpy")
updater = make_updater(network, hyper, minibatch_rows=8, hear=verdicts.append)
batch = Batch(torch.randn(8, 7) * torch.tensor([1, 1, 1, 0, 1, 1, 1]), spec)
for _ in range(8):
    updater.minibatch_step(batch, torch.arange(8))
assert verdicts[0].dropped_because is None, verdicts
sys.exit("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
