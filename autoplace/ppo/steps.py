"""The trainer's steps by the engine of the network that they are for."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from autoplace.engines import NUMPY
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
    network: ActorCritic, hyperparameters: Hyperparameters, *, minibatch_rows: int
) -> Updater:
    """What takes gradient steps."""
    kind = NumpyUpdater if network.engine == NUMPY else Updater
    return kind(network, hyperparameters, minibatch_rows=minibatch_rows)
