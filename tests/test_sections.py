"""The invalidation matrix: each dependency changed alone."""

from __future__ import annotations

import dataclasses

import pytest

from autoplace.accelerators import Accelerator
from autoplace.machine import Machine
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.sections import dependencies, section_of, stale_sections, what_holds
from autoplace.workload import EnvSpec, NetworkSpec

GIB = 2**30


def card(index: int, **changes: object) -> Accelerator:
    facts = {
        "device": f"cuda:{index}",
        "name": "Card",
        "uuid": f"uuid-{index}",
        "memory_bytes": 80 * GIB,
        "usable": True,
        "compute_units": 132,
        "power": "700 W",
    }
    return Accelerator(**{**facts, **changes})


VERSIONS = {
    "python": "3.11.7",
    "torch": "2.8.0",
    "numpy": "2.2.0",
    "gymnasium": "1.1.0",
    "mujoco": "3.3.0",
    "scikit-learn": "1.6",
    "blas": "mkl",
    "mkl": "2024.2",
    "onednn": "3.7",
    "cpu_capability": "AVX512",
    "cuda": "12.8",
    "driver": "550.54",
}
VARIABLES = {"OMP_NUM_THREADS": "8"}
MACHINE = Machine(
    usable_cpus=8,
    logical_cpus=8,
    physical_cores=8,
    cpu_quota=8.5,
    cpu_model="Some CPU",
    cpu_power="performance",
    memory_bytes=64 * GIB,
    platform="linux",
    arch="x86_64",
    accelerators=(card(0), card(1)),
    versions=tuple(sorted(VERSIONS.items())),
    variables=tuple(VARIABLES.items()),
)
NETWORK = NetworkSpec(observation_size=4, hidden_sizes=(64, 64), action_size=2)


def env_step(env_id: str) -> Task:
    return Task(op="env_step", env=EnvSpec.make(env_id), backend="sync", num_envs=8)


# One task of every section that this machine can have.
TASKS = {
    "cpu": Task(op="update", network=NETWORK, rows=64),
    "memory": Task(op="elementwise", shape=(4096,)),
    "processes": Task(op="handoff"),
    "cuda:0": Task(op="matmul", device="cuda:0", shape=(64, 64, 64)),
    "cuda:1": Task(op="update", device="cuda:1", network=NETWORK, rows=64),
    "cuda:0 link": Task(op="copy", device="cuda:0", direction="h2d", pinned=True, shape=(64,)),
    "cuda:1 link": Task(op="weights_to_host", device="cuda:1", network=NETWORK),
    "env CartPole-v1": env_step("CartPole-v1"),
    "env Hopper-v5": env_step("Hopper-v5"),
}
CALIBRATION = Calibration(
    machine=MACHINE,
    measurements=tuple(Measurement(task=task, times_s=(1e-3,)) for task in TASKS.values()),
)
ALL = set(TASKS)
ENVS = {"env CartPole-v1", "env Hopper-v5"}
CARDS = {"cuda:0", "cuda:1"}
LINKS = {"cuda:0 link", "cuda:1 link"}


def version(name: str, value: str) -> dict[str, object]:
    return {"versions": tuple(sorted({**VERSIONS, name: value}.items()))}


def variables(**changes: str) -> dict[str, object]:
    return {"variables": tuple(sorted({**VARIABLES, **changes}.items()))}


def first_card(**changes: object) -> dict[str, object]:
    return {"accelerators": (card(0, **changes), card(1))}


