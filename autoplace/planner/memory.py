"""What a placement needs of host and device memory, estimated before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from autoplace.planner.plan import Placement
from autoplace.planner.schemes.work import rollout_bytes_per_row
from autoplace.workload import FLOAT_BYTES, Workload

# Share of the free memory that a plan may use: the rest is for what an estimate cannot see
# (allocator slack, library workspaces, the environments themselves).
USABLE_FRACTION = 0.8
# What a process that has imported torch keeps to itself; its libraries are shared.
_PROCESS_BYTES = 160 * 2**20
# Fields of a placement that memory depends on.
FIELDS = ("num_envs", "minibatch_rows", "learn_device", "num_workers", "max_policy_lag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Memory that a run may use.

    Attributes:
        host_bytes: free memory of the host.
        device_bytes: free memory of the accelerator; ``None`` where unknown.
    """

    host_bytes: int
    device_bytes: int | None = None


def estimate_bytes(workload: Workload, placement: Placement) -> dict[str, int]:
    """Bytes that a run needs, by device: rollout, weights with Adam's state, one minibatch."""
    rows = workload.hyperparameters.rollout_steps * placement.num_envs
    rollout = rows * sum(rollout_bytes_per_row(workload).values())
    # Noise; the batch's own matrix beside the rollout; one epoch's permutation.
    network = workload.network
    width = (0 if network.images else network.observation_size) + network.action_columns + 3
    rollout += rows * (FLOAT_BYTES * (network.action_size + 2 * width) + 8)
    weights = FLOAT_BYTES * network.num_parameters
    outputs = network.activation_size
    if network.images:  # as floats, where they are read
        outputs += network.observation_size
    # Each activation is kept for the backward pass beside its gradient; rows are gathered.
    minibatch = placement.minibatch_rows * (
        FLOAT_BYTES * 3 * outputs + sum(rollout_bytes_per_row(workload).values())
    )
    learner = rollout + 4 * weights + minibatch
    # Where sampling and learning overlap, there is a rollout and weights for every step of the lag,
    # and the learner's state twice.
    lag = placement.max_policy_lag
    processes = _PROCESS_BYTES * (placement.num_workers + min(lag, 1))
    overlap = lag * (rollout + weights) + 4 * min(lag, 1) * weights + processes
    if placement.learn_device == "cpu":
        return {"cpu": learner + overlap}
    # The host keeps its side of everything that crosses.
    return {placement.learn_device: learner, "cpu": rollout + weights + overlap}


def too_large(workload: Workload, placement: Placement, limits: Limits | None) -> str | None:
    """Why the placement does not fit into the limits, or ``None``."""
    if limits is None:
        return None
    for device, nbytes in estimate_bytes(workload, placement).items():
        limit = limits.host_bytes if device == "cpu" else limits.device_bytes
        if limit is not None and nbytes > USABLE_FRACTION * limit:
            return (
                f"needs about {nbytes / 2**30:.2f} GiB on {device}, of which "
                f"{USABLE_FRACTION * limit / 2**30:.2f} GiB may be used"
            )
    return None
