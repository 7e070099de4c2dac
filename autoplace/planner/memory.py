"""What a placement needs of host and device memory, estimated before anything is allocated."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from autoplace.device_names import CPU
from autoplace.engines import EAGER, NUMPY, engine_on
from autoplace.measurement import Calibration, env_start
from autoplace.planner.backends import started_by
from autoplace.planner.plan import Placement
from autoplace.planner.schemes.work import rollout_bytes_per_row
from autoplace.ppo.numpy_perceptron import PASS_ROWS as NUMPY_PASS_ROWS
from autoplace.workload import FLOAT_BYTES, EnvSpec, Workload

# Share of the free memory that a plan may use: the rest is for what an estimate cannot see
# (allocator slack, library workspaces).
USABLE_FRACTION = 0.8
# What a process keeps to itself, measured under Linux (tests/benchmarks/memory_estimates.py): that
# of the run beyond what planning took; another one with torch; and one without.
_RUN_BYTES = 132 * 2**20
_TORCH_BYTES = 150 * 2**20
_STEPPING_BYTES = 22 * 2**20
# Copies of the weights that a learner on the host comes to: weights, gradient and moments, and a
# checkpoint taken and in memory (10); and where engines are compared what the other one is given,
# and one of their steps (7).
_LEARNING_COPIES, _TRIAL_COPIES = 10, 7
# With a policy lag a checkpoint holds the weights before, twice.
_PREVIOUS_COPIES = 2
# Numbers by row that advantages are made through beside what is listed, at a time.
_ADVANTAGE_VECTORS = 12
# Views of the rows of a vector step, as tensors and as arrays.
_STEP_BYTES = 4096
# Weights and moments of a checkpoint: taken, and written to memory.
_CHECKPOINT_COPIES = 2 * 3
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
    "engine",
    "sample_threads",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvMemory:
    """What environments hold, as measured; 0 where it was not.

    Attributes:
        process_bytes: in each process that makes some, beyond them.
        env_bytes: by each of them.
    """

    process_bytes: int = 0
    env_bytes: int = 0

    @classmethod
    def of(cls, calibration: Calibration, env: EnvSpec) -> EnvMemory:
        """As it was measured when a process with the environment was started."""
        known = calibration.by_task.get(env_start(env))
        if known is None:
            return cls()
        return cls(process_bytes=known.process_bytes, env_bytes=known.env_bytes)


def estimate_bytes(
    workload: Workload, placement: Placement, held: EnvMemory | None = None
) -> dict[str, int]:
    """The most bytes that a run holds at a time, by device; of a new process all that it keeps.

    Args:
        workload: what is trained.
        placement: where its work is put.
        held: by its environments, if that is known.
    """
    rows = workload.hyperparameters.rollout_steps * placement.num_envs
    weights = FLOAT_BYTES * workload.network.num_parameters
    orders = 8 * workload.hyperparameters.epochs * rows  # of rows in each epoch
    noise = FLOAT_BYTES * rows * workload.network.action_size
    rollout = _rollout_bytes(workload, placement)
    lag = placement.max_policy_lag
    host = _processes_bytes(workload, placement, held or EnvMemory())
    host += _STEP_BYTES * workload.hyperparameters.rollout_steps
    if placement.learn_device == CPU:
        host += orders + _host_learning_bytes(workload, placement)
        # Each rollout of a lag has its own noise, and each version of the weights two copies: one
        # that acts, one that is learned from.
        host += (1 + lag) * (rollout + noise)
        if lag:
            host += (2 * (1 + lag) + _PREVIOUS_COPIES) * weights
        return {CPU: host}
    # The host keeps its side of everything that crosses.
    host += (1 + lag) * (rollout + orders) + noise + (4 + _CHECKPOINT_COPIES) * weights
    samples_there = placement.sample_device != CPU
    there = rollout + orders + _learner_bytes(workload, placement)
    return {CPU: host, placement.learn_device: there + (noise if samples_there else 0)}


def _processes_bytes(workload: Workload, placement: Placement, held: EnvMemory) -> int:
    """What all processes keep to themselves before anything is allocated.

    This process has made such an environment before, so what comes with the first is there.
    """
    started = started_by(placement, is_plain=workload.network.is_plain)
    total = _RUN_BYTES + placement.num_envs * held.env_bytes
    total += started.with_envs * held.process_bytes
    return total + started.with_torch * _TORCH_BYTES + started.without_torch * _STEPPING_BYTES


def _host_learning_bytes(workload: Workload, placement: Placement) -> int:
    """What learning on the CPU comes to beside the rollouts and the processes.

    What one phase has freed the next one uses, where it is of the same allocator: a pass over the
    rollout and a gradient step are not there at the same time, in numpy each has its own.
    """
    network, hyper = workload.network, workload.hyperparameters
    rows = hyper.rollout_steps * placement.num_envs
    width = 0 if network.images else network.observation_size
    images = network.observation_size if network.images else 0  # as floats, where they are read
    matrix = rows * (width + network.action_columns + 3)
    advantages = rows * (width + network.action_size + _ADVANTAGE_VECTORS)
    outputs = [positions * out for positions, _, out in network.matmuls()]
    engine = engine_on(placement.engine, CPU, is_plain=network.is_plain)
    # Activations and the gradients by them, of the engine and of the one that it is compared with.
    part = math.ceil(placement.minibatch_rows / placement.accumulation_steps)
    gathered = placement.minibatch_rows * FLOAT_BYTES * (network.action_columns + 8)
    gathered += placement.minibatch_rows * network.observation_bytes
    step = part * (images + 2 * sum(outputs))
    copies = _LEARNING_COPIES
    if engine == EAGER:  # a layer of a pass holds its input and its output
        widest = max(a + b for a, b in itertools.pairwise((images, *outputs)))
        most = max(min(rows, network.pass_rows(CPU)) * widest, step)
    else:  # each network that has acted keeps the activations of a pass
        copies += _TRIAL_COPIES
        passes = min(rows, NUMPY_PASS_ROWS) * sum(outputs) if engine == NUMPY else 0
        most = (1 + placement.max_policy_lag) * passes + 2 * step
    numbers = copies * network.num_parameters + matrix + advantages + most
    return FLOAT_BYTES * numbers + gathered


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
    passes = rows * width + min(rows, network.pass_rows(placement.learn_device)) * widest
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


def too_large(
    workload: Workload, placement: Placement, limits: Limits | None, held: EnvMemory
) -> str | None:
    """Why the placement does not fit into the limits, or ``None``."""
    if limits is None:
        return None
    for device, nbytes in estimate_bytes(workload, placement, held).items():
        limit = limits.host_bytes if device == CPU else limits.device_bytes
        if limit is not None and nbytes > USABLE_FRACTION * limit:
            return (
                f"needs about {nbytes / 2**30:.2f} GiB on {device}, of which "
                f"{USABLE_FRACTION * limit / 2**30:.2f} GiB may be used"
            )
    return None
