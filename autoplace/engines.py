"""How the trainer's own steps are executed: the names, and where each may be used.

``eager`` runs everything, as torch operations with gradients from autograd. ``numpy`` runs policy
steps, value passes and gradient steps on the CPU as numpy operations, with the gradient of the loss
in closed form: where networks are small, most of an eager step is overhead per operation, and
numpy's is lower. It is for perceptrons; what runs on an accelerator stays eager beside it.
"""

from __future__ import annotations

from autoplace.device_names import CPU, is_accelerator

EAGER = "eager"
NUMPY = "numpy"
ENGINES = (EAGER, NUMPY)

FP32 = "fp32"
# How gradient steps compute, and the element type that their tasks are timed under. Weights,
# Adam's moments, policy steps and advantages are float32 with each of them.
PRECISIONS = {FP32: "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}


def supports(engine: str, *, is_plain: bool) -> bool:
    """Whether ``engine`` can run a network; ``is_plain`` where that is two perceptrons apart."""
    return engine == EAGER or is_plain


def engine_on(engine: str, device: str) -> str:
    """The engine of the side of a placement that is on ``device``."""
    return engine if device == CPU else EAGER


def precision_problem(precision: str, learn_device: str) -> str | None:
    """Why gradient steps on a device cannot compute so; ``None`` where they can."""
    if precision == "tf32" and not is_accelerator(learn_device):
        return "the CPU has no tf32"
    return None
