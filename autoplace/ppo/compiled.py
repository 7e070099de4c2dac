"""Policy steps and gradient steps as ``torch.compile`` makes them.

What is compiled are pure functions of a network and its rows, once for each shape: choosing
actions; and the passes and the loss of a gradient step with what autograd makes of them. Gathering
rows, clipping and Adam stay as they are.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoplace.engines import COMPILE
from autoplace.ppo.batch import Batch
from autoplace.ppo.engine_updater import EngineUpdater
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.policy_step import choose_actions
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.update import minibatch_losses


class CompiledPolicyStep:
    """What the eager ``PolicyStep`` does, the choice of actions compiled."""

    def __init__(self, network: ActorCritic) -> None:
        self._network = network

    @torch.inference_mode()
    def __call__(self, observations: Tensor, noise: Tensor, rollout: Rollout, t: int) -> Tensor:
        """Write row ``t`` of ``rollout`` and return its actions."""
        recorded = rollout.observation_rows[t].copy_(observations)
        choose = _compiled(choose_actions, self._network.spec, len(recorded))
        return rollout.action_rows[t].copy_(choose(self._network, recorded, noise))


class CompiledUpdater(EngineUpdater):
    """The optimiser and the gradient steps of one network, their passes and loss compiled."""

    engine = COMPILE

    def engine_step(self, batch: Batch, index: Tensor, *, measure: bool = False) -> None:
        """One gradient step on the rows ``index``, as many as a whole minibatch has."""
        self._torch_step(batch, index, measure=measure, losses=self._compiled_losses)

    def _compiled_losses(
        self,
        *args: Any,  # noqa: ANN401 - those of minibatch_losses
        measure: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        # With its terms each time: they cost little, and a second variant seconds to compile.
        losses = _compiled(minibatch_losses, self.network.spec, self.minibatch_rows)
        total, terms = losses(*args, measure=True)
        return total, terms if measure else ()


@functools.lru_cache(maxsize=256)
def _compiled(function: Callable[..., Any], *key: object) -> Callable[..., Any]:
    """``function``, compiled for whatever differs by ``key``.

    Torch keeps what it has compiled with a function's code, and only a few variants of each; so
    each key gets a copy of the code.
    """
    assert isinstance(function, types.FunctionType)
    own = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, dynamic=False)
