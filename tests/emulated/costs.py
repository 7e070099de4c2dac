"""What one torch operation has to do: floating-point operations, bytes, and rows of a matmul.

================== ============================================================================
operation           work
================== ============================================================================
views, ``detach``,  free: nothing is done and nothing is charged
``empty``, ...
matmul (m,k)@(k,n)  2 m k n operations (biases included, as in a fused multiply-add); operands
                    read once, result written once; ``rows`` = m. Batched: times the batch.
convolution, SDPA   torch's own count (``torch.utils.flop_counter``)
gather-like         bytes of the index, and the result both read and written; the table that is
                    gathered from is not counted, since only the rows asked for are read
scatter-like        bytes of index and source, and as many as the source written
overwriting         (``copy_``, ``fill_``, ``normal_``, ...) the destination is written, not read
everything else     one operation per element of the largest tensor; every tensor argument read
                    once, every result and every argument that is modified written once
================== ============================================================================

A multi-tensor operation (``_foreach_*``, ``_fused_*``) is one operation on all of its tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class Work(NamedTuple):
    """Floating-point operations, bytes moved, and rows of a matmul (0 where it is none)."""

    flops: float
    nbytes: float
    rows: float = 0.0


_FREE = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
    "detach",
    "detach_",
    "lift",
    "lift_fresh",
    "_local_scalar_dense",
    "item",
    "is_pinned",
    "record_stream",
    "is_same_size",
    "_has_compatible_shallow_copy_type",
    "_version",
    "requires_grad_",
    "is_nonzero",
    "sym_size",
    "sym_stride",
    "sym_numel",
    "sym_storage_offset",
    "size",
    "stride",
    "dim",
    "numel",
    "is_contiguous",
    "_efficientzerotensor",
    # in-place views
    "t_",
    "transpose_",
    "swapaxes_",
    "swapdims_",
    "squeeze_",
    "unsqueeze_",
    "as_strided_",
}
_OVERWRITING = {
    "copy_",
    "_copy_from",
    "_foreach_copy_",
    "fill_",
    "zero_",
    "_foreach_zero_",
    "uniform_",
    "normal_",
    "random_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
}
_GATHER_LIKE = {"index", "index_select", "gather", "take", "embedding"}
_SCATTER_LIKE = {
    "index_put_",
    "_index_put_impl_",
    "index_copy_",
    "index_add_",
    "scatter_",
    "scatter_add_",
    "index_fill_",
}


def _mm(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    return 2.0 * a.shape[0] * a.shape[1] * b.shape[1], a.shape[0]


def _bmm(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    return 2.0 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2], a.shape[1]


def _matvec(a: torch.Tensor, _b: torch.Tensor) -> tuple[float, float]:
    return 2.0 * a.numel(), a.shape[0]


# name -> (position of the left operand, flops and rows of left and right)
_MATMULS: dict[str, tuple[int, Callable[[Any, Any], tuple[float, float]]]] = {
    "mm": (0, _mm),
    "addmm": (1, _mm),
    "addmm_": (1, _mm),
    "_addmm_activation": (1, _mm),
    "bmm": (0, _bmm),
    "baddbmm": (1, _bmm),
    "baddbmm_": (1, _bmm),
    "mv": (0, _matvec),
    "addmv": (1, _matvec),
    "addmv_": (1, _matvec),
}


@dataclass(frozen=True, slots=True)
class _TensorArgument:
    position: int
    name: str
    is_read: bool
    is_written: bool


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What an operation's schema says about it, looked up once.

    Attributes:
        name: its name without overload.
        is_free: whether it moves no data.
        is_view: whether its result shares its argument's memory.
        is_composite: whether torch itself makes it up of other operations.
        tensors: the arguments that hold tensors.
    """

    name: str
    is_free: bool
    is_view: bool
    is_composite: bool
    tensors: tuple[_TensorArgument, ...]

    def tensor_arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[_TensorArgument, torch.Tensor]]:
        """Every tensor of a call, those in lists included, with the argument it belongs to."""
        for argument in self.tensors:
            if argument.position < len(args):
                value = args[argument.position]
            else:
                value = kwargs.get(argument.name)
            if isinstance(value, torch.Tensor):
                yield argument, value
            elif isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, torch.Tensor):
                        yield argument, item


