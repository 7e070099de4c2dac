"""``calibrate()``: time what a cost model needs within a budget.

Every task gets a first visit in order of usefulness; then those of many more are visited that the
cost model is least sure of, and again those whose times it doubts: what others of their kind say is
far from them. A second visit of the rest follows in reverse order: whatever makes the machine
slower and slower then hits all tasks alike. What is left of the budget goes to the tasks whose
medians are known worst. Between visits a sentinel is timed, which tells whether
other programs or a drifting clock interfered; if so, the calibration says when and by how much.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from autoplace import device
from autoplace.cost_model import CostModel, fit_cost_model
from autoplace.engines import EAGER, NUMPY
from autoplace.errors import CalibrationError, DeviceError, EngineError, UsageError
from autoplace.machine import Machine, detect_machine
from autoplace.measure.active import between_regimes, least_sure
from autoplace.measure.doubts import describe_doubts, examine_products
from autoplace.measure.grid import calibration_tasks, candidate_tasks
from autoplace.measure.load import Load, LoadError
from autoplace.measure.named_engine import engine_tasks, measure_engine
from autoplace.measure.own_network import measure_own_network, own_network_tasks
from autoplace.measure.probes import build_probe, probe_bytes, timed_tasks
from autoplace.measure.process_start import measure_process_start
from autoplace.measure.sentinel import Sentinel
from autoplace.measure.timing import Series, run_probe
from autoplace.measurement import PROCESS_START, Calibration, Measurement, Task
from autoplace.sections import section_of, stale_sections, what_holds
from autoplace.units import format_percent, format_seconds
from autoplace.workload import EnvSpec, Hyperparameters

_log = logging.getLogger(__name__)

# With what importing, detecting and fitting take, about a minute and about ten seconds.
DEFAULT_BUDGET_S = 52.0
QUICK_BUDGET_S = 5.3
# Shares of the budget by whose end the first visits, those to what the model is least sure of or
# doubts, and the second visits are to be done.
_FIRST_VISITS = 0.5
_EXPLORED = 0.65
_DOUBTED = 0.7
_SECOND_VISITS = 0.85
# About so many tasks are visited twice in any case, of those whose visit takes so long at most.
_LOOKED_BACK_AT, _CHEAP_S = 40, 0.005
# So many tasks in a row may be put in another order, for threads to keep out of others' way.
_TOGETHER = 48
# So many candidates are picked at a time, before the model is fitted anew, and in all.
_PICKED, _MOST_PICKED = 24, 96
# A timing that others of its kind miss by more, as the logarithm of a ratio, is doubted.
_OUT_OF_LINE = 0.1
# No first visit may take more than this many times its share of the time that is left; but this
# share of the whole budget is for any.
_LARGEST_SHARE = 6.0
_LONG_SHARE = 0.02
# Share of the memory that a single probe may take.
_MEMORY_SHARE = 0.25
# Standard error of a median that is good enough. Every cost rests on the basic times of issuing and
# launching an operation, and on their difference.
_TARGET_ERROR = 0.01
_BASIC_TARGET_ERROR = 0.003
_ONCE_TARGET_ERROR = 0.03  # of what is a small part of an iteration, and takes long to repeat
_DOUBTFUL_ERROR = 0.05
# Which of the cores a process beyond them shares is left to chance.
_CROWD_TARGET_ERROR = 0.1
_CROWDED_MESSAGE_TARGET_ERROR = 0.35  # some wait for a moment, some for a slice of time


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a calibration is.

    Attributes:
        done: tasks that have been timed.
        total: tasks in all.
        task: what is being timed now.
        elapsed_s: seconds since the start.
        left_s: seconds until the budget ends.
        refining: whether every task has had its first visit.
    """

    done: int
    total: int
    task: Task
    elapsed_s: float
    left_s: float
    refining: bool


