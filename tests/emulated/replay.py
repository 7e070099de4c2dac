"""Many noisy calibrations of one machine in the time of one.

Noise multiplies a timed stretch as a whole (:mod:`tests.emulated.clock`), so a sample of a task
whose calls are timed together is its noise-free time x one factor. Those times are recorded once on
the emulated machine; each repeat is then the real :func:`autoplace.measure.calibrate.calibrate` on
a clock that only draws factors.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

from autoplace import device
from autoplace.measure import calibrate as calibration_module
from autoplace.measure import sentinel
from autoplace.measure.probes import build_probe
from autoplace.measure.timing import Probe
from autoplace.measurement import Calibration, Measurement, Task
from tests.emulated.machine import EmulatedMachine
from tests.emulated.spec import MachineSpec, NoiseSpec

BASICS = ("matmul", "elementwise", "activation", "dispatch", "launch", "copy")


class _ReplayClock:
    """Time that passes only when a recorded sample is replayed."""

    processes = False

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def charge(self, *, calls: int, flops: float, nbytes: float, seconds: float) -> None:
        raise AssertionError("nothing runs in a replay")

    def spawn(self, target: Callable[[], Any], *, name: str) -> Any:
        raise AssertionError("nothing runs in a replay")

    channel = spawn


class Replay:
    """The noise-free times of tasks on a machine, from which noisy calibrations are drawn.

    Args:
        spec: the machine; its own noise is ignored.
        tasks: what its calibrations time, each one stretch of :data:`BASICS`.
    """

    def __init__(self, spec: MachineSpec, tasks: Iterable[Task]) -> None:
        quiet = spec.with_noise(lognormal_sigma=0.0, outlier_fraction=0.0)
        self._cores = spec.cpu.cores
        start_s = spec.cpu.worker_start_s + spec.cpu.handoff_s
        self._start = Measurement(task=Task(op="process_start"), times_s=(start_s,))
        self._tasks = list(tasks)
        self._probes: dict[Task, tuple[Probe, float]] = {}
        with EmulatedMachine(quiet, dry=True) as machine:
            self._machine = machine.machine()
            for task in (*self._tasks, sentinel.task_of(spec.cpu.cores)):
                assert task.op in BASICS, task
                with device.torch_threads(task.threads):
                    probe = build_probe(task)
                    probe.sample(1)
                    (few,), (more,) = probe.sample(probe.min_calls), probe.sample(3)
                    probe.close()
                assert math.isclose(few, more, rel_tol=1e-9), task
                self._probes[task] = probe, few

    def calibrate(
        self,
        noise: NoiseSpec,
        *,
        budget_s: float,
        competing_load: Callable[[float], float] = lambda _now_s: 0.0,
    ) -> Calibration:
        """One calibration under ``noise``.

        ``competing_load`` gives the cores' worth of other programs' work at a time, which the
        CPU's tasks share as they do on the emulated machine.
        """
        clock = _ReplayClock()
        draws = random.Random(noise.seed)

        def replayed(task: Task) -> Probe:
            probe, seconds = self._probes[task]

            def sample(calls: int) -> tuple[float]:
                factor = math.exp(draws.gauss(0.0, noise.lognormal_sigma))
                if draws.random() < noise.outlier_fraction:
                    factor *= noise.outlier_factor
                factor *= 1.0 + noise.drift_per_s * clock.time_s
                if task.device == "cpu":
                    busy = task.threads + competing_load(clock.time_s)
                    factor *= max(1.0, busy / self._cores)
                clock.time_s += calls * seconds * factor
                return (seconds * factor,)

            return Probe(
                tasks=probe.tasks,
                sample=sample,
                min_calls=probe.min_calls,
                max_calls=probe.max_calls,
            )

        with (
            mock.patch.object(calibration_module, "build_probe", replayed),
            mock.patch.object(sentinel, "build_probe", replayed),
            mock.patch.object(
                calibration_module, "measure_process_start", lambda **_: [self._start]
            ),
            mock.patch.object(calibration_module, "candidate_tasks", lambda *_, **__: []),
            mock.patch.object(
                calibration_module, "calibration_tasks", lambda *_, **__: self._tasks
            ),
        ):
            return calibration_module.calibrate(
                budget_s=budget_s, machine=self._machine, clock=clock
            )
