"""All randomness of a run but the environments', drawn on the host.

Each iteration's generators follow from the run's seed and the iteration's number alone. So every
scheme draws the same numbers, and a resumed run goes on with those it would have drawn.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from autoplace.ppo.distribution import draw_noise
from autoplace.ppo.update import draw_permutations
from autoplace.workload import Workload

_NOISE, _ORDER = 0, 1


class Draws:
    """What chance contributes to each iteration."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._seed = seed

    def noise(self, iteration: int) -> Tensor:
        """``[T, N, A]`` for the sampled actions."""
        hyper, network = self._workload.hyperparameters, self._workload.network
        shape = (hyper.rollout_steps, hyper.num_envs, network.action_size)
        generator = self._generator(iteration, _NOISE)
        return draw_noise(shape, continuous=network.continuous, generator=generator)

    def permutations(self, iteration: int) -> Tensor:
        """``[epochs, T N]`` for the minibatches."""
        hyper = self._workload.hyperparameters
        generator = self._generator(iteration, _ORDER)
        return draw_permutations(hyper.rollout_rows, hyper.epochs, generator)

    def _generator(self, iteration: int, purpose: int) -> torch.Generator:
        sequence = np.random.SeedSequence((self._seed, iteration, purpose))
        state = int(sequence.generate_state(1, np.uint64)[0])
        return torch.Generator().manual_seed(state >> 1)  # torch takes 63 bits without a sign
