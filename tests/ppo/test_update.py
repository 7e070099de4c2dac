import dataclasses
import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from autoplace.envs.spaces import observation_codec
from autoplace.ppo.adam import ADAM_EPS, HostAdam
from autoplace.ppo.batch import make_batch
from autoplace.ppo.distribution import draw_noise, log_prob
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.rollout import Rollout, rollout_bytes
from autoplace.ppo.update import NonFiniteUpdateError, Updater, draw_permutations
from autoplace.workload import Hyperparameters, NetworkSpec


def sampled(*, continuous=False, steps=16, num_envs=4, seed=0, **changes):
    """A rollout that a fresh network sampled from random observations, and what made it."""
    spec = NetworkSpec(
        observation_size=3, hidden_sizes=(8, 8), action_size=2, continuous=continuous
    )
    hyper = Hyperparameters(num_envs=num_envs, rollout_steps=steps, epochs=3, **changes)
    network = ActorCritic(spec, seed=seed, normalize_observations=hyper.normalize_observations)
    generator = torch.Generator().manual_seed(seed)
    rollout = Rollout(spec, rollout_steps=steps, num_envs=num_envs)
    noise = draw_noise((steps, num_envs, 2), continuous=continuous, generator=generator)
    step = PolicyStep(network)
    for t in range(steps):
        step(torch.randn(num_envs, 3, generator=generator), noise[t], rollout, t)
    rollout.observation_rows[-1].copy_(torch.randn(num_envs, 3, generator=generator))
    rollout.outcomes.zero_()
    rollout.rewards.copy_(torch.randn(steps, num_envs, generator=generator))
    return network, rollout, hyper


def orders(hyper, seed=0):
    return draw_permutations(
        hyper.rollout_rows, hyper.epochs, torch.Generator().manual_seed(seed)
    ).unbind(0)


def test_a_policy_step_records_the_row_and_takes_the_noisy_maximum():
    spec = NetworkSpec(observation_size=2, hidden_sizes=(), action_size=3)
    network = ActorCritic(spec)
    network.flat.zero_()
    with torch.no_grad():
        network.actor_layers[0][1].copy_(torch.tensor([0.0, 1.0, 2.0]))  # the logits
    rollout = Rollout(spec, rollout_steps=2, num_envs=3)
    noise = torch.tensor([[0.0, 0.0, 0.0], [5.0, 0.0, 0.0], [0.0, 1.5, 0.0]])
    observations = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    actions = PolicyStep(network)(observations, noise, rollout, 1)
    assert actions.tolist() == [2, 0, 1]
    assert rollout.actions[1].tolist() == [2, 0, 1]
    assert torch.equal(rollout.observations[1], observations)


def test_a_gaussian_policy_step_adds_scaled_noise_to_the_mean():
    spec = NetworkSpec(observation_size=2, hidden_sizes=(), action_size=2, continuous=True)
    network = ActorCritic(spec)
    network.flat.zero_()
    with torch.no_grad():
        network.actor_layers[0][1].copy_(torch.tensor([1.0, -1.0]))
        network.log_std.copy_(torch.tensor([0.0, math.log(2)]))
    rollout = Rollout(spec, rollout_steps=1, num_envs=1)
    actions = PolicyStep(network)(torch.zeros(1, 2), torch.tensor([[0.5, 3.0]]), rollout, 0)
    assert actions.tolist() == [pytest.approx([1.5, 5.0])]


@pytest.mark.parametrize("continuous", [False, True])
def test_the_first_minibatch_has_ratio_one(continuous):
    network, rollout, hyper = sampled(continuous=continuous)
    batch = make_batch(network, rollout, hyper)
    observations, actions, log_probs, _, _ = batch.split(batch.rows)
    now = log_prob(network.policy(observations), network.log_std, actions)
    torch.testing.assert_close(now, log_probs, atol=1e-6, rtol=0)


def test_a_batch_keeps_rows_together():
    network, rollout, hyper = sampled(continuous=True, normalize_observations=False)
    batch = make_batch(network, rollout, hyper)
    observations, actions, _, advantages, returns = batch.split(batch.rows)
    t, env = 5, 2
    row = t * 4 + env
    assert torch.equal(observations[row], rollout.observations[t, env])
    assert torch.equal(actions[row], rollout.actions[t, env])
    value = network.value(rollout.observations[t, env].unsqueeze(0))
    assert (advantages[row] + value).item() == pytest.approx(returns[row].item(), abs=1e-5)


