"""Measure a machine once, then place every PPO run where it is fastest, and say why.

    calibration = autoplace.calibrate(envs=["CartPole-v1"])
    plan = autoplace.make_plan(calibration, autoplace.describe("CartPole-v1"))
    print(plan.explain())
    autoplace.train(plan, total_steps=100_000, run_dir="runs/cartpole")

Importing this module does not import torch; the functions that need it do. It tells OpenBLAS, where
numpy is not loaded yet, that its threads are to sleep soon after their work.
"""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any

from autoplace._version import __version__
from autoplace.importing import load

# Its threads wait for more work in a loop, 2^26 cycles long by default: 20 to 100 ms, in which the
# processes that step environments would find a core less. 2^17 outlast the pauses within an update.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "17")

if TYPE_CHECKING:
    from autoplace.cost_model import Cost, CostModel, fit_cost_model
    from autoplace.crossover import Crossover, find_crossovers
    from autoplace.envs import describe
    from autoplace.errors import (
        AutoplaceError,
        CalibrationError,
        DeviceError,
        EnvError,
        RunError,
        UsageError,
    )
    from autoplace.machine import Accelerator, Machine, detect_machine
    from autoplace.measure.calibrate import calibrate
    from autoplace.measurement import Calibration, Measurement, Task
    from autoplace.planner.memory import Limits
    from autoplace.planner.observed import make_replanner
    from autoplace.planner.plan import Candidate, Flip, Placement, Plan, Stage
    from autoplace.planner.search import make_plan
    from autoplace.results import RunResult, compare_stages
    from autoplace.store import load_calibration, save_calibration
    from autoplace.train import Callback, StopRequested, evaluate, load_policy, train
    from autoplace.workload import EnvSpec, Hyperparameters, NetworkSpec, Workload

_HOMES = {
    "autoplace.cost_model": ("Cost", "CostModel", "fit_cost_model"),
    "autoplace.crossover": ("Crossover", "find_crossovers"),
    "autoplace.envs": ("describe",),
    "autoplace.errors": (
        "AutoplaceError",
        "CalibrationError",
        "DeviceError",
        "EnvError",
        "RunError",
        "UsageError",
    ),
    "autoplace.machine": ("Accelerator", "Machine", "detect_machine"),
    "autoplace.measure.calibrate": ("calibrate",),
    "autoplace.measurement": ("Calibration", "Measurement", "Task"),
    "autoplace.planner.memory": ("Limits",),
    "autoplace.planner.observed": ("make_replanner",),
    "autoplace.planner.plan": ("Candidate", "Flip", "Placement", "Plan", "Stage"),
    "autoplace.planner.search": ("make_plan",),
    "autoplace.results": ("RunResult", "compare_stages"),
    "autoplace.store": ("load_calibration", "save_calibration"),
    "autoplace.train": ("Callback", "StopRequested", "evaluate", "load_policy", "train"),
    "autoplace.workload": ("EnvSpec", "Hyperparameters", "NetworkSpec", "Workload"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Accelerator",
    "AutoplaceError",
    "Calibration",
    "CalibrationError",
    "Callback",
    "Candidate",
    "Cost",
    "CostModel",
    "Crossover",
    "DeviceError",
    "EnvError",
    "EnvSpec",
    "Flip",
    "Hyperparameters",
    "Limits",
    "Machine",
    "Measurement",
    "NetworkSpec",
    "Placement",
    "Plan",
    "RunError",
    "RunResult",
    "Stage",
    "StopRequested",
    "Task",
    "UsageError",
    "Workload",
    "__version__",
    "calibrate",
    "compare_stages",
    "describe",
    "detect_machine",
    "evaluate",
    "find_crossovers",
    "fit_cost_model",
    "load_calibration",
    "load_policy",
    "make_plan",
    "make_replanner",
    "save_calibration",
    "train",
]


class _Package(types.ModuleType):
    """This package: public names come from their home module when they are first asked for."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any public name
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(load(home), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - as for any object
        # The import system binds every submodule here; `autoplace.train` stays the function.
        if not (isinstance(value, types.ModuleType) and name in _HOME_OF):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(__all__)


sys.modules[__name__].__class__ = _Package
