"""How torch's operations run on the emulated device.

One boxed fallback serves the device's dispatch key: it hands the operation CPU tensors over the
same memory, lets the CPU kernel compute, relabels what is new, and charges the clock. A few
operations cannot pass through it and have kernels of their own below.

View operations run the CPU's view kernel on the device tensor itself: it only makes a new tensor
over the same storage. A view made of a relabelled tensor would start at offset 0 of another
storage, and autograd, which replays views by storage and offset, would write to the wrong place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.emulated import copies
from tests.emulated.costs import dry_result, op_info, size_bytes, work_of
from tests.emulated.memory import DEVICE_TYPE, host_view
from tests.emulated.runtime import Runtime, adopt, charge_kernel, check_index, runtime

aten = torch.ops.aten
KEY = "PrivateUse1"
_CPU_KEY = torch._C.DispatchKey.CPU
_CPU_DEVICE = torch.device("cpu")


# --------------------------------------------------------------------------------------------------
# The fallback


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the fallback has to know of an operation, read from its schema once."""

    is_view: bool
    is_free: bool
    returned_arguments: tuple[tuple[int, str] | None, ...]  # the argument that a return value is
    out_names: tuple[str, ...]
    single_tensors: tuple[int, ...]  # positions of arguments that are one tensor
    written_positions: tuple[int, ...]
    takes_host_indices: bool
    is_random: bool
    generator: tuple[int, str] | None
    waits_for_result: bool
    has_returns: bool


