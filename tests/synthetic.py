"""A machine whose every cost is known: calibrations without timing anything.

The truth is written down here independently of the cost model: a host that issues operations one by
one, and an accelerator that works through them behind it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoplace.machine import Accelerator, Machine
from autoplace.measure.grid import calibration_tasks
from autoplace.measure.probes import timed_tasks
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.workload import EnvSpec, NetworkSpec

GPU = "cuda:0"


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Known costs of a machine, SI units."""

    cpu_op_s: float = 3e-6
    cpu_flops: float = 4e10
    cpu_bytes: float = 1e10
    thread_efficiency: float = 0.8
    handoff_s: float = 1e-4
    contention: float = 0.0  # by so much of its time a step on the CPU is slowed per busy core
    gpu: bool = False
    gpu_dispatch_s: float = 6e-6
    gpu_launch_s: float = 4e-6
    gpu_flops: float = 8e12
    gpu_bytes: float = 6e11
    copy_latency_s: float = 1e-5
    pinned_bytes: float = 2e10
    pageable_bytes: float = 6e9

    def seconds(self, task: Task) -> float:
        if task.beside:
            alone = dataclasses.replace(task, beside=0)
            return self.seconds(alone) * (1 + self.contention * task.beside)
        if task.op == "interpreter":
            return 2e-5
        if task.op == "crowd":
            return 2e-5 * task.shape[0]
        on_cpu = task.device == "cpu"
        speedup = 1 + (task.threads - 1) * self.thread_efficiency
        rate = self.cpu_flops * speedup if on_cpu else self.gpu_flops
        bandwidth = self.cpu_bytes * speedup if on_cpu else self.gpu_bytes

        def op(flops: float, nbytes: float) -> float:
            return max(flops / rate, nbytes / bandwidth)

        def chain(works: Sequence[float]) -> float:
            """Operations one after the other, as the host sees them done."""
            if on_cpu:
                return sum(self.cpu_op_s + work for work in works)
            host = len(works) * self.gpu_dispatch_s
            return max(host, sum(self.gpu_launch_s + work for work in works)) + self.gpu_launch_s

        if task.op in ("handoff", "hand_over"):
            return self.handoff_s
        if task.op == "dispatch":
            return self.cpu_op_s if on_cpu else self.gpu_dispatch_s
        if task.op == "bookkeeping":
            return 10 * self.cpu_op_s
        if task.op == "launch":
            return self.cpu_op_s if on_cpu else self.gpu_dispatch_s + self.gpu_launch_s
        if task.op == "matmul":
            m, k, n = task.shape
            once = self.cpu_op_s if on_cpu else self.gpu_dispatch_s + self.gpu_launch_s
            moved = sum(self.copy(4 * size, pinned=False) for size in (m * k, k * n, m * n))
            return (
                once
                + op(2 * m * k * n, 4 * (m * k + k * n + m * n))
                + (moved if task.residency == "copied" else 0)
            )
        if task.op in ("elementwise", "activation"):
            once = self.cpu_op_s if on_cpu else self.gpu_dispatch_s + self.gpu_launch_s
            return once + op(0, 8 * task.shape[0])
        if task.op == "copy":
            return self.copy(task.shape[0], pinned=bool(task.pinned))
        network = task.network
        assert network is not None
        if task.op == "gae":
            steps, envs = task.shape
            rounds = math.ceil(math.log2(steps))
            works = [op(2 * steps * envs * i * o, 0) for i, o in network.layers]
            ops = 40 + 4 * rounds
            ops -= 0 if task.standardized else 18
            ops -= 0 if task.scaled_rewards else 10 + 2 * rounds
            works += [op(0, 12 * steps * envs)] * ops
            return chain(works)
        rows = task.rows
        forward = [op(2 * rows * i * o, 4 * rows * (i + o)) for i, o in network.layers]
        if task.op in ("update", "first_update"):
            works = 3 * forward + [op(0, 8 * rows * o) for _, o in network.layers] * 4
            works += [op(0, 28 * network.num_parameters)] + [0.0] * 50
            return chain(works)
        actor = [op(2 * rows * i * o, 4 * rows * (i + o)) for i, o in network.actor_layers]
        works = actor + [op(0, 8 * rows * o) for _, o in network.actor_layers]
        works += [0.0] * (7 if task.standardized else 4)
        if task.op == "policy_step":
            return chain(works) if on_cpu else len(works) * self.gpu_dispatch_s
        if task.op == "obs_to_device":
            return self.gpu_dispatch_s + 8 * rows * network.observation_size / self.cpu_bytes
        if task.op == "action_to_host":
            arrives = self.copy(4 * rows * network.observation_size, pinned=True)
            behind = arrives + sum(self.gpu_launch_s + work for work in works)
            waits = max(behind - len(works) * self.gpu_dispatch_s, 0.0)
            return waits + self.copy(8 * rows, pinned=True)
        assert task.op == "weights_to_host", task.op
        return self.copy(4 * network.num_parameters, pinned=True)

    def copy(self, nbytes: float, *, pinned: bool) -> float:
        rate = self.pinned_bytes if pinned else self.pageable_bytes
        return self.gpu_dispatch_s + self.copy_latency_s + nbytes / rate