def test_a_truncated_step_is_worth_its_reward_and_the_value_of_where_it_ended():
    # gae_lambda 0 leaves the one-step error: the return is r + gamma V(final observation).
    network, rollout, hyper = sampled(gae_lambda=0.0, gamma=0.9, normalize_observations=False)
    final = torch.tensor([[3.0, -1.0, 2.0]])
    rollout.truncated[7, 1] = 1.0
    rollout.final_index = torch.tensor([7 * 4 + 1])
    rollout.final_observations = final
    batch = make_batch(network, rollout, hyper)
    returns = batch.split(batch.rows)[4]
    expected = rollout.rewards[7, 1] + 0.9 * network.value(final)[0]
    assert returns[7 * 4 + 1].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("continuous", [False, True])
def test_one_gradient_step_is_what_plain_autograd_and_adam_do(continuous):
    network, rollout, hyper = sampled(continuous=continuous, entropy_coef=0.01)
    batch = make_batch(network, rollout, hyper)
    index = torch.arange(64).flip(0)
    plain = network.over(network.flat.clone())
    optimizer = torch.optim.Adam(plain.parameters(), lr=hyper.learning_rate, eps=ADAM_EPS)
    observations, actions, old, advantages, returns = batch.split(batch.rows[index])
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    outputs, values = plain.policy(observations), plain.value(observations)
    if continuous:
        policy = torch.distributions.Independent(
            torch.distributions.Normal(outputs, plain.log_std.exp()), 1
        )
    else:
        policy = torch.distributions.Categorical(logits=outputs)
    ratio = (policy.log_prob(actions) - old).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    loss = -surrogate + 0.5 * (values - returns).square().mean() - 0.01 * policy.entropy().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), hyper.max_grad_norm)
    optimizer.step()

    Updater(network, hyper, minibatch_rows=64).minibatch_step(batch, index)
    torch.testing.assert_close(network.flat, plain.flat, atol=2e-6, rtol=0)


def test_an_update_visits_every_row_once_per_epoch():
    network, rollout, hyper = sampled(steps=25, num_envs=3)  # 75 rows
    updater = Updater(network, hyper, minibatch_rows=32)
    seen = []
    updater.minibatch_step = lambda batch, index, measure: seen.append(index)
    updater.update(make_batch(network, rollout, hyper), orders(hyper), learning_rate=1, iteration=1)
    assert [len(index) for index in seen] == [32, 32, 11] * 3
    for epoch in range(3):
        assert torch.cat(seen[3 * epoch : 3 * epoch + 3]).sort().values.tolist() == list(range(75))


def test_a_rest_of_one_row_joins_the_minibatch_before_it_and_stays_finite():
    network, rollout, hyper = sampled(steps=13, num_envs=5)  # 65 rows
    updater = Updater(network, hyper, minibatch_rows=64)
    assert updater.sizes == (65,)
    batch = make_batch(network, rollout, hyper)
    stats = updater.update(batch, orders(hyper), learning_rate=1e-3, iteration=1)
    assert stats.num_minibatches == 3
    assert math.isfinite(stats.policy_loss) and network.flat.isfinite().all()


def test_statistics_describe_the_last_epoch():
    network, rollout, hyper = sampled()
    updater = Updater(network, hyper, minibatch_rows=16)
    batch = make_batch(network, rollout, hyper)
    stats = updater.update(batch, orders(hyper), learning_rate=1e-3, iteration=1)
    assert 0 < stats.entropy <= math.log(2) + 1e-6
    assert stats.approx_kl >= 0 and 0 <= stats.clip_fraction <= 1
    assert stats.learning_rate == 1e-3 and stats.num_minibatches == 12


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_with_the_iteration(poison):
    network, rollout, hyper = sampled()
    batch = make_batch(network, rollout, hyper)
    batch.rows[10, -1] = poison  # a return
    updater = Updater(network, hyper, minibatch_rows=16)
    with pytest.raises(NonFiniteUpdateError, match="loss of iteration 7 is not finite"):
        updater.update(batch, orders(hyper), learning_rate=1e-3, iteration=7)


