"""The trainer's steps by the engine of the network that they are for."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from autoplace.engines import FP32, NUMPY
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.numpy_policy_step import NumpyPolicyStep
from autoplace.ppo.numpy_update import NumpyUpdater
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.update import Updater
from autoplace.workload import Hyperparameters

Act = Callable[[Tensor, Tensor, Rollout, int], Tensor]


def make_policy_step(network: ActorCritic) -> Act:
    """What samples actions, see :meth:`autoplace.ppo.policy_step.PolicyStep.__call__`."""
    return NumpyPolicyStep(network) if network.engine == NUMPY else PolicyStep(network)


def make_updater(
    network: ActorCritic,
    hyperparameters: Hyperparameters,
    *,
    minibatch_rows: int,
    precision: str = FP32,
    accumulation_steps: int = 1,
) -> Updater:
    """What takes gradient steps, see :class:`autoplace.ppo.update.Updater`."""
    if network.engine == NUMPY:
        assert (precision, accumulation_steps) == (FP32, 1)
        return NumpyUpdater(network, hyperparameters, minibatch_rows=minibatch_rows)
    return Updater(
        network,
        hyperparameters,
        minibatch_rows=minibatch_rows,
        precision=precision,
        accumulation_steps=accumulation_steps,
    )
