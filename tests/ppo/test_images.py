"""Encoders of images, and what the trainer makes of rows of bytes."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplace.measurement import Task
from autoplace.ppo.batch import make_batch
from autoplace.ppo.distribution import draw_noise, log_prob
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.rollout import Rollout, rollout_bytes
from autoplace.ppo.update import Updater, draw_permutations
from autoplace.workload import EnvSpec, Hyperparameters, ImageSpec, NetworkSpec, Workload

SMALL = ImageSpec(key="", height=10, width=10, channels=4)
ATARI = ImageSpec(key="", height=84, width=84, channels=4, channels_first=True)


def spec_of(*images, vector=0, action_size=3, hidden=(16,), **more):
    size = sum(image.size for image in images) + 4 * vector
    return NetworkSpec(
        observation_size=size, hidden_sizes=hidden, action_size=action_size, images=images, **more
    )


def test_the_layers_of_the_nature_network_are_those_of_the_paper():
    # Mnih et al. 2015: 84 x 84 x 4 -> 20 x 20 x 32 -> 9 x 9 x 64 -> 7 x 7 x 64 -> 512
    assert ATARI.encoder == "NatureCNN"
    assert [c.matmul for c in ATARI.convolutions] == [
        (400, 256, 32),
        (81, 512, 64),
        (49, 576, 64),
    ]
    assert ATARI.linear == (3136, 512)
    spec = spec_of(ATARI, hidden=(), action_size=6)
    convolutions = (256 * 32 + 32) + (512 * 64 + 64) + (576 * 64 + 64)
    assert spec.num_parameters == convolutions + 3136 * 512 + 512 + (512 * 6 + 6) + (512 + 1)
    assert spec.trunk[-1] == (1, 3136, 512)


@pytest.mark.parametrize(("side", "encoder"), [(36, "NatureCNN"), (35, "small CNN")])
def test_images_below_36_pixels_get_the_small_network(side, encoder):
    # Symptom: small images do not fit three convolutions.
    image = ImageSpec(key="", height=side, width=side + 4, channels=1)
    assert image.encoder == encoder
    network = ActorCritic(spec_of(image))
    outputs, values = network(torch.zeros(2, image.size, dtype=torch.uint8))
    assert outputs.shape == (2, 3) and values.shape == (2,)


def test_the_network_computes_what_plain_layers_do():
    network = ActorCritic(spec_of(SMALL), seed=0)
    rows = torch.randint(256, (5, SMALL.size), dtype=torch.uint8)
    pixels = rows.view(5, 10, 10, 4).permute(0, 3, 1, 2).float() / 255
    conv, _, _, linear, _ = network.encoder.images[0]
    features = F.relu(F.conv2d(pixels, conv.weight, conv.bias))
    features = F.relu(F.linear(features.flatten(1), linear.weight, linear.bias))
    outputs, values = network.both(network.normalize(rows))
    torch.testing.assert_close(outputs, network.actor(features))
    torch.testing.assert_close(values, network.critic(features).squeeze(-1))
    torch.testing.assert_close(network.policy(rows), outputs)
    torch.testing.assert_close(network.value(rows), values)


def test_either_layout_of_the_same_image_gives_the_same_features():
    first = ImageSpec(key="", height=10, width=10, channels=4, channels_first=True)
    last = ActorCritic(spec_of(SMALL), seed=0)
    other = ActorCritic(spec_of(first), seed=0)
    pixels = torch.randint(256, (3, 10, 10, 4), dtype=torch.uint8)
    torch.testing.assert_close(
        last(pixels.reshape(3, -1))[0], other(pixels.permute(0, 3, 1, 2).reshape(3, -1))[0]
    )


def test_images_and_numbers_have_an_encoder_each_and_are_put_side_by_side():
    # Symptom: a Dict of images and vectors is not supported, or read as one.
    depth = ImageSpec(key="depth", height=6, width=6, channels=1)
    rgb = ImageSpec(key="rgb", height=40, width=40, channels=3)
    spec = spec_of(depth, rgb, vector=2)
    assert spec.feature_size == 2 + 128 + 512 and spec.vector_size == 2
    assert spec.layers[0] == (642, 16)
    network = ActorCritic(spec, seed=0, normalize_observations=True)
    rows = torch.zeros(4, spec.observation_size, dtype=torch.uint8)
    vector = torch.tensor([[1.0, -3.0], [2.0, 5.0], [0.0, 1.0], [7.0, 7.0]])
    rows[:, :8] = vector.view(torch.uint8)
    network.update_statistics(rows)
    torch.testing.assert_close(network.observation_mean, vector.mean(0))
    before = network.policy(rows)
    for columns in (slice(0, 8), slice(8, 44), slice(44, None)):  # each part is read
        changed = rows.clone()
        changed[:, columns] = changed[:, columns].flip(0) if columns.start == 0 else 255
        assert not torch.equal(network.policy(changed), before)
    images_only = rows.clone()
    images_only[:, 8:] = 255
    network.update_statistics(images_only)  # images are no part of the statistics
    torch.testing.assert_close(network.observation_mean, vector.mean(0))


def test_actor_and_critic_train_one_encoder():
    network = ActorCritic(spec_of(SMALL), seed=0)
    rows = torch.randint(256, (5, SMALL.size), dtype=torch.uint8)
    conv = network.encoder.images[0][0].weight
    for part in network.both(rows):
        (gradient,) = torch.autograd.grad(part.sum(), conv, retain_graph=True)
        assert gradient.abs().sum() > 0
    assert sum(p.numel() for p in network.parameters()) == network.spec.num_parameters
    network.flat.fill_(0.5)
    assert all(p.eq(0.5).all() for p in network.parameters())


def sampled(spec, steps=8, num_envs=2):
    network = ActorCritic(spec, seed=0)
    rollout = Rollout(spec, rollout_steps=steps, num_envs=num_envs)
    generator = torch.Generator().manual_seed(0)
    noise = draw_noise((steps, num_envs, spec.action_size), continuous=False, generator=generator)
    rows = torch.randint(256, (steps + 1, num_envs, spec.observation_size), generator=generator)
    rows = rows.to(torch.uint8)
    step = PolicyStep(network)
    for t in range(steps):
        step(rows[t], noise[t], rollout, t)
    rollout.observation_rows[-1].copy_(rows[-1])
    rollout.outcomes.zero_()
    rollout.rewards.copy_(torch.randn(steps, num_envs, generator=generator))
    return network, rollout, rows


def test_a_rollout_keeps_a_byte_per_pixel():
    spec = spec_of(ATARI)
    rollout = Rollout(spec, rollout_steps=3, num_envs=2)
    assert rollout.observations.dtype == torch.uint8
    assert rollout.observations.numel() == 4 * 2 * 84 * 84 * 4
    assert rollout_bytes(spec, rollout_steps=3, num_envs=2) == 4 * 2 * 28224 + 3 * 2 * (8 + 12)


def test_a_batch_holds_the_rollouts_own_bytes_and_has_ratio_one():
    network, rollout, rows = sampled(spec_of(SMALL))
    hyper = Hyperparameters(num_envs=2, rollout_steps=8, epochs=2)
    batch = make_batch(network, rollout, hyper)
    assert batch.images.data_ptr() == rollout.observations.data_ptr()
    assert batch.rows.shape == (16, 1 + 3)
    index = torch.tensor([5, 14])
    observations, actions, log_probs, _, returns = batch.gather(index)
    assert torch.equal(observations, rows[:-1].view(16, -1)[index])
    torch.testing.assert_close(log_prob(network.policy(observations), None, actions), log_probs)
    before = network.flat.clone()
    orders = draw_permutations(16, 2, torch.Generator().manual_seed(0)).unbind(0)
    stats = Updater(network, hyper, minibatch_rows=8).update(
        batch, orders, learning_rate=1e-3, iteration=1
    )
    assert stats.num_minibatches == 4 and not torch.equal(network.flat, before)
    assert returns.isfinite().all()


def test_a_truncated_episode_is_bootstrapped_from_its_final_image():
    network, rollout, _ = sampled(spec_of(SMALL))
    final = torch.full((1, SMALL.size), 200, dtype=torch.uint8)
    rollout.truncated[3, 1] = 1.0
    rollout.final_index, rollout.final_observations = torch.tensor([3 * 2 + 1]), final
    hyper = Hyperparameters(num_envs=2, rollout_steps=8, gae_lambda=0.0, gamma=0.9)
    batch = make_batch(network, rollout, hyper)
    expected = rollout.rewards[3, 1] + 0.9 * network.value(final)[0]
    assert batch.split(batch.rows)[4][7].item() == pytest.approx(expected.item(), abs=1e-5)


def test_passes_over_a_rollout_of_images_are_small_and_change_nothing(monkeypatch):
    network, rollout, _ = sampled(spec_of(SMALL))
    hyper = Hyperparameters(num_envs=2, rollout_steps=8)
    whole = make_batch(network, rollout, hyper).rows
    seen = []
    both = network.both
    monkeypatch.setattr(network, "both", lambda rows: (seen.append(len(rows)), both(rows))[1])
    monkeypatch.setattr("autoplace.workload.HOST_PASS_NUMBERS", 5 * network.spec.activation_size)
    torch.testing.assert_close(make_batch(network, rollout, hyper).rows, whole)
    assert seen == [5, 5, 5, 3]


def test_passes_over_a_rollout_end_with_whole_blocks_of_rows():
    # Symptom: the rows at the end of each pass are rounded in another way than in one large pass.
    network = spec_of(ATARI, hidden=(), action_size=6)
    assert network.activation_size == 400 * 32 + 81 * 64 + 49 * 64 + 512 + 6 + 1
    assert network.pass_rows("cpu") == 192  # 193.8 rows give 2^22 numbers
    assert network.pass_rows("cuda:0") == 768  # 775.3 give 2^24


def test_a_network_of_images_survives_json_and_hashes_alike():
    spec = spec_of(SMALL, ImageSpec(key="map", height=40, width=40, channels=1), vector=3)
    task = Task(op="update", network=spec, rows=64)
    again = Task.from_json(json.loads(json.dumps(task.to_json())))
    assert again == task and hash(again) == hash(task)
    workload = Workload(
        env=EnvSpec(id="E", images="chw", wrappers=False), network=spec, action_bytes=8
    )
    assert Workload.from_json(json.loads(json.dumps(workload.to_json()))) == workload


def test_networks_and_environments_written_before_there_were_images_still_load():
    old = {"observation_size": 4, "hidden_sizes": [64, 64], "action_size": 2, "continuous": False}
    expected = NetworkSpec(observation_size=4, hidden_sizes=(64, 64), action_size=2)
    assert NetworkSpec.from_json(old) == expected
    assert expected.to_json() == {**old, "hidden_sizes": (64, 64)}
    row = {"op": "env_step", "env": {"id": "E", "kwargs_json": "{}"}, "num_envs": 8}
    assert Task.from_json(row).env == EnvSpec(id="E")
    assert EnvSpec(id="E").to_json() == row["env"]


def test_a_copy_over_another_buffer_computes_the_same_and_shares_nothing():
    network = ActorCritic(spec_of(SMALL), seed=0)
    copy = network.over(network.flat.clone())
    rows = torch.randint(256, (5, SMALL.size), dtype=torch.uint8)
    assert torch.equal(copy.policy(rows), network.policy(rows))
    copy.flat.zero_()
    assert network.policy(rows).abs().sum() > 0
    assert isinstance(copy.encoder, nn.Module)
