"""Adam of one flat parameter: torch's own, and its fused kernel without the rest of torch.optim.

Making one of torch's optimisers imports its compiler, which takes a second and 90 MB.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor

from autoplace.device_names import CPU

ADAM_EPS = 1e-5  # as in the original PPO code; Adam's default of 1e-8 learns less stably
BETA_1, BETA_2 = 0.9, 0.999  # torch's defaults


class Adam(Protocol):
    """What an updater uses of its optimiser, by torch's names."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    def step(self) -> Any:  # noqa: ANN401 - torch's may return a loss
        """Move the parameter by its gradient."""
        ...


class HostAdam:
    """Adam on the CPU (Kingma and Ba 2015, algorithm 1), to the bit what torch's fused one does."""

    def __init__(self, parameter: Tensor, learning_rate: float) -> None:
        """Optimise ``parameter``; its count of steps and moments may be given by ``state``."""
        self.param_groups: list[dict[str, Any]] = [
            {"params": [parameter], "lr": learning_rate, "fused": True}
        ]
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._parameter = parameter

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameter by its gradient."""
        parameter, gradient = self._parameter, self._parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        torch._fused_adam_(
            [parameter],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            lr=self.param_groups[0]["lr"],
            beta1=BETA_1,
            beta2=BETA_2,
            weight_decay=0.0,
            eps=ADAM_EPS,
            amsgrad=False,
            maximize=False,
        )


def make_adam(parameter: torch.nn.Parameter, learning_rate: float) -> Adam:
    """Adam in one kernel where torch has that for the device, else its plain form."""
    if parameter.device.type == CPU:
        return HostAdam(parameter, learning_rate)
    try:
        return torch.optim.Adam([parameter], lr=learning_rate, eps=ADAM_EPS, fused=True)
    except RuntimeError:  # torch names the devices that it has a fused kernel for
        return torch.optim.Adam([parameter], lr=learning_rate, eps=ADAM_EPS)