def test_optimiser_state_survives_a_round_trip():
    network, rollout, hyper = sampled()
    batch = make_batch(network, rollout, hyper)
    updater = Updater(network, hyper, minibatch_rows=16)
    assert updater.optimizer_state() == {}
    updater.update(batch, orders(hyper), learning_rate=1e-3, iteration=1)
    copy = network.over(network.flat.clone())
    other = Updater(copy, hyper, minibatch_rows=16)
    other.load_optimizer_state({k: v.clone() for k, v in updater.optimizer_state().items()})
    for each in (updater, other):
        each.update(batch, orders(hyper, seed=1), learning_rate=1e-3, iteration=2)
    assert torch.equal(copy.flat, network.flat)


def test_the_bytes_of_a_rollout_are_those_it_holds():
    for continuous in (False, True):
        spec = NetworkSpec(
            observation_size=7, hidden_sizes=(4,), action_size=3, continuous=continuous
        )
        rollout = Rollout(spec, rollout_steps=5, num_envs=2)
        held = (rollout.observations, rollout.actions, rollout.outcomes)
        expected = sum(tensor.numel() * tensor.element_size() for tensor in held)
        assert rollout_bytes(spec, rollout_steps=5, num_envs=2) == expected


def test_the_bytes_of_a_dict_of_images_and_numbers_are_those_of_its_keys():
    """Colours of 256 x 256 x 3 and a depth of 256 x 256, a byte each, and a compass of 4 bytes."""
    box = gym.spaces.Box
    space = gym.spaces.Dict(
        rgb=box(0, 255, (256, 256, 3), np.uint8),
        depth=box(0, 255, (256, 256, 1), np.uint8),
        compass=box(-180, 180, (1,), np.float64),
    )
    codec = observation_codec(space, "Navigation")
    spec = NetworkSpec(
        observation_size=codec.size, hidden_sizes=(4,), action_size=3, images=codec.images
    )
    row_bytes = 256 * 256 * 3 + 256 * 256 + 4
    assert spec.observation_bytes == row_bytes
    # 129 observations of 8 environments; an action of 8 bytes, a reward and two flags of 4 each.
    expected = 129 * 8 * row_bytes + 128 * 8 * (8 + 3 * 4)
    assert rollout_bytes(spec, rollout_steps=128, num_envs=8) == expected


def test_value_clipping_compares_with_the_values_that_acted():
    network, rollout, hyper = sampled(normalize_advantages=False, value_clip=0.1)
    batch = make_batch(network, rollout, hyper)
    values = network.value(rollout.observations[:-1].view(-1, 3))
    *_, advantages, returns = batch.split(batch.rows)
    torch.testing.assert_close(
        returns - advantages, network.value(batch.gather(torch.arange(64))[0]), atol=1e-6, rtol=1e-5
    )
    assert values.shape == (64,)
    # Nothing has moved yet, so the first gradient step is that without clipping.
    plain = network.over(network.flat.clone())
    Updater(network, hyper, minibatch_rows=64).minibatch_step(batch, torch.arange(64))
    without = dataclasses.replace(hyper, value_clip=None)
    Updater(plain, without, minibatch_rows=64).minibatch_step(batch, torch.arange(64))
    torch.testing.assert_close(network.flat, plain.flat)


@pytest.mark.parametrize(
    ("kls", "target", "epochs", "reads"),
    [
        ([0.01, 0.02, 0.03], None, 3, 0),
        ([0.01, 0.02, 0.03], 0.05, 3, 2),  # after the last epoch there is nothing to stop
        ([0.01, 0.02, 0.03], 0.015, 2, 2),
        ([0.04, 0.02, 0.03], 0.03, 1, 1),
        ([0.03, 0.02, 0.01], 0.03, 3, 2),  # exactly on target is not beyond it
    ],
)
def test_an_update_ends_with_the_first_epoch_beyond_the_target_kl(kls, target, epochs, reads):
    network, rollout, hyper = sampled(target_kl=target)
    updater = Updater(network, hyper, minibatch_rows=16)
    asked = []

    def mean_kl(num_minibatches):
        assert num_minibatches == 4
        asked.append(kls[len(asked)])
        return asked[-1]

    updater._mean_kl = mean_kl
    batch = make_batch(network, rollout, hyper)
    stats = updater.update(batch, orders(hyper), learning_rate=1e-3, iteration=1)
    assert stats.num_minibatches == 4 * epochs
    assert len(asked) == reads  # of the device: at most one an epoch, none unless asked for


