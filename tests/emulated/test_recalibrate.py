"""A machine that changed: what depends on the change is timed again, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from autoplace.cost_model import fit_cost_model
from autoplace.machine import Machine
from autoplace.measure.calibrate import calibrate, recalibrate
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.sections import section_of
from autoplace.workload import EnvSpec
from tests.emulated.machine import EmulatedMachine
from tests.emulated.spec import load_spec

POLICY_PARTS = ("obs_to_device", "action_to_host")


@pytest.fixture(scope="module")
def emulated():
    spec = load_spec("laptop_weak_gpu")
    spec = dataclasses.replace(spec, cpu=dataclasses.replace(spec.cpu, cores=1))
    with EmulatedMachine(spec, dry=True) as machine:
        yield machine


@pytest.fixture(scope="module")
def stored(emulated) -> Calibration:
    return calibrate(budget_s=6.0, quick=True, machine=emulated.machine())


def other_card(machine: Machine, **changes: object) -> dict[str, object]:
    return {"accelerators": (dataclasses.replace(machine.accelerators[0], **changes),)}


@pytest.mark.parametrize(
    ("change", "sections"),
    [
        (lambda machine: {}, set()),
        (lambda machine: {"memory_bytes": machine.memory_bytes // 2}, {"memory"}),
        (lambda machine: other_card(machine, uuid="another"), {"DEVICE", "DEVICE link"}),
        (lambda machine: {"accelerators": ()}, {"DEVICE", "DEVICE link"}),
    ],
    ids=["nothing", "memory", "UUID", "gone"],
)
def test_only_what_depends_on_a_change_is_timed_again(emulated, stored, change, sections):
    machine = emulated.machine()
    name = machine.accelerators[0].device
    sections = {section.replace("DEVICE", name) for section in sections}
    now = dataclasses.replace(machine, **change(machine))
    began_s = emulated.clock.now()
    found = recalibrate(stored, machine=now, quick=True)
    spent_s = emulated.clock.now() - began_s
    again = {m.task for m in found.measurements if m is not stored.by_task.get(m.task)}
    gone = set(stored.by_task) - set(found.by_task)
    assert found.machine == now
    if now.accelerators:
        assert {section_of(task) for task in again} == sections
        # What the model had picked beyond the grid, at most.
        assert {section_of(task) for task in gone} <= sections
        assert {task.op for task in gone} <= {"update", "policy_step", *POLICY_PARTS}
        share = len(again) / len(stored.by_task)
        assert spent_s < (0.5 + 2 * share) * stored.spent_s
    else:
        assert not again
        assert {section_of(task) for task in gone} == sections
    if not sections:
        assert spent_s < 1e-3
    assert fit_cost_model(found).devices == found.devices


def test_what_fits_no_model_by_itself_is_timed_without_one(emulated, stored) -> None:
    """An accelerator's part of a calibration, and one that holds no task at all."""
    machine = emulated.machine()
    card = dataclasses.replace(machine, **other_card(machine, uuid="another"))
    found = recalibrate(stored, machine=card)
    assert fit_cost_model(found).devices == found.devices
    env = Measurement(
        task=Task(op="env_step", env=EnvSpec.make("A-v0"), backend="sync", num_envs=1),
        times_s=(1e-5,),
    )
    before, after = (
        dataclasses.replace(machine, versions=(*machine.versions, ("gymnasium", version)))
        for version in ("1.0", "1.1")
    )
    with_env = dataclasses.replace(stored.with_measurements([env]), machine=before)
    left = recalibrate(with_env, machine=after)
    assert set(left.by_task) == set(stored.by_task)