@functools.cache
def op_info(op: Any) -> OpInfo:
    """The :class:`OpInfo` of an ``OpOverload``."""
    schema = op._schema
    name = schema.name.partition("::")[2]
    modifies = any(_is_written(a) for a in schema.arguments)
    is_view = not modifies and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    tensors = tuple(
        _TensorArgument(
            position=position,
            name=argument.name,
            # what out= names, and what an overwriting operation fills, is not read
            is_read=not (_is_written(argument) and (argument.kwarg_only or name in _OVERWRITING)),
            is_written=_is_written(argument),
        )
        for position, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type)
    )
    has_no_effect = not schema.returns and not modifies
    is_free = name in _FREE or is_view or has_no_effect or name.startswith("sym_")
    is_composite = op._can_decompose()
    return OpInfo(name, is_free, is_view, is_composite, tensors)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def size_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def work_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Work:
    """The work of one call of ``op``, from its arguments and its result."""
    info = op_info(op)
    results = [out] if isinstance(out, torch.Tensor) else list(_tensors_in(out))
    if info.name in _GATHER_LIKE:
        moved = sum(2 * size_bytes(t) for t in results)
        moved += sum(size_bytes(t) for a, t in info.tensor_arguments(args, kwargs) if a.position)
        return Work(float(sum(t.numel() for t in results)), float(moved))
    if info.name in _SCATTER_LIKE:
        others = [t for a, t in info.tensor_arguments(args, kwargs) if a.position]
        source = others[-1] if others else None
        moved = sum(size_bytes(t) for t in others) + (size_bytes(source) if others else 0)
        return Work(float(source.numel() if source is not None else 0), float(moved))

    nbytes, largest, writes_argument = 0, 0, False
    for argument, tensor in info.tensor_arguments(args, kwargs):
        nbytes += size_bytes(tensor) * (argument.is_read + argument.is_written)
        largest = max(largest, tensor.numel())
        writes_argument |= argument.is_written
    if not writes_argument:
        nbytes += sum(size_bytes(t) for t in results)
        largest = max([largest, *(t.numel() for t in results)])
    matmul = _MATMULS.get(info.name)
    if matmul is not None:
        left, count = matmul
        flops, rows = count(args[left], args[left + 1])
        return Work(flops, float(nbytes), rows)
    counter = flop_registry.get(op.overloadpacket)
    if counter is not None:
        flops = float(counter(*args, **kwargs, out_val=out))
        rows = results[0].numel() / results[0].shape[1] if results and results[0].dim() > 1 else 0
        return Work(flops, float(nbytes), rows)
    return Work(float(largest), float(nbytes))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


# --------------------------------------------------------------------------------------------------
# Dry runs

# Below this the arithmetic is cheaper than working out the result's shape.
_DRY_FLOPS = 2e6
_DRY_BYTES = 4e6
# These read values to decide what they return, or are cheap and must leave defined memory behind.
_NEVER_DRY = {"fill_", "zero_", "zeros", "zeros_like", "full", "arange", "nonzero", "randperm"}
_DRY_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def dry_result(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """(True, a result of the right shape) of a heavy operation without its arithmetic.

    New results and overwritten arguments are zeros, modified arguments stay as they are.
    (False, None) for an operation that is light, or that cannot be skipped.
    """
    info = op_info(op)
    if info.is_free or info.name in _NEVER_DRY or _DRY_TAGS & set(op.tags):
        return False, None
    if info.name.startswith("linalg_"):  # their results' layouts are not worth guessing
        return False, None
    tensors = list(info.tensor_arguments(args, kwargs))
    if info.name in _MATMULS:
        left, count = _MATMULS[info.name]
        heavy = count(args[left], args[left + 1])[0] >= _DRY_FLOPS
    else:
        heavy = sum(size_bytes(t) for _, t in tensors) >= _DRY_BYTES
    if not heavy or (tensors and tensors[0][1].dtype == torch.bool):
        return False, None
    written = [t for a, t in tensors if a.is_written]
    if written:
        for argument, tensor in tensors:
            # Overwritten, often for the first time since `empty` gave it.
            if argument.is_written and not argument.is_read:
                tensor.zero_()
        if not op._schema.returns:
            return True, None
        return True, written[0] if len(written) == 1 else tuple(written)
    if not tensors:
        return False, None
    key = op, _outline(args), _outline(kwargs)
    if key not in _DRY_RESULTS:
        try:
            _DRY_RESULTS[key] = op(*_to_meta(args), **_to_meta(dict(kwargs)))
        except (NotImplementedError, RuntimeError):
            _DRY_RESULTS[key] = NotImplemented
    shape_only = _DRY_RESULTS[key]
    if shape_only is NotImplemented:
        return False, None
    return True, _zeros_like_meta(shape_only)


_DRY_RESULTS: dict[Any, Any] = {}  # on the meta device, by operation and outline of its arguments


def _outline(value: Any) -> Any:
    """What an operation's result looks like follows from this, which can be a key."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_outline(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, _outline(item)) for name, item in value.items())
    return type(value), value if isinstance(value, Hashable) else repr(value)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_to_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    return value


def _zeros_like_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # numpy's zeros are pages that the system hands out only once they are touched.
        nbytes = max(1, _extent(value)) * value.element_size()
        flat = torch.from_numpy(np.zeros(nbytes, np.uint8)).view(value.dtype)
        return flat.as_strided(value.shape, value.stride())
    if isinstance(value, (list, tuple)):
        return type(value)(_zeros_like_meta(item) for item in value)
    return value


def _extent(value: torch.Tensor) -> int:
    if math.prod(value.shape) == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
