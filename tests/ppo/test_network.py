import pytest
import torch

from autoplace.ppo.network import ActorCritic
from autoplace.workload import NetworkSpec


def spec(**changes):
    sizes = {"observation_size": 3, "hidden_sizes": (8, 5), "action_size": 2}
    return NetworkSpec(**{**sizes, **changes})


def test_every_parameter_is_a_view_of_the_flat_buffer():
    network = ActorCritic(spec(continuous=True), seed=0)
    network.flat.fill_(0.5)
    assert all(p.eq(0.5).all() for p in network.parameters())
    assert network.observation_mean.eq(0.5).all()
    assert sum(p.numel() for p in network.parameters()) == network.spec.num_parameters


def test_initial_weights_are_orthogonal_with_the_stated_gains():
    network = ActorCritic(spec(hidden_sizes=(16, 16)), seed=3)
    hidden = network.actor_layers[1][0]
    torch.testing.assert_close(hidden @ hidden.T, 2.0 * torch.eye(16), atol=1e-5, rtol=0)
    head = network.actor_layers[-1][0]
    torch.testing.assert_close(head @ head.T, 1e-4 * torch.eye(2), atol=1e-8, rtol=0)
    value_head = network.critic_layers[-1][0]
    assert value_head.square().sum().item() == pytest.approx(1.0, rel=1e-5)
    assert all(bias.eq(0).all() for _, bias in network.actor_layers)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = (ActorCritic(spec(), seed=s).flat for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_forward_is_the_plain_module_chain():
    network = ActorCritic(spec(), seed=0)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    outputs, values = network(x)
    torch.testing.assert_close(outputs, network.actor(x))
    torch.testing.assert_close(values, network.critic(x).squeeze(-1))


def test_a_network_over_a_copy_of_the_buffer_computes_the_same():
    network = ActorCritic(spec(), seed=0, normalize_observations=True)
    network.update_statistics(torch.randn(50, 3, generator=torch.Generator().manual_seed(1)))
    copy = network.over(network.flat.clone())
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    assert torch.equal(network(x)[0], copy(x)[0])
    copy.flat.zero_()
    assert network.flat.abs().sum() > 0


def test_merged_statistics_are_those_of_all_rows_together():
    network = ActorCritic(spec(), normalize_observations=True)
    rows = 5 + 3 * torch.randn(700, 3, generator=torch.Generator().manual_seed(0))
    for part in rows.split((1, 99, 600)):
        network.update_statistics(part)
    torch.testing.assert_close(network.observation_mean, rows.mean(0))
    torch.testing.assert_close(network.observation_variance, rows.var(0, correction=0))
    assert network.observation_count.item() == 700
    normal = network.normalize(rows)
    torch.testing.assert_close(normal.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(normal.std(0, correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_normalised_observations_are_clamped_and_a_constant_large_feature_is_zero():
    network = ActorCritic(spec(), normalize_observations=True)
    rows = torch.tensor([[0.0, 1000.1, -1.0], [0.0, 1000.1, 1.0]]).repeat(50, 1)
    network.update_statistics(rows)
    got = network.normalize(torch.tensor([[1.0, 1000.1, 500.0]]))
    assert got.tolist()[0] == pytest.approx([10.0, 0.0, 10.0], abs=0.7)
    assert got[0, 1].abs() < 0.7  # 1000.1 is not exact in float32


def test_statistics_travel_in_the_state_dict():
    network = ActorCritic(spec(), seed=0, normalize_observations=True)
    network.update_statistics(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
    other = ActorCritic(spec(), seed=9, normalize_observations=True)
    other.load_state_dict(network.state_dict())
    assert torch.equal(other.flat, network.flat)


def test_without_normalisation_observations_pass_as_they_are():
    network = ActorCritic(spec())
    x = torch.full((2, 3), 1e6)
    assert network.normalize(x) is x
    network.update_statistics(x)
    assert network.observation_count.item() == 0
