"""Running a plan: placement without algorithm."""

from autoplace.train.callbacks import Callback, IterationReport, RunStart
from autoplace.train.evaluation import EvaluationResult, evaluate
from autoplace.train.interrupt import StopRequested
from autoplace.train.loop import train
from autoplace.train.policy import Policy, load_policy

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
