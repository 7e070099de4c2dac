"""Rewards divided by the running spread of the discounted return."""

from __future__ import annotations

import torch
from torch import Tensor

from autoplace.device_names import CPU
from autoplace.ppo.gae import scan_backward

REWARD_CLAMP = 10.0
_VARIANCE_FLOOR = 1e-8


class RewardNormalizer:
    """Keeps returns near unit spread whatever the scale of the rewards.

    ``R_t = r_t + gamma (1 - e_{t-1}) R_{t-1}`` runs through each environment's steps, ``e`` marking
    ended episodes and the last ``R`` of a rollout carrying over into the next one. A rollout first
    joins the statistics of ``R`` and is then divided by their standard deviation; rewards are
    not centred, which would change the task (Engstrom et al. 2020, section 3).

    Attributes:
        state: float32 ``[N + 3]``: the carried ``R`` of each environment, then mean, variance and
            count. One tensor, on the learner's device, so that it is checkpointed as one.
    """

    def __init__(self, *, num_envs: int, gamma: float, device: str = CPU) -> None:
        self.gamma = gamma
        self.state = torch.zeros(num_envs + 3, device=device)

    def forget_episodes(self) -> None:
        """Start from fresh episodes, keeping the statistics."""
        self.state[:-3] = 0.0

    @torch.no_grad()
    def normalize(
        self, rewards: Tensor, ended: Tensor, valid_index: Tensor | None = None
    ) -> Tensor:
        """Rewards ``[T, N]`` scaled, after they joined the statistics.

        Args:
            rewards: ``[T, N]``.
            ended: ``[T, N]``, 1 where the episode ended.
            valid_index: the rows ``t N + env`` that are transitions, ``None`` where all are.
        """
        carried, (mean, variance, count) = self.state[:-3], self.state[-3:].unbind(0)
        factors = (1.0 - ended) * self.gamma  # of R_t in R_{t+1}
        addends = rewards.clone()
        addends[0] += carried
        # The recursion runs forwards in time; turned round, it is the backward scan.
        turned = torch.cat((torch.zeros_like(carried).unsqueeze(0), factors[:-1])).flip(0)
        returns = scan_backward(addends.flip(0), turned).flip(0)
        carried.copy_(returns[-1] * factors[-1])

        if valid_index is not None:
            returns = returns.reshape(-1).index_select(0, valid_index)
        rows = returns.numel()
        if rows == 0:
            return rewards
        new_variance, new_mean = torch.var_mean(returns, correction=0)
        total = count + rows
        delta = new_mean - mean
        spread = variance * count + new_variance * rows + delta * delta * (count * rows / total)
        mean += delta * (rows / total)
        variance.copy_(spread / total)
        count.copy_(total)
        scaled = rewards * (variance + _VARIANCE_FLOOR).rsqrt()
        return scaled.clamp_(-REWARD_CLAMP, REWARD_CLAMP)
