"""A user's own network: what it is given, what is asked of it, that it trains like any other."""

from pathlib import Path

import pytest
import torch

from autoplace.envs import describe
from autoplace.errors import UsageError
from autoplace.ppo.factory import own_network_spec
from autoplace.ppo.network import ActorCritic
from autoplace.train import evaluate, load_policy, train
from autoplace.workload import ImageSpec, NetworkSpec
from tests.train.plans import Listener, make_plan

FILE = Path(__file__).with_name("own_networks.py")


def own(name):
    return f"{FILE}:{name}"


def plain(**changes):
    return NetworkSpec(
        **{"observation_size": 4, "hidden_sizes": (64, 64), "action_size": 3, **changes}
    )


def test_its_parameters_are_counted_and_live_in_the_flat_buffer():
    spec = own_network_spec(plain(continuous=True), own("Shared"))
    assert spec.factory_parameters == (4 * 12 + 12) + (12 * 3 + 3) + (12 + 1)
    assert spec.num_parameters == spec.factory_parameters + 3  # and the log standard deviations
    network = ActorCritic(spec, seed=0)
    network.flat.fill_(0.25)
    assert all(p.eq(0.25).all() for p in network.parameters())
    assert network.own.scale.item() == 0.25


def test_it_computes_as_it_is_and_its_weights_follow_the_seed():
    spec = own_network_spec(plain(), own("Shared"))
    first, again, other = (ActorCritic(spec, seed=s) for s in (1, 1, 2))
    assert torch.equal(first.flat, again.flat) and not torch.equal(first.flat, other.flat)
    rows = torch.randn(5, 4)
    outputs, values = first.both(rows)
    expected, expected_values = first.own(rows)
    assert torch.equal(outputs, expected) and torch.equal(values, expected_values)
    copy = first.over(first.flat.clone())
    assert torch.equal(copy.policy(rows), outputs) and torch.equal(copy.value(rows), values)


def test_it_reads_a_single_image_as_a_tensor_and_more_as_a_dict():
    image = ImageSpec(key="pixels", height=6, width=6, channels=2)
    alone = own_network_spec(plain(observation_size=72, images=(image,)), own("Shared"))
    assert ActorCritic(alone).policy(torch.zeros(2, 72, dtype=torch.uint8)).shape == (2, 3)
    mixed = own_network_spec(plain(observation_size=72 + 8, images=(image,)), own("ByKey"))
    assert ActorCritic(mixed).value(torch.zeros(2, 80, dtype=torch.uint8)).shape == (2,)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("network.txt:make", "--network is path/to/file.py:function, got 'network.txt:make'"),
        ("missing.py:make", "there is no file missing.py"),
        (own("absent"), "has no function 'absent'"),
        (own("make_text"), "makes a torch.nn.Module, got str"),
        (own("make_double"), "are float32, but trunk.1.weight .* is torch.float64"),
        (own("make_nothing"), "has weights to learn, .* has none"),
        (own("make_broken"), "cannot make a network: RuntimeError: no weights today"),
        (own("Wrong"), r"policy outputs \(2, 2\) and values \(2,\) .* gave \(2, 2\) and \(2, 1\)"),
    ],
)
def test_what_is_no_network_is_refused_before_anything_runs(factory, message):
    with pytest.raises(UsageError, match=message):
        describe("CartPole-v1", network_factory=factory)


def test_it_trains_is_saved_and_loads_again(tmp_path):
    plan = make_plan(network_factory=own("Shared"))
    assert plan.workload.network.family == own("Shared")
    listener = Listener()
    train(plan, total_steps=96, run_dir=tmp_path, callbacks=[listener])
    policy = load_policy(tmp_path)
    assert torch.equal(policy.network.flat, listener.flat)
    assert evaluate(policy, episodes=2).episodes == 2
    train(plan, total_steps=128, run_dir=tmp_path, resume=True, callbacks=[listener])
    assert listener.results[-1].env_steps == 128
