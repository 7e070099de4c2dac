"""A rollout that several samplers fill, each in the columns of its own environments.

Symbols: ``T`` vector steps, ``N`` environments, ``W`` parts, ``n = N / W`` environments in each;
part ``w`` is columns ``w n`` to ``(w + 1) n`` of every tensor of the rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autoplace.engines import Verdict
from autoplace.train.stage_timer import Key

if TYPE_CHECKING:
    from autoplace.ppo.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a sampler says once its part is complete; the rest is in the rollout's tensors.

    Attributes:
        iteration: of the rollout, counted from 0.
        version: of the weights that acted in it.
        final_index: ``[F]``, ``t n + env`` of each episode that was truncated.
        final_observations: ``[F, D]``, in which each of those ended.
        valid_index: the rows ``t n + env`` that are transitions, ``None`` where all are.
        stage_s: seconds of the sampler's stages.
        verdicts: on engines that were tried.
    """

    iteration: int
    version: int
    final_index: np.ndarray
    final_observations: np.ndarray
    valid_index: np.ndarray | None = None
    stage_s: dict[Key, float] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()


def merge(parts: Sequence[Part], rollout: Rollout) -> None:
    """Give a rollout what its parts say beside its tensors, in the order of its rows."""
    steps, num_envs = rollout.rollout_steps, rollout.num_envs
    width = num_envs // len(parts)
    index = np.concatenate(
        [
            part.final_index // width * num_envs + w * width + part.final_index % width
            for w, part in enumerate(parts)
        ]
    )
    finals = np.concatenate([part.final_observations for part in parts])
    order = np.argsort(index)
    all_valid: np.ndarray | None = None
    if any(part.valid_index is not None for part in parts):
        valid = np.ones((steps, len(parts), width), np.bool_)
        for w, part in enumerate(parts):
            if part.valid_index is not None:
                own = np.zeros(steps * width, np.bool_)
                own[part.valid_index] = True
                valid[:, w] = own.reshape(steps, width)
        all_valid = np.flatnonzero(valid)
    rollout.note_ends(index[order], finals[order], all_valid)
