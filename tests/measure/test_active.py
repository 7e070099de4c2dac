"""The next tasks of a calibration: those that the model is least sure of."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest

from autoplace import device
from autoplace.cost_model import fit_cost_model
from autoplace.measure import active
from autoplace.measure import calibrate as measuring
from autoplace.measure.active import least_sure
from autoplace.measure.grid import calibration_tasks, candidate_tasks
from autoplace.measure.probes import build_probe
from autoplace.measure.timing import Probe
from autoplace.measurement import Task
from autoplace.workload import NetworkSpec
from tests.emulated.machine import EmulatedMachine
from tests.emulated.spec import CpuSpec, MachineSpec
from tests.synthetic import Truth, make_calibration


def update(width: int, rows: int) -> Task:
    network = NetworkSpec(observation_size=8, hidden_sizes=(width, width), action_size=4)
    return Task(op="update", network=network, rows=rows)


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    noise = lambda: float(np.exp(0.05 * rng.standard_normal()))  # noqa: E731
    return fit_cost_model(make_calibration(Truth(), quick=True, noise=noise))


def test_what_is_known_worst_comes_first(model, monkeypatch):
    monkeypatch.setattr(active, "SURE_ERROR", 0.0)
    near, far, farther = update(64, 256), update(700, 4000), update(1024, 8192)
    errors = np.sqrt(np.diag(model.joint([near, far, farther])[1]))
    assert errors[0] < errors[1] < errors[2]
    assert least_sure(model, [near, far, farther], 1) == [farther]


def test_a_second_task_is_not_one_that_the_first_tells_of(model, monkeypatch):
    monkeypatch.setattr(active, "SURE_ERROR", 0.0)
    far, like_it, elsewhere = update(1024, 8192), update(1020, 8100), update(8, 8192)
    chosen = least_sure(model, [far, like_it, elsewhere], 2)
    assert len(set(chosen) & {far, like_it}) == 1
    assert elsewhere in chosen


def test_nothing_is_picked_where_all_is_known(model, monkeypatch):
    assert least_sure(model, [], 5) == []
    monkeypatch.setattr(active, "SURE_ERROR", 10.0)
    assert least_sure(model, [update(1024, 8192)], 5) == []


def test_candidates_are_steps_that_no_calibration_times_anyway():
    engines = {"cpu": ("eager", "numpy"), "cuda:0": ("eager",)}
    found = candidate_tasks(("cpu", "cuda:0"), 8, engines=engines)
    assert not set(found) & set(calibration_tasks(("cpu", "cuda:0"), 8, engines=engines))
    assert {task.op for task in found} == {"update", "policy_step"}
    assert {(t.device, t.engine, t.threads) for t in found} == {
        ("cpu", "eager", 1), ("cpu", "eager", 8), ("cpu", "numpy", 1), ("cpu", "numpy", 8),
        ("cuda:0", "eager", 1),
    }  # fmt: skip


def test_a_calibration_adds_what_its_model_was_least_sure_of(monkeypatch):
    picked: list[list[Task]] = []

    def watched(model, candidates, count):
        assert not picked or not set(candidates) & set(picked[-1])
        picked.append(least_sure(model, candidates, min(count, 3)))
        return picked[-1]

    monkeypatch.setattr(measuring, "least_sure", watched)
    monkeypatch.setattr(measuring, "_MOST_PICKED", 6)
    monkeypatch.setattr(measuring, "measure_process_start", lambda **options: [])
    spec = MachineSpec(cpu=dataclasses.replace(CpuSpec(), cores=1), accelerators=())
    with EmulatedMachine(spec, dry=True) as machine:
        found = measuring.calibrate(budget_s=8.0, machine=machine.machine())
    assert [len(tasks) for tasks in picked] == [3, 3]
    assert {task for tasks in picked for task in tasks} <= set(found.by_task)


def test_what_the_others_contradict_is_timed_again_until_two_visits_agree(monkeypatch):
    """Another program takes as much time as one policy step on its first visit, and on no other."""
    spec = MachineSpec(cpu=dataclasses.replace(CpuSpec(), cores=1), accelerators=())
    built: collections.Counter[Task] = collections.Counter()
    steps = [t for t in calibration_tasks(("cpu",), 1) if t.op == "policy_step"]
    odd = steps[len(steps) // 2]

    def disturbed(task: Task) -> Probe:
        probe = build_probe(task)
        built[task] += 1
        if task != odd or built[task] > 1:
            return probe

        def sample(calls: int) -> list[float]:
            seconds = [2 * s for s in probe.sample(calls)]
            device.charge(seconds=calls * sum(seconds) / 2)
            return seconds

        return dataclasses.replace(probe, sample=sample)

    def second_visits(session) -> None:
        for task, series in session._series.items():
            visited.setdefault(task, len(series.visits))

    visited: dict[Task, int] = {}
    monkeypatch.setattr(measuring, "build_probe", disturbed)
    monkeypatch.setattr(measuring, "measure_process_start", lambda **options: [])
    monkeypatch.setattr(measuring, "candidate_tasks", lambda *_, **__: [])
    monkeypatch.setattr(measuring._Session, "look_back", second_visits)
    monkeypatch.setattr(measuring._Session, "second_visits", lambda _: None)
    monkeypatch.setattr(measuring._Session, "refine", lambda _: None)
    with EmulatedMachine(spec, dry=True) as machine:
        found = measuring.calibrate(budget_s=8.0, machine=machine.machine())
        probe = build_probe(odd)
        (true_s,) = probe.sample(10)
        probe.close()
    assert visited[odd] == 3
    assert found.by_task[odd].median_s == pytest.approx(true_s, rel=0.01)
    assert sum(visited[task] > 1 for task in steps) < len(steps) / 2