def calibrate(
    *,
    devices: Sequence[str] | str = "auto",
    budget_s: float = DEFAULT_BUDGET_S,
    quick: bool = False,
    envs: Iterable[EnvSpec | str] = (),
    engines: Iterable[str] = (),
    progress: Callable[[Progress], None] | None = None,
    clock: device.Clock | None = None,
    machine: Machine | None = None,
    sections: Collection[str] | None = None,
) -> Calibration:
    """Time this machine.

    Args:
        devices: ``auto`` for the CPU and every usable accelerator, or names of devices; the CPU is
            always among them, since environments run there.
        budget_s: seconds to spend; environments come on top, a second or two each, and so do one or
            two starts of a process.
        quick: time fewer tasks.
        envs: environments whose step times are measured too.
        engines: those that take long to make ready and are to be timed with the networks of
            ``envs``, some ten seconds a step.
        progress: called before each task.
        clock: where the time comes from; the real one if ``None``.
        machine: what is known of the machine already; detected if ``None``.
        sections: time these only (see :mod:`autoplace.sections`), in their share of the budget.

    Raises:
        UsageError: a budget that is too small, or a device name that is none.
        DeviceError: a device that is not here or does not work.
    """
    if budget_s < 1:
        raise UsageError(f"--budget is at least 1 second, got {budget_s:g}: raise it")
    with device.use_clock(clock), device.torch_threads(1):
        specs = tuple(EnvSpec.make(env) if isinstance(env, str) else env for env in envs)
        return _calibrate(
            devices, budget_s, quick, specs, tuple(engines), progress, machine, sections
        )


