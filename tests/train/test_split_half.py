"""Split-half sampling gives the rollouts, and the learning, of stepping all together."""

from __future__ import annotations

import dataclasses
import functools

import gymnasium as gym
import numpy as np
import pytest
import torch

from autoplace.envs import ProcessVectorEnv, inspect_env, make_vector_env
from autoplace.envs.episodes import EpisodeTracker
from autoplace.errors import UsageError
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.rollout import Rollout
from autoplace.train import train
from autoplace.train.interrupt import StopRequest, StopRequested
from autoplace.train.sampler import HostSampler
from autoplace.train.stage_timer import StageTimer
from autoplace.workload import EnvSpec
from tests.envs.toys import register
from tests.train.plans import Listener, make_plan

STEPS, NUM_ENVS = 12, 5


class Numbered(gym.Env):
    """Observes (its number, episode, step), pays 100 x number + step + action / 10.

    Episode e of number n is truncated after n + e + 2 steps. It knows its number from its seed.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.number = self.episode = self.steps = 0

    def observation(self):
        return np.array([self.number, self.episode, self.steps], np.float32)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.number, self.episode = seed, -1
        self.episode, self.steps = self.episode + 1, 0
        return self.observation(), {}

    def step(self, action):
        self.steps += 1
        over = self.steps == self.number + self.episode + 2
        reward = 100.0 * self.number + self.steps + action / 10
        return self.observation(), reward, False, over, {}


def grouped(plan, num_groups, backend="process"):
    placement = dataclasses.replace(
        plan.placement, env_backend=backend, num_workers=2, num_groups=num_groups
    )
    chosen = dataclasses.replace(plan.chosen, placement=placement)
    return dataclasses.replace(plan, chosen=chosen, candidates=(chosen,))


def sampler_over(num_groups, stop=None):
    """A sampler of two workers (threads), and the rollout that it fills."""
    env = register("Numbered", Numbered)
    plan = make_plan(env, num_envs=NUM_ENVS, rollout_steps=STEPS)
    envs = ProcessVectorEnv(
        inspect_env(EnvSpec(id=env)),
        NUM_ENVS,
        num_workers=2,
        num_groups=num_groups,
        use_threads=True,
    )
    envs.reset(range(NUM_ENVS))
    episodes = EpisodeTracker(NUM_ENVS)
    rollout = Rollout(plan.workload.network, rollout_steps=STEPS, num_envs=NUM_ENVS)
    sampler = HostSampler(
        envs,
        rollout,
        threads=1,
        episodes=episodes,
        timer=StageTimer(),
        stop=stop or StopRequest(),
    )
    policy_step = PolicyStep(ActorCritic(plan.workload.network))
    return functools.partial(sampler.sample, policy_step), rollout, envs, episodes


def draw_noise():
    return torch.rand((STEPS, NUM_ENVS, 2), generator=torch.Generator().manual_seed(0))


def test_every_row_is_where_it_is_without_halves_to_the_bit():
    rollouts, episodes, chunks = [], [], []
    for num_groups in (1, 2):
        sample, rollout, envs, episodes_of = sampler_over(num_groups)
        seen = []
        for _ in range(2):  # the second goes on where the first ended
            sample(
                draw_noise(),
                chunk_steps=5,
                on_chunk=lambda a, b, seen=seen, rollout=rollout: seen.append(
                    (a, b, rollout.outcomes[a:b].clone(), rollout.observations[a:b].clone())
                ),
            )
        rollouts.append(rollout)
        episodes.append((episodes_of.recent, episodes_of.longest_running))
        chunks.append(seen)
        envs.close()
    one, two = rollouts
    for name in ("observations", "actions", "outcomes", "final_index", "final_observations"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert one.valid_index is None and two.valid_index is None
    assert episodes[0] == episodes[1] and len(episodes[0][0]) > NUM_ENVS
    assert [c[:2] for c in chunks[1]] == 2 * [(0, 5), (5, 10), (10, 12)]
    for a, b in zip(*chunks, strict=True):  # each chunk is complete when it is handed over
        assert torch.equal(a[2], b[2]) and torch.equal(a[3], b[3])
    # Rows are those of their environment, and answer to its own action.
    numbers = torch.arange(NUM_ENVS).float()
    assert torch.equal(two.observations[:, :, 0], numbers.expand(STEPS + 1, -1))
    paid = 100 * numbers + two.observations[:-1, :, 2] + 1 + two.actions / 10
    torch.testing.assert_close(two.rewards, paid)
    assert two.final_index.tolist() == two.truncated.reshape(-1).nonzero().squeeze(1).tolist()
    assert torch.equal(two.final_observations[:, 0], (two.final_index % NUM_ENVS).float())


def test_a_rollout_that_was_interrupted_leaves_no_step_behind():
    stop = StopRequest()
    sample, rollout, envs, _ = sampler_over(2, stop)
    stop.requested = True
    with pytest.raises(StopRequested):
        sample(draw_noise())
    stop.requested = False
    envs.step_async(np.zeros(2, np.int64), 0)  # as where it was stopped amid
    sample(draw_noise())
    numbers = torch.arange(NUM_ENVS).float()
    assert torch.equal(rollout.observations[:, :, 0], numbers.expand(STEPS + 1, -1))
    assert rollout.observations[0, :, 2].tolist() == [1, 1, 0, 0, 0]
    envs.close()


@pytest.mark.parametrize("scheme", ["cpu", "double-buffer"])
def test_weights_are_those_of_sync_to_the_bit(scheme):
    """With discrete actions: the policy's numbers differ in their last bits at most."""
    weights = []
    for num_groups, backend in ((1, "sync"), (2, "process")):
        listener = Listener()
        plan = make_plan(num_envs=4, scheme=scheme, normalize_rewards=True)
        train(grouped(plan, num_groups, backend), total_steps=256, callbacks=[listener])
        weights.append(listener.flat)
    assert torch.equal(*weights)


def test_halves_need_workers_and_two_environments():
    description = inspect_env(EnvSpec(id="CartPole-v1"))
    with pytest.raises(UsageError, match=r"--num-groups 2 needs .* --env-backend sync: use proc"):
        make_vector_env(description, num_envs=4, num_groups=2)
    with pytest.raises(UsageError, match="1 environments cannot be stepped in 2 groups"):
        make_vector_env(description, num_envs=1, backend="process", num_workers=1, num_groups=2)
