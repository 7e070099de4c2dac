import math

import pytest
import torch

from autoplace.ppo.reward_normalizer import RewardNormalizer


def test_discounted_returns_run_on_and_restart_worked_by_hand():
    # gamma 0.5, one environment, rewards 1, 2, 4, the episode ends after the second.
    # R = 1, then 2 + 0.5 * 1 = 2.5, then 4: mean 2.5, variance (2.25 + 0 + 2.25) / 3 = 1.5
    normalizer = RewardNormalizer(num_envs=1, gamma=0.5)
    rewards = torch.tensor([[1.0], [2.0], [4.0]])
    got = normalizer.normalize(rewards, torch.tensor([[0.0], [1.0], [0.0]]))
    assert got.squeeze(1).tolist() == pytest.approx([x / math.sqrt(1.5) for x in (1, 2, 4)])
    # The next rollout goes on from R = 4: its first return is 1 + 0.5 * 4 = 3.
    # All returns: 1, 2.5, 4, 3 with mean 2.625 and squares 1 + 6.25 + 16 + 9 = 32.25.
    variance = 32.25 / 4 - 2.625**2
    got = normalizer.normalize(torch.tensor([[1.0]]), torch.tensor([[0.0]]))
    assert got.item() == pytest.approx(1 / math.sqrt(variance), rel=1e-5)


def test_statistics_stay_when_episodes_are_forgotten():
    normalizer = RewardNormalizer(num_envs=2, gamma=0.9)
    normalizer.normalize(torch.randn(8, 2), torch.zeros(8, 2))
    before = normalizer.state.clone()
    normalizer.forget_episodes()
    assert normalizer.state[:2].tolist() == [0, 0]
    assert torch.equal(normalizer.state[2:], before[2:])


def test_scaled_rewards_are_clamped():
    normalizer = RewardNormalizer(num_envs=1, gamma=0.0)
    rewards = torch.zeros(1000, 1)
    rewards[500] = 1.0
    assert normalizer.normalize(rewards, torch.zeros(1000, 1)).max().item() == 10.0
