"""A message as a sampler sends it to a learner; the process that reads it need not import torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Order:
    """As much as a sampler tells a learner of a rollout."""

    finals: tuple[np.ndarray, np.ndarray]
    numbers: dict[str, float]


ORDER = Order(
    finals=(np.zeros(1, np.int64), np.zeros((1, 4), np.float32)),
    numbers=dict.fromkeys(("buffer", "version", "learning_rate", "iteration", "sent_s"), 1.0),
)