def make_machine(*, gpu: bool = False, usable_cpus: int = 2) -> Machine:
    accelerators = (
        (
            Accelerator(
                device=GPU,
                name="Known GPU",
                uuid="GPU-0",
                memory_bytes=8 * 2**30,
                usable=True,
                reason="",
            ),
        )
        if gpu
        else ()
    )
    return Machine(
        usable_cpus=usable_cpus,
        logical_cpus=usable_cpus,
        physical_cores=usable_cpus,
        cpu_quota=None,
        cpu_model="Known CPU",
        memory_bytes=16 * 2**30,
        platform="linux",
        arch="x86_64",
        accelerators=accelerators,
    )


def env_measurements(
    env: EnvSpec, step_s: float, *, fixed_s: float = 5e-6, nums_envs: Sequence[int] = (1, 8, 64)
) -> list[Measurement]:
    return [
        Measurement(
            task=Task(op="env_step", env=env, backend="sync", num_envs=number),
            times_s=(fixed_s + step_s * number,) * 5,
        )
        for number in nums_envs
    ]


def make_calibration(
    truth: Truth,
    *,
    env: EnvSpec | None = None,
    env_step_s: float = 2e-5,
    usable_cpus: int = 2,
    noise: Callable[[], float] = lambda: 1.0,
    samples: int = 9,
    quick: bool = False,
) -> Calibration:
    devices = ("cpu", GPU) if truth.gpu else ("cpu",)
    timed: dict[Task, None] = {}
    for task in calibration_tasks(devices, usable_cpus, quick=quick):
        timed.update(dict.fromkeys(timed_tasks(task)))
    measurements = [
        Measurement(task=task, times_s=tuple(truth.seconds(task) * noise() for _ in range(samples)))
        for task in timed
    ]
    if env is not None:
        measurements += env_measurements(env, env_step_s)
    return Calibration(
        machine=make_machine(gpu=truth.gpu, usable_cpus=usable_cpus),
        measurements=tuple(measurements),
    )


def random_tasks(rng: np.random.Generator, device: str, count: int, threads: int) -> list[Task]:
    """Tasks that no calibration times, within the range that it covers."""

    def network() -> NetworkSpec:
        width = int(2 ** rng.uniform(5.2, 9))
        return NetworkSpec(
            observation_size=int(2 ** rng.uniform(2, 8)),
            hidden_sizes=(width,) * int(rng.integers(2, 4)),
            action_size=int(rng.integers(2, 16)),
            continuous=bool(rng.integers(2)),
        )

    def rows(low: float, high: float) -> int:
        return int(2 ** rng.uniform(low, high))

    tasks = []
    for index in range(count):
        common = {"device": device, "threads": threads}
        if index % 3 == 0:
            shape = tuple(rows(4, 10) for _ in range(3))
            tasks.append(Task(op="matmul", shape=shape, **common))
        elif index % 3 == 1:
            tasks.append(Task(op="policy_step", network=network(), rows=rows(1, 7), **common))
        else:
            tasks.append(Task(op="update", network=network(), rows=rows(5.5, 11), **common))
    return tasks
