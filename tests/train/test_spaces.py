"""Runs on every kind of space, from the first reset to a policy that is loaded again."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from autoplace.train import evaluate, load_policy, train
from tests.envs.catch import Catch
from tests.envs.toys import Spaces, register
from tests.train.plans import Listener, make_plan


class Checked(Spaces):
    """Refuses actions that are not in its space; an episode is 7 steps."""

    steps = 0

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        observation, reward, *_ = super().step(action)
        return observation, reward, False, self.steps % 7 == 0, {}


OBSERVATIONS = {
    "multi-discrete": spaces.MultiDiscrete([[1, 2], [3, 4]]),
    "multi-binary": spaces.MultiBinary(4),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float64))),
    "image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
    "dict": spaces.Dict(
        rgb=spaces.Box(0, 255, (36, 36, 3), np.uint8),
        depth=spaces.Box(0, 255, (8, 8), np.uint8),
        compass=spaces.Box(-180, 180, (1,), np.float32),
        inner=spaces.Dict(gear=spaces.Discrete(5)),
    ),
}
ACTIONS = {
    "multi-discrete": spaces.MultiDiscrete([[2, 3], [2, 4]], start=[[0, 1], [0, 0]]),
    "multi-binary": spaces.MultiBinary([2, 2]),
    "box": spaces.Box(0.0, 5.0, (2, 2), np.float64),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_a_run_on_any_observations_is_saved_and_its_policy_plays(name, tmp_path):
    # Symptoms: Tuple, Dict with images and vectors, 2-D MultiDiscrete: refused or crashing inside.
    env = register("Seen", lambda: Checked(OBSERVATIONS[name], spaces.Discrete(2)))
    listener = Listener()
    train(make_plan(env), total_steps=64, run_dir=tmp_path, callbacks=[listener])
    policy = load_policy(tmp_path)
    assert torch.equal(policy.network.flat, listener.flat)
    assert listener.flat.isfinite().all() and policy.env_steps == 64
    assert evaluate(policy, episodes=2).lengths == (7, 7)
    observation = OBSERVATIONS[name].sample()
    assert policy(observation) in (0, 1)


@pytest.mark.parametrize("name", ACTIONS)
def test_a_run_with_any_actions_gives_the_environment_what_is_in_its_space(name, tmp_path):
    # Symptoms: actions out of bounds crash the environment; predict() scales them differently.
    space = ACTIONS[name]
    env = register("Acted", lambda: Checked(spaces.Box(-1, 1, (3,)), space))
    train(make_plan(env), total_steps=64, run_dir=tmp_path)
    policy = load_policy(tmp_path)
    observation = np.zeros(3, np.float32)
    for deterministic in (True, False):
        assert space.contains(policy(observation, deterministic=deterministic))
    stack = policy(np.zeros((5, 3), np.float32), deterministic=False)
    assert stack.shape == (5, *space.shape)


def test_actions_beyond_the_bounds_of_pendulum_are_clipped_as_in_training(tmp_path):
    # Symptom: a loaded policy's actions are wrong where limits are not -1 and 1.
    train(make_plan("Pendulum-v1"), total_steps=32, run_dir=tmp_path)
    policy = load_policy(tmp_path)
    with torch.no_grad():
        policy.network.actor_layers[-1][1].fill_(9.0)
    observation = gym.make("Pendulum-v1").reset(seed=0)[0]
    assert policy(observation).tolist() == [2.0]
    assert policy.act(observation[None])[0, 0] > 2.0


def test_the_same_seed_repeats_a_run_on_images_to_the_bit():
    flats = []
    for seed in (3, 3, 4):
        listener = Listener()
        train(make_plan(register("Catch", Catch)), total_steps=64, seed=seed, callbacks=[listener])
        flats.append(listener.flat)
    assert torch.equal(flats[0], flats[1]) and not torch.equal(flats[0], flats[2])


@pytest.mark.parametrize("seed", [0])
def test_a_loaded_policy_scores_what_the_trained_one_does_statistics_frozen(seed, tmp_path):
    # Symptom: a loaded policy scores far below training: statistics not saved, or not frozen.
    space = spaces.Dict(
        pixels=spaces.Box(0, 255, (8, 8, 1), np.uint8), speed=spaces.Box(-50, 50, (3,))
    )
    env = register("Scored", lambda: Checked(space, spaces.Discrete(2)))
    listener = Listener()
    train(make_plan(env), total_steps=96, run_dir=tmp_path, callbacks=[listener])
    trained, loaded = listener.policy, load_policy(tmp_path)
    assert loaded.network.observation_count.item() == 96
    assert loaded.network.observation_mean.abs().sum() > 0
    before = loaded.network.flat.clone()
    first = evaluate(trained, episodes=3, seed=seed)
    second = evaluate(loaded, episodes=3, seed=seed)
    assert first.returns == second.returns
    assert torch.equal(loaded.network.flat, before)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_game_on_images_of_40_pixels_is_learned_by_the_network_of_mnih(seed):
    env = register("CatchLarge", lambda: Catch(scale=4))
    listener = Listener()
    plan = make_plan(
        env, num_envs=8, rollout_steps=64, rows=128, epochs=4, hidden_sizes=(32,),
        learning_rate=1e-3, normalize_rewards=False,
    )  # fmt: skip
    assert plan.workload.network.images[0].encoder == "NatureCNN"
    train(plan, total_steps=60_000, seed=seed, callbacks=[listener])
    returns = [report.mean_return for report in listener.reports if report.mean_return is not None]
    early, late = returns[2], returns[-1]
    assert early < -0.1 and late > 0.8, (early, late)


@pytest.mark.slow
@pytest.mark.parametrize("channels_first", [False, True])
def test_a_game_on_images_is_learned(channels_first):
    env = register("CatchLearned", lambda: Catch(channels_first))
    listener = Listener()
    plan = make_plan(
        env, num_envs=8, rollout_steps=64, rows=128, epochs=4, hidden_sizes=(32,),
        learning_rate=1e-3, normalize_rewards=False,
    )  # fmt: skip
    train(plan, total_steps=60_000, seed=0, callbacks=[listener])
    returns = [report.mean_return for report in listener.reports if report.mean_return is not None]
    early, late = returns[2], returns[-1]
    assert early < -0.1 and late > 0.8, (early, late)
