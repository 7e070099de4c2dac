"""What the end of an episode is worth to the step before it, in a real environment."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from autoplace.envs import inspect_env, make_vector_env
from autoplace.envs.episodes import EpisodeTracker
from autoplace.ppo.batch import make_batch
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.rollout import Rollout
from autoplace.train.interrupt import StopRequest
from autoplace.train.sampler import HostSampler
from autoplace.train.stage_timer import StageTimer
from autoplace.workload import EnvSpec, Hyperparameters

GAMMA, GAE_LAMBDA = 0.9, 0.8


def sampled(spec, steps, backend, seed):
    """A rollout of one environment, the network that acted, and what is learned from it."""
    description = inspect_env(spec)
    network = ActorCritic(description.network((8,)), seed=1)
    envs = make_vector_env(description, num_envs=1, backend=backend, num_workers=1)
    envs.reset([seed])
    rollout = Rollout(network.spec, rollout_steps=steps, num_envs=1)
    sampler = HostSampler(
        envs,
        rollout,
        threads=1,
        episodes=EpisodeTracker(1),
        timer=StageTimer(),
        stop=StopRequest(),
    )
    noise = torch.randn((steps, 1, network.spec.action_size), generator=torch.manual_seed(0))
    sampler.sample(PolicyStep(network), noise)
    envs.close()
    hyper = Hyperparameters(num_envs=1, rollout_steps=steps, gamma=GAMMA, gae_lambda=GAE_LAMBDA)
    batch = make_batch(network, rollout, hyper)
    returns = batch.split(batch.rows)[4]
    return rollout, network, returns


def value(network, observation):
    with torch.no_grad():
        return network.value(torch.as_tensor(observation, dtype=torch.float32).view(1, -1))[0]


@pytest.mark.parametrize("backend", ["sync", "process"])
def test_pendulums_step_200_is_worth_its_reward_and_where_the_time_limit_found_it(backend):
    """It never terminates: every end is the time limit's, and the state goes on being worth."""
    rollout, network, returns = sampled(EnvSpec(id="Pendulum-v1"), 201, backend, seed=3)
    lone = gym.make("Pendulum-v1")
    lone.reset(seed=3)
    actions = rollout.actions[:, 0].clamp(-2.0, 2.0)
    for t in range(200):
        final, reward, terminated, truncated, _ = lone.step(actions[t].numpy())
        assert not terminated and truncated == (t == 199)
    assert rollout.truncated[:, 0].nonzero().tolist() == [[199]] and not rollout.terminated.any()
    # The trace is cut there, so the target of step 200 holds nothing of the next episode...
    target = reward + GAMMA * value(network, final)
    torch.testing.assert_close(returns[199], target.float(), atol=1e-5, rtol=1e-5)
    # ...which begins elsewhere.
    assert not np.allclose(rollout.observations[200, 0].numpy(), final, atol=1e-3)
    before = value(network, rollout.observations[199, 0])
    error = returns[199] - before
    target = rollout.rewards[198, 0] + GAMMA * before + GAMMA * GAE_LAMBDA * error
    torch.testing.assert_close(returns[198], target, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("limit", [5, 500])
def test_cartpoles_end_is_worth_nothing_where_it_fell_and_its_state_where_time_was_up(limit):
    spec = EnvSpec.make("CartPole-v1", {"max_episode_steps": limit})
    rollout, network, returns = sampled(spec, 64, "sync", seed=0)
    ends = (rollout.terminated + rollout.truncated)[:, 0].nonzero().squeeze(1).tolist()
    fell = rollout.terminated[:, 0].nonzero().squeeze(1).tolist()
    assert ends and (fell == [] if limit == 5 else fell == ends)
    for position, t in enumerate(ends):
        expected = torch.tensor(1.0)
        if limit == 5:
            expected = expected + GAMMA * value(network, rollout.final_observations[position])
        torch.testing.assert_close(returns[t], expected, atol=1e-5, rtol=1e-5)
