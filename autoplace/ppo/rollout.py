"""What one rollout recorded, time-major, preallocated, wherever it is needed.

Symbols: ``T`` vector steps, ``N`` environments, ``D`` numbers in an observation, ``A`` action
dimensions, ``F`` episodes that were truncated in this rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap

import numpy as np
import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.device_names import CPU, is_accelerator
from autoplace.shared_array import SharedArray
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
        shared: the memory behind observations, actions and outcomes, where other processes see it.
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
        shared: Sequence[SharedArray] = (),
    ) -> None:
        """Allocate on ``device``; on the host, page-locked for copies to ``pinned_for``.

        ``shared`` or ``tensors`` (observations, actions, outcomes) are used as they are, instead of
        new ones; see :func:`shared_memory`.
        """
        shapes = _shapes(spec, rollout_steps, num_envs)

        def empty(shape: tuple[int, ...], dtype: str) -> Tensor:
            kind: torch.dtype = getattr(torch, dtype)
            if is_accelerator(device):
                return torch.empty(shape, dtype=kind, device=device)
            return devices.host_empty(shape, kind, pinned_for=pinned_for)

        self.spec = spec
        self.rollout_steps = rollout_steps
        self.num_envs = num_envs
        self.shared = tuple(shared)
        if tensors is None:
            made = map(devices.shared_tensor, shared) if shared else starmap(empty, shapes)
            observations, actions, outcomes = made
            tensors = observations, actions, outcomes
        self.observations, self.actions, self.outcomes = tensors
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

    def note_ends(
        self, index: np.ndarray, observations: np.ndarray, valid: np.ndarray | None
    ) -> None:
        """Take what a host knows beside the tensors.

        Args:
            index: see ``final_index``.
            observations: see ``final_observations``.
            valid: see ``valid_index``.
        """
        self.final_index = torch.from_numpy(index)
        self.final_observations = torch.from_numpy(observations)
        self.valid_index = None if valid is None else torch.from_numpy(valid)

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


def _shapes(
    spec: NetworkSpec, rollout_steps: int, num_envs: int
) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shape and type of observations, actions and outcomes."""
    columns = (spec.action_columns,) if spec.continuous or spec.action_heads else ()
    return (
        ((rollout_steps + 1, num_envs, spec.observation_size), spec.observation_dtype),
        ((rollout_steps, num_envs, *columns), "float32" if spec.continuous else "int64"),
        ((rollout_steps, 3, num_envs), "float32"),
    )


def shared_memory(
    spec: NetworkSpec, *, rollout_steps: int, num_envs: int, pinned_for: str = CPU
) -> tuple[SharedArray, ...]:
    """Memory for a rollout that other processes can see; see :class:`Rollout`."""
    return tuple(
        devices.shared_array(shape, dtype, pinned_for=pinned_for)
        for shape, dtype in _shapes(spec, rollout_steps, num_envs)
    )


def rollout_bytes(spec: NetworkSpec, *, rollout_steps: int, num_envs: int) -> int:
    """Bytes that one rollout holds, final observations (rarely many) left out."""
    action_bytes = spec.action_columns * (FLOAT_BYTES if spec.continuous else _INDEX_BYTES)
    observations = (rollout_steps + 1) * num_envs * spec.observation_bytes
    return observations + rollout_steps * num_envs * (action_bytes + 3 * FLOAT_BYTES)
