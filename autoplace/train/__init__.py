"""Running a plan: placement without algorithm.

Importing this package imports none of its modules: the processes of a run need few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoplace.importing import load

if TYPE_CHECKING:
    from autoplace.train.callbacks import Callback, IterationReport, RunStart
    from autoplace.train.evaluation import EvaluationResult, evaluate
    from autoplace.train.interrupt import StopRequested
    from autoplace.train.loop import train
    from autoplace.train.policy import Policy, load_policy

_HOMES = {
    "Callback": "callbacks",
    "EvaluationResult": "evaluation",
    "IterationReport": "callbacks",
    "Policy": "policy",
    "RunStart": "callbacks",
    "StopRequested": "interrupt",
    "evaluate": "evaluation",
    "load_policy": "policy",
    "train": "loop",
}

__all__ = [
    "Callback",
    "EvaluationResult",
    "IterationReport",
    "Policy",
    "RunStart",
    "StopRequested",
    "evaluate",
    "load_policy",
    "train",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(load(f"{__name__}.{_HOMES[name]}"), name)
