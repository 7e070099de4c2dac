"""How the trainer's own steps are executed: the names, and where each may be used.

``eager`` runs everything, as torch operations with gradients from autograd. ``numpy`` runs policy
steps, value passes and gradient steps on the CPU as numpy operations, with the gradient of the loss
in closed form: where networks are small, most of an eager step is overhead per operation, and
numpy's is lower. It is for perceptrons; what runs on an accelerator stays eager beside it.
"""

from __future__ import annotations

from autoplace.device_names import CPU

EAGER = "eager"
NUMPY = "numpy"
ENGINES = (EAGER, NUMPY)


def supports(engine: str, *, is_plain: bool) -> bool:
    """Whether ``engine`` can run a network; ``is_plain`` where that is two perceptrons apart."""
    return engine == EAGER or is_plain


def engine_on(engine: str, device: str) -> str:
    """The engine of the side of a placement that is on ``device``."""
    return engine if device == CPU else EAGER
