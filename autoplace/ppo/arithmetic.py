"""Gradient steps in less than float32: mixed precision, and the scaling that float16 needs.

Only the passes through the network compute in 16 bits. Its weights, the loss, the gradients and the
optimiser stay float32 (Micikevicius et al. 2018, section 3).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from autoplace.device import fast_matmuls
from autoplace.ppo.adam import Adam
from autoplace.ppo.network import ActorCritic

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Arithmetic:
    """How the passes of a gradient step compute, see :data:`autoplace.engines.PRECISIONS`."""

    def __init__(self, precision: str, device_type: str) -> None:
        self._dtype = _TYPES.get(precision)
        self._is_tf32 = precision == "tf32"
        self._device_type = device_type
        # float16 ends at 65,504 and begins at 6e-8: gradients are scaled into that range.
        self._scaler = torch.amp.GradScaler(device_type) if precision == "fp16" else None

    def matmuls(self) -> AbstractContextManager[None]:
        """What forward and backward passes have to run inside of."""
        return fast_matmuls() if self._is_tf32 else nullcontext()

    def passes(self, network: ActorCritic, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Policy outputs and values in float32, however they were computed."""
        if self._dtype is None:
            return network.both(observations)
        with torch.autocast(self._device_type, dtype=self._dtype):
            outputs, values = network.both(observations)
        return outputs.float(), values.float()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to go backward from."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: Adam) -> None:
        """Bring the gradients back to their size; notes whether one overflowed."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)  # type: ignore[arg-type]

    def norm_to_report(self, norm: Tensor) -> Tensor:
        """A gradient norm for the metrics: 0 where the step is left out for an overflow."""
        return norm if self._scaler is None else torch.where(norm.isfinite(), norm, 0.0)

    def step(self, optimizer: Adam) -> None:
        """Step, or leave the weights as they are where a gradient overflowed."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)  # type: ignore[arg-type]
            self._scaler.update()
