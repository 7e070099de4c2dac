"""All randomness of a run but the environments', drawn on the host.

Each iteration's generators follow from the run's seed and the iteration's number alone. So every
scheme draws the same numbers, and a resumed run goes on with those it would have drawn.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from autoplace.clock import now
from autoplace.ppo.distribution import draw_noise
from autoplace.ppo.update import draw_permutations
from autoplace.workload import Workload

_NOISE, _ORDER = 0, 1
_AT_ONCE = 64


class Draws:
    """What chance contributes to each iteration.

    Attributes:
        spent_s: seconds that drawing has taken so far.
    """

    def __init__(self, workload: Workload, seed: int, *, minibatch_rows: int = 1) -> None:
        """Draw for ``workload``, in minibatches of so many rows, by the run's ``seed``."""
        self._workload = workload
        self._seed = seed
        self._is_whole = minibatch_rows >= workload.hyperparameters.rollout_rows
        self.spent_s = 0.0

    def noise(self, iteration: int) -> Tensor:
        """``[T, N, A]`` for the sampled actions."""
        start_s = now()
        hyper, network = self._workload.hyperparameters, self._workload.network
        shape = (hyper.rollout_steps, hyper.num_envs, network.action_size)
        generator = self._generator(iteration, _NOISE)
        drawn = draw_noise(shape, continuous=network.continuous, generator=generator)
        self.spent_s += now() - start_s
        return drawn

    def permutations(self, iteration: int) -> Tensor:
        """``[epochs, T N]`` for the minibatches; all the same where one of them holds all rows."""
        start_s = now()
        hyper = self._workload.hyperparameters
        generator = self._generator(iteration, _ORDER)
        different = 1 if self._is_whole else hyper.epochs
        orders = draw_permutations(hyper.rollout_rows, different, generator)
        self.spent_s += now() - start_s
        return orders.expand(hyper.epochs, -1)

    def _generator(self, iteration: int, purpose: int) -> torch.Generator:
        block, place = divmod(iteration, _AT_ONCE)
        return torch.Generator().manual_seed(_generator_seeds(self._seed, purpose, block)[place])


@functools.lru_cache(maxsize=4)
def _generator_seeds(seed: int, purpose: int, block: int) -> list[int]:
    """Of ``_AT_ONCE`` iterations: with cold caches, a single one takes several times as long."""
    first = block * _AT_ONCE
    states = [
        np.random.SeedSequence((seed, iteration, purpose)).generate_state(1, np.uint64)[0]
        for iteration in range(first, first + _AT_ONCE)
    ]
    return [int(state) >> 1 for state in states]  # torch takes 63 bits without a sign