@functools.cache
def _plan(op: Any) -> _Plan:
    schema, info = op._schema, op_info(op)
    written = [
        (i, a) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
    ]
    returned = []
    for value in schema.returns:
        match = None
        if value.alias_info is not None and value.alias_info.is_write:
            names = set(value.alias_info.before_set)
            for position, argument in written:
                if names & set(argument.alias_info.before_set):
                    match = (position, argument.name)
                    break
        returned.append(match)
    generator = next(
        ((i, a.name) for i, a in enumerate(schema.arguments) if "Generator" in str(a.type)), None
    )
    reads_back = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return _Plan(
        is_view=info.is_view,
        is_free=info.is_free,
        returned_arguments=tuple(returned),
        out_names=tuple(a.name for _, a in written if a.kwarg_only),
        single_tensors=tuple(i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor"),
        written_positions=tuple(i for i, a in written if not a.kwarg_only),
        takes_host_indices=info.name in {"index", "index_put", "index_put_", "_index_put_impl_"},
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        generator=generator,
        waits_for_result=bool(reads_back & set(op.tags)),
        has_returns=bool(schema.returns),
    )


class _Arguments:
    """The arguments of one call, moved to the CPU, and what was noticed on the way."""

    def __init__(
        self, op: Any, plan: _Plan, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._op = op
        self.index: int | None = None
        self.on_device: list[torch.Tensor] = []
        self.host_indices: list[torch.Tensor] = []
        self._takes_host_indices = plan.takes_host_indices
        self._misplaced: torch.Tensor | None = None
        self.args = [self._lower(value) for value in args]
        self.kwargs = {name: self._lower(value) for name, value in kwargs.items()}
        if self.index is None:
            raise RuntimeError(f"{op} reached the emulated device without anything on it")
        for position in plan.written_positions:
            value = args[position] if position < len(args) else None
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self._misplaced = value
        if self._misplaced is not None:
            raise self._mismatch(self._misplaced.device)

    def _mismatch(self, other: torch.device) -> RuntimeError:
        return RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{DEVICE_TYPE}:{self.index} and {other}! (when checking the arguments of {self._op})"
        )

    def _see(self, device: torch.device) -> None:
        index = device.index or 0
        if self.index is None:
            self.index = check_index(index)
        elif self.index != index:
            raise self._mismatch(device)

    def _lower(self, value: Any, *, in_list: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            device = value.device
            if device.type == DEVICE_TYPE:
                self._see(device)
                self.on_device.append(value)
                return host_view(value)
            if device.type != "cpu":
                raise RuntimeError(f"{self._op} mixes {DEVICE_TYPE} with a tensor on {device}")
            if value.dim() > 0:  # a CPU tensor of one number may join in, as it may on CUDA
                if in_list and self._takes_host_indices:
                    self.host_indices.append(value)
                else:
                    self._misplaced = value
            return value
        if isinstance(value, (list, tuple)):
            return [self._lower(item, in_list=True) for item in value]
        if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            self._see(value)
            return _CPU_DEVICE
        return value


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    plan = _plan(op)
    if plan.is_view:
        return op._op_dk(_CPU_KEY, *args, **kwargs)
    run = runtime()
    call = _Arguments(op, plan, args, kwargs)
    index = call.index
    assert index is not None
    copies.check_arrived(index, call.on_device)
    for tensor in call.host_indices:  # host indices are copied over first
        stream = run.current_stream(index)
        run.clock.copy(index, stream, size_bytes(tensor), "h2d", pinned=False, blocking=True)
    resized = _fresh_outputs(plan, kwargs, call)
    result = _compute(op, plan, call, index, run)
    for name, fresh in resized.items():
        _fill_output(kwargs[name], fresh, index)

    single = not isinstance(result, tuple)
    values = (result,) if single else result
    returned = []
    for value, argument in zip(values, plan.returned_arguments, strict=False):
        if argument is not None:
            position, name = argument
            returned.append(args[position] if position < len(args) else kwargs[name])
        elif isinstance(value, torch.Tensor):
            returned.append(adopt(value, index))
        elif isinstance(value, (list, tuple)):
            returned.append([adopt(v, index) if isinstance(v, torch.Tensor) else v for v in value])
        else:
            returned.append(value)
    if not plan.is_free:
        charge_kernel(index, work_of(op, call.args, call.kwargs, result))
        if plan.waits_for_result and _shape_depends_on_data(op, call):
            run.clock.read_back(index, run.current_stream(index))
    if not plan.has_returns:
        return None
    return returned[0] if single else tuple(returned)


def _fresh_outputs(
    plan: _Plan, kwargs: Mapping[str, Any], call: _Arguments
) -> dict[str, torch.Tensor]:
    """Replace empty ``out=`` tensors, which the CPU kernel may have to enlarge, by CPU ones."""
    fresh = {}
    for name in plan.out_names:
        out = kwargs.get(name)
        if isinstance(out, torch.Tensor) and (out.numel() == 0 or out.dim() == 0):
            call.kwargs[name] = fresh[name] = torch.empty(0, dtype=out.dtype)
    return fresh


def _fill_output(out: torch.Tensor, fresh: torch.Tensor, index: int) -> None:
    if out.shape == fresh.shape and out.numel():
        host_view(out).copy_(fresh)
    else:
        adopted = adopt(fresh, index)
        _set_storage(out, adopted.untyped_storage(), 0, adopted.size(), adopted.stride())


def _compute(op: Any, plan: _Plan, call: _Arguments, index: int, run: Runtime) -> Any:
    if run.clock.dry:
        skipped, result = dry_result(op, call.args, call.kwargs)
        if skipped:
            return result
    # A number that torch wrapped as a tensor arrives unwrapped; the packet finds the overload.
    function = op
    for position in plan.single_tensors:
        if position < len(call.args) and isinstance(call.args[position], (int, float, complex)):
            function = op.overloadpacket
            break
    try:
        if plan.is_random:
            return _draw(function, plan, call, index, run)
        return function(*call.args, **call.kwargs)
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error):
            raise run.memories[index].out_of_memory(run.memories[index].total_bytes) from error
        raise


def _draw(function: Any, plan: _Plan, call: _Arguments, index: int, run: Runtime) -> Any:
    """Compute a random operation from the device's own random state."""
    if plan.generator is not None:
        position, name = plan.generator
        given = call.args[position] if position < len(call.args) else call.kwargs.get(name)
        if given is None:
            if position < len(call.args):
                call.args[position] = run.generators[index]
            else:
                call.kwargs[name] = run.generators[index]
            return function(*call.args, **call.kwargs)
        owner = run.generator_devices.get(given._cdata)
        found = str(owner.device) if owner is not None else "cpu"
        if found != f"{DEVICE_TYPE}:{index}":
            raise RuntimeError(
                f"Expected a '{DEVICE_TYPE}:{index}' device type for generator but found '{found}'"
            )
        return function(*call.args, **call.kwargs)
    # The operation draws from the CPU's default generator: lend it the device's state.
    host_state = torch.default_generator.get_state()
    torch.default_generator.set_state(run.generators[index].get_state())
    try:
        return function(*call.args, **call.kwargs)
    finally:
        run.generators[index].set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(host_state)


def _shape_depends_on_data(op: Any, call: _Arguments) -> bool:
    if op_info(op).name != "index":
        return True
    masks = (torch.bool, torch.uint8)
    return any(isinstance(i, torch.Tensor) and i.dtype in masks for i in call.args[1])


def _foreach_copy(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False
) -> None:
    devices = {t.device for t in (*targets, *sources)}
    if len(devices) == 1:
        _fallback(aten._foreach_copy_.default, targets, sources, non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


# --------------------------------------------------------------------------------------------------
# Storage


def _set_storage(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int] = (),
) -> torch.Tensor:
    operation = aten.set_.source_Storage_storage_offset
    return operation._op_dk(_CPU_KEY, tensor, storage, offset, size, stride)


def _set_whole_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    return _set_storage(tensor, storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def _set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    offset, size, stride = source.storage_offset(), source.size(), source.stride()
    return _set_storage(tensor, source.untyped_storage(), offset, size, stride)


def _resize(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: Any = None
) -> torch.Tensor:
    shape = torch.empty(tuple(size), device="meta")
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    available = storage.nbytes() - offset * tensor.element_size()
    if shape.numel() * tensor.element_size() > available:
        index = check_index(tensor.device.index)
        larger = torch.empty(shape.numel(), dtype=tensor.dtype)
        larger[: tensor.numel()].copy_(host_view(tensor).reshape(-1))
        storage, offset = adopt(larger, index).untyped_storage(), 0
    return _set_storage(tensor, storage, offset, shape.size(), shape.stride())


def _zero_tensor(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


# --------------------------------------------------------------------------------------------------
# Convolutions: torch has an operation of its own for devices that it does not know


def _convolution(*args: Any) -> torch.Tensor:
    return _fallback(aten.convolution.default, *args)


def _convolution_backward(
    grad: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *args: Any
) -> Any:
    *options, wanted = args
    bias_sizes = [grad.shape[1]] if wanted[2] else None
    return _fallback(
        aten.convolution_backward.default, grad, image, weight, bias_sizes, *options, wanted
    )


_KERNELS: dict[str, Callable[..., Any]] = {
    "_copy_from": copies.copy_from,
    "_copy_from_and_resize": copies.copy_from,
    "_foreach_copy_": _foreach_copy,
    "_local_scalar_dense": copies.local_scalar_dense,
    "set_.source_Storage": _set_whole_storage,
    "set_.source_Storage_storage_offset": _set_storage,
    "set_.source_Tensor": _set_tensor,
    "resize_": _resize,
    "_efficientzerotensor": _zero_tensor,
    "record_stream": lambda tensor, stream: None,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    "_pin_memory": copies.cannot_pin,
    "is_pinned": lambda tensor, device=None: False,
}
_CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_pin_memory": copies.pin_memory,
    "is_pinned": lambda tensor, device=None: copies.pinned.holds(tensor),
}

# torch.tensor(..., device=...) bypasses dispatch modes without leaving them, and torch then looks
# for a kernel by the operation's own name, where a fallback has none.
_BY_NAME = ("empty.memory_format", "empty_strided")

_libraries: list[torch.library.Library] = []  # registrations live as long as these objects


def register_kernels() -> None:
    """Register everything above with torch's dispatcher; once per process."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, KEY)
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, KEY)
    for name, kernel in _CPU_KERNELS.items():
        library.impl(name, kernel, "CPU")
    for name in (*_names_to_send_whole(), *_BY_NAME):
        base, _, overload = name.partition(".")
        operation = getattr(getattr(aten, base), overload or "default")
        library.impl(name, functools.partial(_fallback, operation), KEY)
    _libraries.extend((everything, library))


def _names_to_send_whole() -> list[str]:
    """Operations that torch would take apart before they reach the fallback.

    Structured operations would become an allocation and their ``out=`` form, multi-tensor
    operations one launch per tensor.
    """
    whole = [
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(
            "CompositeExplicitAutogradNonFunctional"
        )
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    ]
    whole += [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::_foreach_") and not name.endswith("out")
    ]
    names = [name.partition("::")[2] for name in whole if name.startswith("aten::")]
    return [name for name in dict.fromkeys(names) if name not in _KERNELS]