MATRIX = {
    "CPU model": ({"cpu_model": "Another CPU"}, ALL),
    "instruction set": ({"arch": "arm64"}, ALL),
    "operating system": ({"platform": "darwin"}, ALL),
    "affinity, usable": ({"usable_cpus": 4}, ALL),
    "affinity, logical": ({"logical_cpus": 16}, ALL),
    "affinity, cores": ({"physical_cores": 4}, ALL),
    "quota": ({"cpu_quota": 8.25}, ALL),
    "no quota": ({"cpu_quota": None}, ALL),
    "CPU power state": ({"cpu_power": "powersave, on battery"}, ALL),
    "python": (version("python", "3.12.1"), ALL),
    "patch of python": (version("python", "3.11.9"), set()),
    "torch": (version("torch", "2.9.0"), {"cpu", "memory"} | CARDS | LINKS),
    "BLAS": (version("blas", "openblas"), {"cpu", "memory"}),
    "MKL": (version("mkl", "2025.0"), {"cpu", "memory"}),
    "oneDNN": (version("onednn", "3.8"), {"cpu", "memory"}),
    "vector instructions": (version("cpu_capability", "AVX2"), {"cpu", "memory"}),
    "numpy": (version("numpy", "2.3.0"), {"cpu", "memory"} | ENVS),
    "gymnasium": (version("gymnasium", "1.2.0"), ENVS),
    "mujoco": (version("mujoco", "3.4.0"), ENVS),
    "scikit-learn": (version("scikit-learn", "1.7"), set()),
    "thread environment": (variables(OMP_NUM_THREADS="4"), {"cpu", "memory"}),
    "thread environment unset": ({"variables": ()}, {"cpu", "memory"}),
    "BLAS environment": (variables(OPENBLAS_CORETYPE="Haswell"), {"cpu", "memory"}),
    "device environment": (variables(CUDA_LAUNCH_BLOCKING="1"), CARDS),
    "CUDA": (version("cuda", "12.9"), CARDS | LINKS),
    "driver": (version("driver", "560.1"), CARDS | LINKS),
    "UUID": (first_card(uuid="uuid-9"), {"cuda:0", "cuda:0 link"}),
    "model of the card": (first_card(name="Other"), {"cuda:0", "cuda:0 link"}),
    "MIG slice": (first_card(memory_bytes=10 * GIB, compute_units=16), {"cuda:0", "cuda:0 link"}),
    "MIG slice, units": (first_card(compute_units=32), {"cuda:0", "cuda:0 link"}),
    "card that broke": (first_card(usable=False, reason="?"), {"cuda:0", "cuda:0 link"}),
    "power limit": (first_card(power="400 W"), {"cuda:0"}),
    "cards exchanged": (
        {"accelerators": (card(1, device="cuda:0"), card(0, device="cuda:1"))},
        CARDS | LINKS,
    ),
    "card gone": ({"accelerators": (card(0),)}, {"cuda:1", "cuda:1 link"}),
    "card added": (
        {"accelerators": (card(0), card(1), card(2))},
        {"cuda:2", "cuda:2 link"},
    ),
    "broken card added": ({"accelerators": (card(0), card(1), card(2, usable=False))}, set()),
    "memory limit": ({"memory_bytes": 32 * GIB}, {"memory"}),
    "a little less memory": ({"memory_bytes": 64 * GIB - 5_000_000}, set()),
    "nothing": ({}, set()),
}


@pytest.mark.parametrize(("change", "stale"), MATRIX.values(), ids=MATRIX)
def test_a_changed_dependency_makes_exactly_its_sections_stale(change, stale):
    now = dataclasses.replace(MACHINE, **change)
    found = stale_sections(CALIBRATION, now)
    assert set(found) == stale
    assert all(": was " in line and ", now " in line for lines in found.values() for line in lines)
    kept = what_holds(CALIBRATION, now)
    assert {m.task for m in kept.measurements} == {TASKS[s] for s in ALL - stale}
    assert kept.machine == now
    assert stale_sections(kept, now) == {}


def test_every_fact_of_a_machine_is_changed_alone_in_the_matrix():
    changed = set()
    for change, _ in MATRIX.values():
        now = dataclasses.replace(MACHINE, **change)
        for line in now.changes_since(MACHINE):
            changed.add(line.partition(": was ")[0])
    assert set(MACHINE.facts) <= changed


def test_every_section_names_facts_that_machines_have():
    missing = ({fact for s in TASKS for fact in dependencies(s)}) - set(MACHINE.facts)
    # Of other vendors' devices and other packages.
    assert missing <= {"hip", "xpu", "ale-py", "envpool", "device variables"}


@pytest.mark.parametrize(("section", "task"), TASKS.items(), ids=TASKS)
def test_a_task_belongs_to_its_section(section, task):
    assert section_of(task) == section
    assert section_of(dataclasses.replace(task, threads=2)) == section


def test_without_torch_only_what_is_known_is_compared():
    now = dataclasses.replace(
        MACHINE,
        complete=False,
        accelerators=(),
        versions=(("numpy", "2.3.0"), ("python", "3.11.7"), ("torch", "2.8.0")),
    )
    found = stale_sections(CALIBRATION, now)
    assert set(found) == {"cpu", "memory"} | ENVS
    kept = what_holds(CALIBRATION, now).machine
    assert kept.complete
    assert kept.accelerators == MACHINE.accelerators
    assert dict(kept.versions)["driver"] == "550.54"
    assert dict(kept.versions)["numpy"] == "2.3.0"
    assert "mujoco" not in dict(kept.versions)


def test_an_accelerator_that_was_left_out_on_purpose_stays_so():
    only_cpu = dataclasses.replace(
        CALIBRATION, measurements=(Measurement(task=TASKS["cpu"], times_s=(1e-3,)),)
    )
    assert stale_sections(only_cpu, MACHINE) == {}
    assert set(stale_sections(only_cpu, dataclasses.replace(MACHINE, cpu_model="x"))) == {"cpu"}
