"""Automatic mixed precision on the emulated device, by the rules that torch has for CUDA.

Unlike torch's own, this casts a weight anew at every use: nothing is cached in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.emulated.memory import DEVICE_TYPE, is_on_device

_KEY = "AutocastPrivateUse1"
_LOWER_PRECISION = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "mv",
    "addmv",
    "addr",
    "matmul",
    "linear",
    "prelu",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "convolution",
    "scaled_dot_product_attention",
)
_FULL_PRECISION = (
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "acos",
    "asin",
    "cosh",
    "sinh",
    "tan",
    "erfinv",
    "reciprocal",
    "rsqrt",
    "softplus",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "layer_norm",
    "group_norm",
    "cosine_similarity",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "nll_loss",
    "kl_div",
    "binary_cross_entropy_with_logits",
    "logsumexp",
    "dist",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "sum",
    "sum.dim_IntList",
    "prod",
    "prod.dim_int",
    "cumsum",
    "cumprod",
    "softmax.int",
    "log_softmax.int",
    "linalg_vector_norm",
)

_libraries: list[torch.library.Library] = []


def register_autocast() -> None:
    """Register the casts with torch's dispatcher; once per process."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    library = torch.library.Library("aten", "IMPL")
    for names, dtype in ((_LOWER_PRECISION, None), (_FULL_PRECISION, torch.float32)):
        for name in names:
            base, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, base), overload or "default")
            library.impl(name, _casting(operation, dtype), _KEY)
    _libraries.extend((everything, library))


def _casting(operation: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    """``operation`` on arguments cast to ``dtype``, or to the block's dtype."""
    own_key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(own_key):
            wanted = dtype or torch.get_autocast_dtype(DEVICE_TYPE)

            def cast(value: Any) -> Any:
                castable = is_on_device(value) and value.is_floating_point()
                if not castable or value.dtype in (wanted, torch.float64):
                    return value
                return value.to(wanted)

            args, kwargs = tree_map(cast, (args, kwargs))
            return operation(*args, **kwargs)

    return call
