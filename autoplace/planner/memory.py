"""What a placement needs of host and device memory, estimated before anything is allocated."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from autoplace.device_names import CPU
from autoplace.planner.backends import JOINED, SPREAD, num_started
from autoplace.planner.plan import Placement
from autoplace.planner.schemes.work import rollout_bytes_per_row
from autoplace.workload import FLOAT_BYTES, PASS_NUMBERS, PASS_ROWS, NetworkSpec, Workload

# Share of the free memory that a plan may use: the rest is for what an estimate cannot see
# (allocator slack, library workspaces, the environments themselves).
USABLE_FRACTION = 0.8
# What a process keeps to itself that has imported what learning needs, or what acting needs, or
# that steps environments only; measured under Linux (tests/benchmarks/memory_estimates.py).
_LEARNING_BYTES = 200 * 2**20
_ACTING_BYTES = 140 * 2**20
_STEPPING_BYTES = 30 * 2**20
# Weights and moments of a checkpoint: taken, written to memory, and as a whole.
_CHECKPOINT_COPIES = 3 * 3
# Fields of a placement that memory depends on.
FIELDS = (
    "num_envs",
    "minibatch_rows",
    "accumulation_steps",
    "sample_device",
    "learn_device",
    "env_backend",
    "num_workers",
    "max_policy_lag",
)


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
    """The most bytes that a run holds at a time, by device; of a new process all that it keeps."""
    rows = workload.hyperparameters.rollout_steps * placement.num_envs
    weights = FLOAT_BYTES * workload.network.num_parameters
    orders = 8 * workload.hyperparameters.epochs * rows  # of rows in each epoch
    noise = FLOAT_BYTES * rows * workload.network.action_size
    rollout = _rollout_bytes(workload, placement)
    learner = rollout + orders + _learner_bytes(workload, placement)
    lag = placement.max_policy_lag
    if placement.learn_device == CPU:
        host = learner + noise
        if lag:  # every other rollout of the lag, the sampler's weights, and orders to be sent
            host += lag * (rollout + orders) + 2 * weights
    else:  # the host keeps its side of everything that crosses
        host = (1 + lag) * (rollout + orders) + noise + 4 * weights
    host += _CHECKPOINT_COPIES * weights + _processes_bytes(placement)
    needed = {CPU: host}
    if placement.learn_device != CPU:
        samples_there = placement.sample_device != CPU
        needed[placement.learn_device] = learner + (noise if samples_there else 0)
    return needed


def _processes_bytes(placement: Placement) -> int:
    """What all processes keep to themselves before anything is allocated."""
    # Workers of other backends are samplers, which act too.
    steps_only = placement.env_backend in (SPREAD, JOINED)
    worker = _STEPPING_BYTES if steps_only else _ACTING_BYTES
    learner = _ACTING_BYTES + _LEARNING_BYTES if placement.max_policy_lag else _LEARNING_BYTES
    return learner + int(num_started(placement)) * worker


def _rollout_bytes(workload: Workload, placement: Placement) -> int:
    rows = workload.hyperparameters.rollout_steps * placement.num_envs
    last = placement.num_envs * workload.observation_bytes  # that the next one starts from
    return rows * sum(rollout_bytes_per_row(workload).values()) + last


def _learner_bytes(workload: Workload, placement: Placement) -> int:
    """What learning holds on its device beside the rollout, at most.

    First the whole rollout passes the network and becomes a matrix, then gradient steps read that.
    """
    network, lag = workload.network, placement.max_policy_lag
    rows = workload.hyperparameters.rollout_steps * placement.num_envs
    width = 0 if network.images else network.observation_size
    matrix = rows * (width + network.action_columns + 3)
    # Weights, their gradient and both moments of Adam; the weights that may have acted.
    state = (4 + (lag + 1 if lag else 0)) * network.num_parameters
    images = network.observation_size if network.images else 0  # as floats, where they are read
    outputs = [positions * out for positions, _, out in network.matmuls()]
    # A layer holds its input and its output.
    widest = max(a + b for a, b in itertools.pairwise((images, *outputs)))
    passes = rows * width + min(rows, PASS_ROWS, _pass_rows(network)) * widest
    passes += rows * (network.action_size + 1)
    # Normalised observations (under a lag by two networks) while the matrix is put together.
    joined = (2 if lag else 1) * rows * width + matrix + 5 * rows
    # Activations are kept for the way back, on which a layer holds two gradients of its width, or
    # one and that of its weights.
    part = math.ceil(placement.minibatch_rows / placement.accumulation_steps)
    largest = max(inputs * out for _, inputs, out in network.matmuls())
    gathered = placement.minibatch_rows * (network.observation_size + network.action_columns + 8)
    step = gathered + part * (images + sum(outputs))
    step += part * max(outputs) + max(part * max(outputs), largest)
    return FLOAT_BYTES * (state + max(passes, joined, matrix + step))


def _pass_rows(network: NetworkSpec) -> int:
    """Rows that pass the network at once."""
    if network.is_plain:
        return PASS_ROWS
    return max(1, PASS_NUMBERS // network.activation_size)


def too_large(workload: Workload, placement: Placement, limits: Limits | None) -> str | None:
    """Why the placement does not fit into the limits, or ``None``."""
    if limits is None:
        return None
    for device, nbytes in estimate_bytes(workload, placement).items():
        limit = limits.host_bytes if device == CPU else limits.device_bytes
        if limit is not None and nbytes > USABLE_FRACTION * limit:
            return (
                f"needs about {nbytes / 2**30:.2f} GiB on {device}, of which "
                f"{USABLE_FRACTION * limit / 2**30:.2f} GiB may be used"
            )
    return None
