"""What each part of a calibration depends on, and which parts no longer hold.

A calibration is made of *sections*: timings that depend on the same facts of the machine (as
:attr:`autoplace.machine.Machine.facts` names them). Where a fact has changed, the sections that
depend on it are timed again, and no others.

====================  ============================================================================
section               what was timed
====================  ============================================================================
``cpu``               products and the trainer's steps on the CPU, alone and beside busy cores
``memory``            what streams through the host's memory
``processes``         hand-offs between processes, and Python alone and beside busy cores
``cuda:0``, ...       everything that an accelerator computes
``cuda:0 link``, ...  copies between it and the host
``env CartPole-v1``   steps of an environment, by every vector backend
====================  ============================================================================
"""

from __future__ import annotations

import dataclasses

from autoplace.device_names import CPU
from autoplace.machine import Machine
from autoplace.measurement import Calibration, Task

_CHIP = (
    "platform",
    "architecture",
    "CPU model",
    "usable CPUs",
    "logical CPUs",
    "physical cores",
    "CPU quota",
    "CPU power",
    "python",
)
_MATHS = ("torch", "numpy", "blas", "mkl", "onednn", "cpu_capability", "CPU variables")
_RUNTIME = ("torch", "cuda", "hip", "xpu", "driver")
# What physics environments are run by; the packages of others are not known.
_ENV_PACKAGES = ("numpy", "gymnasium", "mujoco", "ale-py", "envpool")

_HOST_SECTIONS = {
    "cpu": (*_CHIP, *_MATHS),
    "memory": (*_CHIP, *_MATHS, "memory limit"),
    "processes": _CHIP,
}
_LINK_OPS = ("copy", "weights_to_host")
_ENV, _LINK = "env ", " link"


def section_of(task: Task) -> str:
    """The section that a timing belongs to."""
    if task.env is not None:
        return f"{_ENV}{task.env.id}"
    if task.device != CPU:
        return f"{task.device}{_LINK}" if task.op in _LINK_OPS else task.device
    if task.op in ("handoff", "hand_over", "crowd", "interpreter"):
        return "processes"
    return "memory" if task.op == "elementwise" else "cpu"


def is_of_env(section: str) -> bool:
    """Whether it holds the steps of an environment, which are timed when they are needed."""
    return section.startswith(_ENV)


def dependencies(section: str) -> tuple[str, ...]:
    """Names of the facts that a section depends on."""
    if section in _HOST_SECTIONS:
        return _HOST_SECTIONS[section]
    if is_of_env(section):
        return (*_CHIP, *_ENV_PACKAGES)
    if section.endswith(_LINK):
        return (*_CHIP, *_RUNTIME, section.removesuffix(_LINK))
    return (*_CHIP, *_RUNTIME, section, f"{section} power", "device variables")


def stale_sections(calibration: Calibration, machine: Machine) -> dict[str, tuple[str, ...]]:
    """The sections that do not hold on ``machine`` any more, each with what has changed.

    An accelerator that is new, or works now, counts as one: it was not timed yet.
    """
    sections = list(dict.fromkeys(section_of(m.task) for m in calibration.measurements))
    earlier = calibration.machine
    for card in machine.accelerators:
        if card.usable and earlier.complete and machine.changes_since(earlier, (card.device,)):
            sections += [card.device, f"{card.device}{_LINK}"]
    changes = {name: machine.changes_since(earlier, dependencies(name)) for name in sections}
    return {name: changed for name, changed in changes.items() if changed}


def what_holds(calibration: Calibration, machine: Machine) -> Calibration:
    """The calibration of ``machine`` as it is now, without the sections that are stale."""
    stale = stale_sections(calibration, machine)
    return dataclasses.replace(
        calibration,
        machine=calibration.machine.brought_up_to(machine),
        measurements=tuple(m for m in calibration.measurements if section_of(m.task) not in stale),
    )