def test_the_kl_that_stops_is_the_mean_over_the_minibatches_of_an_epoch():
    network, rollout, hyper = sampled(target_kl=1e-12)
    updater = Updater(network, hyper, minibatch_rows=16)
    batch = make_batch(network, rollout, hyper)
    stats = updater.update(batch, orders(hyper), learning_rate=1e-2, iteration=1)
    assert stats.num_minibatches == 4 and stats.approx_kl > 1e-12
    assert updater._mean_kl(4) == pytest.approx(stats.approx_kl, rel=1e-5)


def test_clipped_rewards_are_learned_from_by_their_sign_only():
    network, rollout, hyper = sampled(clip_rewards=True, normalize_observations=False)
    rollout.rewards.copy_(torch.tensor([-7.0, 0.0, 0.5, 99.0]).expand(16, 4))
    clipped = make_batch(network, rollout, hyper).rows
    rollout.rewards.copy_(torch.tensor([-1.0, 0.0, 1.0, 1.0]).expand(16, 4))
    unclipped = make_batch(network, rollout, dataclasses.replace(hyper, clip_rewards=None)).rows
    assert torch.equal(clipped, unclipped)


@pytest.mark.parametrize("heads", [(2, 3), (2, 2)])
def test_a_batch_of_several_heads_keeps_every_choice_and_has_ratio_one(heads):
    spec = NetworkSpec(
        observation_size=3, hidden_sizes=(8,), action_size=sum(heads), action_heads=heads
    )
    hyper = Hyperparameters(num_envs=4, rollout_steps=16, epochs=2, entropy_coef=0.01)
    network = ActorCritic(spec, seed=0)
    rollout = Rollout(spec, rollout_steps=16, num_envs=4)
    generator = torch.Generator().manual_seed(0)
    noise = draw_noise((16, 4, sum(heads)), continuous=False, generator=generator)
    step = PolicyStep(network)
    for t in range(16):
        actions = step(torch.randn(4, 3, generator=generator), noise[t], rollout, t)
        assert actions.shape == (4, 2)
    rollout.observation_rows[-1].zero_()
    rollout.outcomes.normal_(generator=generator)
    rollout.outcomes[:, 1:] = 0.0
    batch = make_batch(network, rollout, hyper)
    observations, actions, log_probs, _, _ = batch.gather(torch.tensor([5, 63]))
    assert torch.equal(actions[0], rollout.actions[1, 1])
    now = log_prob(network.policy(observations), None, actions, heads)
    torch.testing.assert_close(now, log_probs, atol=1e-6, rtol=0)
    before = network.flat.clone()
    stats = Updater(network, hyper, minibatch_rows=16).update(
        batch, orders(hyper), learning_rate=1e-3, iteration=1
    )
    assert stats.entropy == pytest.approx(sum(math.log(k) for k in heads), abs=0.01)
    assert not torch.equal(network.flat, before)
    held = (rollout.observations, rollout.actions, rollout.outcomes)
    expected = sum(tensor.numel() * tensor.element_size() for tensor in held)
    assert rollout_bytes(spec, rollout_steps=16, num_envs=4) == expected


def test_adam_on_the_host_is_torchs_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator)
    theirs, ours = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    expected = torch.optim.Adam([theirs], lr=1e-2, eps=ADAM_EPS, fused=True)
    found = HostAdam(ours, 1e-2)
    for step in range(20):
        for optimizer, parameter in ((expected, theirs), (found, ours)):
            parameter.grad = torch.sin(10 * start + step)
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            optimizer.step()
    assert not torch.equal(ours, start)
    assert torch.equal(ours, theirs)
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(found.state[ours][name], expected.state[theirs][name])