def recalibrate(
    stored: Calibration,
    *,
    machine: Machine | None = None,
    quick: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Calibration:
    """Time what no longer holds of a calibration, and keep the rest.

    Environments are timed when they are needed: those whose times no longer hold are left out.

    Args:
        stored: of this machine, as it was.
        machine: as it is; detected if ``None``.
        quick: time fewer tasks.
        progress: called before each task.
    """
    machine = machine if machine is not None else detect_machine()
    fresh = calibrate(
        budget_s=QUICK_BUDGET_S if quick else DEFAULT_BUDGET_S,
        quick=quick,
        progress=progress,
        machine=machine,
        sections=stale_sections(stored, machine),
    )
    kept = what_holds(stored, machine).measurements
    return dataclasses.replace(fresh, measurements=(*kept, *fresh.measurements))


def _calibrate(
    devices: Sequence[str] | str,
    budget_s: float,
    quick: bool,
    envs: Sequence[EnvSpec],
    named: Sequence[str],
    progress: Callable[[Progress], None] | None,
    machine: Machine | None,
    sections: Collection[str] | None,
) -> Calibration:
    begun_s = device.now()
    machine = machine if machine is not None else detect_machine()
    measurements: list[Measurement] = []
    if sections is None or section_of(PROCESS_START) in sections:
        # A core that would only wait has something better to do.
        spare = quick and machine.usable_cpus > 1
        measurements += measure_process_start(
            num_samples=1 if quick else 2, meanwhile=_import_rest if spare else None
        )
    start_s = device.now()
    names = _usable_devices(machine, devices)
    engines = {name: device.engines_on(name) for name in names}
    tasks = calibration_tasks(names, machine.usable_cpus, engines=engines, quick=quick)
    # Fitting in between would take too much of a quick one's time.
    candidates = [] if quick else candidate_tasks(names, machine.usable_cpus, engines=engines)
    learner = None if quick else next((task for task in tasks if task.op == "update"), None)
    long_s = _LONG_SHARE * budget_s
    if sections is not None:
        wanted = [task for task in tasks if section_of(task) in sections]
        budget_s *= len(wanted) / len(tasks)
        tasks = wanted
        candidates = []  # a part of a calibration is too little to fit a model on
    session = _Session(machine, tasks, start_s, budget_s, progress, long_s=long_s, learner=learner)
    try:
        session.first_visits()
        session.explore(candidates)
        if not quick and sections is None:  # as for candidates
            session.doubt()
        session.look_back()
        session.second_visits()
        session.refine()
    finally:
        session.close()
    timed = session.measurements()
    impossible, odd = examine_products(timed)
    measurements += [m for m in timed if m not in impossible]
    for env in envs:
        from autoplace.envs import inspect_env  # imports gymnasium, as does the next
        from autoplace.measure.envs import measure_backends

        description = inspect_env(env)
        measurements += measure_backends(env, (1, 8), machine.usable_cpus, description)
        workload = description.workload(Hyperparameters())
        measurements += measure_own_network(own_network_tasks(workload, names, machine.usable_cpus))
    more, problems = measure_engines(named, envs, names, machine.usable_cpus)
    measurements += more
    return Calibration(
        machine=machine,
        measurements=tuple(measurements),
        budget_s=budget_s,
        spent_s=device.now() - begun_s,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        warnings=(*session.warnings(), *describe_doubts(impossible, odd), *problems),
    )


def _import_rest() -> None:
    """What torch and the fit import at their first use, a second or two in all."""
    import torch

    import autoplace.fitting  # noqa: F401

    torch.optim.Adam([torch.zeros(1)])


def measure_engines(
    engines: Sequence[str], envs: Sequence[EnvSpec], devices: Sequence[str], usable_cpus: int
) -> tuple[list[Measurement], list[str]]:
    """Time engines with the networks of environments; one line for each that does not work."""
    found: list[Measurement] = []
    problems: list[str] = []
    for engine, env in itertools.product(engines, envs):
        from autoplace.envs import inspect_env

        workload = inspect_env(env).workload(Hyperparameters())
        try:
            found += measure_engine(engine_tasks(engine, workload, devices, usable_cpus))
        except EngineError as fault:
            problems.append(f"{fault}: plans do without it")
    return found, problems


def _usable_devices(machine: Machine, devices: Sequence[str] | str) -> tuple[str, ...]:
    """The CPU, and the accelerators that are asked for and work."""
    by_name = {accelerator.device: accelerator for accelerator in machine.accelerators}
    if devices == "auto":
        wanted = [name for name, accelerator in by_name.items() if accelerator.usable]
    else:
        asked = [devices] if isinstance(devices, str) else list(devices)
        wanted = []
        for name in asked:
            canonical = device.require_device(name)
            accelerator = by_name.get(canonical)
            if accelerator is not None and not accelerator.usable:
                raise DeviceError(
                    f"device {canonical} does not work: {accelerator.reason}: "
                    "use --device cpu, or repair it"
                )
            wanted.append(canonical)
    return tuple(dict.fromkeys((device.CPU, *wanted)))


class _Session:
    """The state of one calibration: a series of raw times per task."""

    def __init__(
        self,
        machine: Machine,
        tasks: Sequence[Task],
        start_s: float,
        budget_s: float,
        progress: Callable[[Progress], None] | None,
        *,
        long_s: float,
        learner: Task | None,
    ) -> None:
        self._machine = machine
        self._series = {task: Series(tasks=timed_tasks(task)) for task in _by_pool(tasks)}
        self._start_s = start_s
        self._end_s = start_s + budget_s
        self._budget_s = budget_s
        self._long_s = long_s  # seconds that any first visit may take
        self._progress = progress
        self._left_out: list[tuple[Task, str]] = []
        self._done = 0
        self._sentinel = Sentinel(machine.usable_cpus, budget_s)
        self._load = Load(learner)
        self._pool: str | None = None  # whose threads may still be waiting in a loop
        self._no_load = ""  # why no other process can be kept busy
        self._no_engine: dict[tuple[str, str], str] = {}  # why one cannot run on a device

    def close(self) -> None:
        """End the processes that were started."""
        self._load.close()

    def first_visits(self) -> None:
        """Visit every task once, giving each an equal share of what is left."""
        pending = list(self._series)
        deadline_s = self._start_s + _FIRST_VISITS * self._budget_s
        for index, task in enumerate(pending):
            now_s = device.now()
            if now_s >= self._end_s:
                self._left_out += [(left, "the budget ended") for left in pending[index:]]
                return
            share_s = max(deadline_s - now_s, 0.0) / (len(pending) - index)
            reason = self._too_big(task, share_s)
            if reason is not None:
                self._left_out.append((task, reason))
                continue
            self._visit(task, share_s, refining=False)
            self._done += 1

    def explore(self, candidates: Sequence[Task]) -> None:
        """Visit what the model is least sure of, until it is sure enough or the time is over."""
        deadline_s = self._start_s + _EXPLORED * self._budget_s
        pending, visited = [task for task in candidates if task not in self._series], 0
        refused = set[Task]()
        while pending and visited < _MOST_PICKED and device.now() < deadline_s:
            try:
                model = self._model()
                chosen = [
                    *between_regimes(model, self._series.keys() | refused),
                    *least_sure(model, pending, _PICKED),
                ]
            except CalibrationError:  # the budget did not even reach the basic timings
                return
            if not chosen:
                return
            for index, task in enumerate(_by_pool(chosen)):
                if task in pending:
                    pending.remove(task)
                    visited += 1
                share_s = (deadline_s - device.now()) / (len(chosen) - index)
                if share_s <= 0:
                    return
                if self._too_big(task, share_s) is None:
                    self._series[task] = Series(tasks=timed_tasks(task))
                    self._visit(task, share_s, refining=False)
                    self._done += 1
                else:
                    refused.add(task)

    def doubt(self) -> None:
        """Visit again what others of its kind contradict, up to twice where visits do, too."""
        deadline_s = self._start_s + _DOUBTED * self._budget_s
        if device.now() >= deadline_s:
            return
        try:
            model = self._model()
        except CalibrationError:  # as in explore
            return
        probed = {part: task for task, series in self._series.items() for part in series.tasks}
        doubted = list(dict.fromkeys(probed[task] for task in model.out_of_line(_OUT_OF_LINE)))
        for _ in range(2):
            for task in _by_pool(doubted):
                if device.now() >= deadline_s:
                    return
                if self._needed_s(task) <= self._long_s and self._series[task].wants_more:
                    self._visit(task, 0.0, refining=True)
            doubted = [task for task in doubted if self._series[task].visits_differ(_OUT_OF_LINE)]

    def _model(self) -> CostModel:
        """What is known so far.

        Raises:
            CalibrationError: not even the basic timings are.
        """
        timed = tuple(self.measurements())
        return fit_cost_model(Calibration(machine=self._machine, measurements=timed))

    def look_back(self) -> None:
        """Visit some cheap tasks of every sort again: how far visits differ has to be known."""
        cheap = [
            task
            for task, series in self._series.items()
            if series.times_s and not task.beside and self._needed_s(task) <= _CHEAP_S
        ]
        for task in cheap[:: max(1, len(cheap) // _LOOKED_BACK_AT)]:
            if device.now() >= self._end_s:
                return
            self._visit(task, 0.0, refining=True)

    def second_visits(self) -> None:
        """Visit every task a second time, in reverse order, as far as the time for it goes."""
        pending = [task for task, series in self._series.items() if series.times_s]
        deadline_s = self._start_s + _SECOND_VISITS * self._budget_s
        while pending and device.now() < deadline_s:
            task = pending[-1]
            share_s = (deadline_s - device.now()) / len(pending)
            series, no_load = self._series[task], task.beside and self._no_load
            if (
                self._needed_s(task) <= _LARGEST_SHARE * share_s
                and series.wants_more
                and len(series.visits) < 2
                and not no_load
            ):
                self._visit(task, share_s, refining=True)
            pending.pop()

    def refine(self) -> None:
        """Spend what is left on the medians that are known worst."""
        while True:
            worst = sorted(
                (
                    (series.error_fraction, index, task)
                    for index, (task, series) in enumerate(self._series.items())
                    if series.times_s
                    and series.wants_more
                    and not (task.beside and self._no_load)
                    and series.error_fraction > _target_error(task)
                ),
                key=lambda entry: (-entry[0], entry[1]),
            )[:16]
            if not worst:
                return
            visited = 0
            for task in _by_pool([task for _, _, task in worst]):
                left_s = self._end_s - device.now()
                needed_s = self._needed_s(task)
                if left_s <= 0:
                    return
                if needed_s > left_s:
                    continue
                self._visit(
                    task, min(left_s, max(_LONG_SHARE * self._budget_s, needed_s)), refining=True
                )
                visited += 1
            if not visited:
                return

    def _needed_s(self, task: Task) -> float:
        """Seconds that another visit takes at least."""
        series = self._series[task]
        return 5 * series.calls * sum(times[-1] for times in series.times_s)

    def _visit(self, task: Task, time_limit_s: float, *, refining: bool) -> None:
        if self._progress is not None:
            now_s = device.now()
            self._progress(
                Progress(
                    done=self._done,
                    total=len(self._series),
                    task=task,
                    elapsed_s=now_s - self._start_s,
                    left_s=max(self._end_s - now_s, 0.0),
                    refining=refining,
                )
            )
        pool = _pool(task)
        if self._pool not in (None, pool):
            device.let_threads_sleep()
        self._pool = pool
        try:
            with self._load.on(task.beside), device.torch_threads(task.threads, task.engine):
                self._run(task, time_limit_s)
        except LoadError as fault:
            self._no_load = str(fault)
            if not self._series[task].times_s:
                self._left_out.append((task, self._no_load))
        except EngineError as fault:
            self._no_engine[task.engine, task.device] = str(fault)
            self._left_out.append((task, str(fault)))
        # Threads of numpy and the sentinel's would be in each other's way: they sleep in between.
        if pool == NUMPY and self._sentinel.is_overdue:
            device.let_threads_sleep()
            self._pool = pool = EAGER
        if pool != NUMPY:
            self._sentinel.look()

    def _run(self, task: Task, time_limit_s: float) -> None:
        probe = build_probe(task)
        try:
            run_probe(
                probe,
                self._series[task],
                time_limit_s=time_limit_s,
                target_error_fraction=_target_error(task),
            )
        finally:
            probe.close()

    def _too_big(self, task: Task, share_s: float) -> str | None:
        """Why a task is not timed: it would not fit, or a smaller one like it took too long."""
        if task.beside and self._no_load:
            return self._no_load
        if (task.engine, task.device) in self._no_engine:
            return self._no_engine[task.engine, task.device]
        if probe_bytes(task) > _MEMORY_SHARE * self._machine.memory_bytes:
            return "it does not fit into memory"
        expected_s = self._expected_s(task)
        limit_s = max(_LARGEST_SHARE * share_s, self._long_s)
        if 4 * expected_s > limit_s:
            return f"one call takes about {format_seconds(expected_s)}, too long for the budget"
        return None

    def _expected_s(self, task: Task) -> float:
        """Seconds that one call should take, from the nearest task like it; 0 if there is none."""
        work = probe_bytes(task) if task.op != "matmul" else float(_product(task.shape))
        best, best_distance = 0.0, float("inf")
        for other, series in self._series.items():
            if not series.times_s or (other.op, other.device) != (task.op, task.device):
                continue
            other_work = probe_bytes(other) if other.op != "matmul" else _product(other.shape)
            ratio = work / max(other_work, 1.0)
            distance = max(ratio, 1 / max(ratio, 1e-12))
            if distance < best_distance:
                best_distance = distance
                best = sum(min(times) for times in series.times_s) * max(ratio, 1.0)
        return best

    def measurements(self) -> list[Measurement]:
        """Everything that was timed."""
        return [m for series in self._series.values() for m in series.measurements()]

    def warnings(self) -> list[str]:
        """Doubts that a person should know of, each with the evidence and the next step."""
        warnings = []
        if self._left_out:
            reasons = dict.fromkeys(reason for _, reason in self._left_out)
            shown = "; ".join(list(reasons)[:2])
            warnings.append(
                f"{len(self._left_out)} of {len(self._series)} tasks were not timed ({shown}): "
                "raise --budget to have them"
            )
        spell = self._sentinel.slow_spell()
        if spell is not None:
            warnings.append(
                f"the machine was {format_percent(spell.slowdown_fraction)} slower than at other "
                f"times from second {spell.start_s:.0f} to second {spell.end_s:.0f} of the "
                "calibration (other programs, or a clock that changed its rate): "
                "calibrate again when it is quiet"
            )
        doubtful = [
            m
            for m in self.measurements()
            if m.error_fraction > max(_DOUBTFUL_ERROR, _target_error(m.task))
        ]
        if doubtful:
            worst = max(doubtful, key=lambda m: m.error_fraction)
            warnings.append(
                f"{len(doubtful)} medians are known to no better than "
                f"{format_percent(_DOUBTFUL_ERROR)} (worst: {worst.task.op} on "
                f"{worst.task.device}, {format_percent(worst.error_fraction)}): "
                "close other programs and calibrate again"
            )
        return warnings


def _pool(task: Task) -> str | None:
    """Whose threads share the cores in a task, if it has several."""
    if task.device != device.CPU or task.threads == 1:
        return None
    return NUMPY if task.engine == NUMPY else EAGER


def _by_pool(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, some at a time, so that threads of one pool rarely make place for another's."""
    return [
        task
        for start in range(0, len(tasks), _TOGETHER)
        for task in sorted(tasks[start : start + _TOGETHER], key=lambda task: _pool(task) or "")
    ]


def _target_error(task: Task) -> float:
    if task.op == "crowd":
        return _CROWD_TARGET_ERROR
    if task.op == "hand_over" and task.beside:
        return _CROWDED_MESSAGE_TARGET_ERROR
    if task.op in ("first_update", "bookkeeping"):
        return _ONCE_TARGET_ERROR
    return _BASIC_TARGET_ERROR if task.op in ("dispatch", "launch") else _TARGET_ERROR


def _product(shape: Sequence[int]) -> float:
    product = 1.0
    for size in shape:
        product *= size
    return product
