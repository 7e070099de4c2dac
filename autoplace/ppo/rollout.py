"""What one rollout recorded, time-major, preallocated, wherever it is needed.

Symbols: ``T`` vector steps, ``N`` environments, ``D`` numbers in an observation, ``A`` action
dimensions, ``F`` episodes that were truncated in this rollout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.device_names import CPU, is_accelerator
from autoplace.workload import FLOAT_BYTES, NetworkSpec

_INDEX_BYTES = 8


class Rollout:
    """The rows of one rollout on one device (page-locked where a learner elsewhere reads them).

    Row ``t`` of ``observations`` is what the policy saw before action ``t``; row ``T`` is what the
    next rollout starts from. Log-probabilities and values are not kept: both follow from these rows
    and the weights that acted, and one batched pass computes them far faster than ``T`` small ones.

    Attributes:
        observations: ``[T + 1, N, D]`` raw, float32; with images uint8.
        actions: ``[T, N]`` or ``[T, N, H]`` int64, or ``[T, N, A]`` float32 as sampled (never
            clipped).
        outcomes: ``[T, 3, N]`` float32: rewards, terminated and truncated, one tensor so that they
            cross to a device in one copy.
        final_index: ``[F]`` int64, ``t N + env`` of each episode that was truncated.
        final_observations: ``[F, D]``, the observation in which each of those ended.
        valid_index: ``[V]`` int64, the rows ``t N + env`` that are transitions; ``None`` where all
            are. Some environments spend a step on each reset, and nothing is learned from those.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        *,
        rollout_steps: int,
        num_envs: int,
        device: str = CPU,
        pinned_for: str = CPU,
        tensors: tuple[Tensor, Tensor, Tensor] | None = None,
        shared: bool = False,
    ) -> None:
        """Allocate on ``device``; on the host, page-locked for copies to ``pinned_for``.

        ``shared`` takes host memory that other processes can see; ``tensors`` (observations,
        actions, outcomes) are used as they are, instead of new ones.
        """
        columns = (spec.action_columns,)
        action_shape = columns if spec.continuous or spec.action_heads else ()
        observation_dtype: torch.dtype = getattr(torch, spec.observation_dtype)
        action_dtype = torch.float32 if spec.continuous else torch.int64

        def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
            if is_accelerator(device):
                return torch.empty(shape, dtype=dtype, device=device)
            allocate = devices.shared_empty if shared else devices.host_empty
            return allocate(shape, dtype, pinned_for=pinned_for)

        self.spec = spec
        self.rollout_steps = rollout_steps
        self.num_envs = num_envs
        self.observations, self.actions, self.outcomes = tensors or (
            empty((rollout_steps + 1, num_envs, spec.observation_size), observation_dtype),
            empty((rollout_steps, num_envs, *action_shape), action_dtype),
            empty((rollout_steps, 3, num_envs)),
        )
        self.final_index = torch.empty((0,), dtype=torch.int64, device=device)
        self.final_observations = torch.empty((0, spec.observation_size), device=device)
        self.valid_index: Tensor | None = None
        # Views of single rows, made once: indexing costs as much as a small kernel.
        self.observation_rows = self.observations.unbind(0)
        self.action_rows = self.actions.unbind(0)

    @property
    def rewards(self) -> Tensor:
        """``[T, N]`` float32."""
        return self.outcomes[:, 0]

    @property
    def terminated(self) -> Tensor:
        """``[T, N]`` float32, 1 where the episode ended in a terminal state."""
        return self.outcomes[:, 1]

    @property
    def truncated(self) -> Tensor:
        """``[T, N]`` float32, 1 where the episode was cut off."""
        return self.outcomes[:, 2]

    @property
    def num_rows(self) -> int:
        """Env steps recorded: ``T N``."""
        return self.rollout_steps * self.num_envs

    @property
    def num_transitions(self) -> int:
        """Env steps to learn from: all rows, or those that are transitions."""
        return self.num_rows if self.valid_index is None else int(self.valid_index.shape[0])

    def columns(self, part: slice) -> Rollout:
        """The tensors of some environments, as views of these."""
        tensors = self.observations[:, part], self.actions[:, part], self.outcomes[:, :, part]
        return Rollout(
            self.spec,
            rollout_steps=self.rollout_steps,
            num_envs=tensors[1].shape[1],
            tensors=tensors,
        )

    def copy_steps_from(self, source: Rollout, start: int, stop: int) -> None:
        """Queue copies of vector steps ``start``..``stop`` of another rollout, without waiting."""
        here = slice(start, stop)
        self.observations[here].copy_(source.observations[here], non_blocking=True)
        self.actions[here].copy_(source.actions[here], non_blocking=True)
        self.outcomes[here].copy_(source.outcomes[here], non_blocking=True)


def rollout_bytes(spec: NetworkSpec, *, rollout_steps: int, num_envs: int) -> int:
    """Bytes that one rollout holds, final observations (rarely many) left out."""
    action_bytes = spec.action_columns * (FLOAT_BYTES if spec.continuous else _INDEX_BYTES)
    observations = (rollout_steps + 1) * num_envs * spec.observation_bytes
    return observations + rollout_steps * num_envs * (action_bytes + 3 * FLOAT_BYTES)
