"""How the trainer's own steps are executed: the names, and where each may be used.

``eager`` runs everything, as torch operations with gradients from autograd.

``numpy`` runs policy steps, value passes and gradient steps on the CPU as numpy operations, with
the gradient of the loss in closed form: where networks are small, most of an eager step is overhead
per operation, and numpy's is lower. It is for perceptrons; what runs on an accelerator stays eager
beside it.

``compile`` runs policy steps, and the passes and the loss of gradient steps, as ``torch.compile``
makes them. Making them takes seconds to minutes, so it is timed and considered only for a network
that it was named for.

``graph`` records the policy step and the gradient step of an accelerator once and replays each with
a single call; what runs on the CPU beside it is ``numpy`` where it can be.

A run compares every engine but ``eager`` with ``eager`` in its first steps and goes on without it
where it computes something else, fails or is slower (:mod:`autoplace.ppo.trial`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoplace.device_names import CPU, is_accelerator

EAGER = "eager"
NUMPY = "numpy"
COMPILE = "compile"
GRAPH = "graph"
ENGINES = (EAGER, NUMPY, COMPILE, GRAPH)
# Engines that are timed for a network where they are named, and for no other.
TIMED_WHERE_NAMED = (COMPILE,)

FP32 = "fp32"
# How gradient steps compute, and the element type that their tasks are timed under. Weights,
# Adam's moments, policy steps and advantages are float32 with each of them.
PRECISIONS = {FP32: "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of an engine in the first steps of a run.

    Attributes:
        engine: that was tried.
        step: ``policy step`` or ``gradient step``.
        dropped_because: why the run goes on eager, ``None`` where the engine is kept.
        one_off_s: seconds that its first step took beyond what another one takes.
        engine_s: least seconds of a step, 0 where none was completed.
        eager_s: the same of an eager one.
    """

    engine: str
    step: str
    dropped_because: str | None
    one_off_s: float
    engine_s: float
    eager_s: float

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return {name: getattr(self, name) for name in self.__slots__}


def supports(engine: str, *, is_plain: bool) -> bool:
    """Whether ``engine`` can run a network; ``is_plain`` where that is two perceptrons apart."""
    return engine != NUMPY or is_plain


def engine_on(engine: str, device: str, *, is_plain: bool = True) -> str:
    """The engine of the side of a placement that is on ``device``, for a network that may be plain.

    Args:
        engine: of the placement.
        device: canonical name or type of a device.
        is_plain: whether the network is two perceptrons apart.
    """
    if engine == GRAPH:
        return GRAPH if device != CPU else NUMPY if is_plain else EAGER
    return EAGER if engine == NUMPY and device != CPU else engine


def passes_engine(engine: str, device: str, *, is_plain: bool = True) -> str:
    """The engine of passes over whole rollouts, given as :func:`engine_on` is.

    They are few and large, so ``compile`` and ``graph`` leave them as they are.
    """
    return NUMPY if engine_on(engine, device, is_plain=is_plain) == NUMPY else EAGER


def precision_problem(precision: str, learn_device: str) -> str | None:
    """Why gradient steps on a device cannot compute so; ``None`` where they can."""
    if precision == "tf32" and not is_accelerator(learn_device):
        return "the CPU has no tf32"
    return None
