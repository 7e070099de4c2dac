"""Copies to, from and between devices, and the page-locked memory that some of them need.

A non-blocking copy to the host leaves garbage behind until the host has waited for it, and one from
the host complains at that wait if its source was changed in the meantime: what reads or writes too
early on a real device is caught here. So is device work that uses what another stream is still
bringing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.emulated.costs import work_of
from tests.emulated.memory import DEVICE_TYPE, PinnedMemory, host_view, is_on_device
from tests.emulated.runtime import charge_kernel, check_index, is_active, runtime

aten = torch.ops.aten

# Skipped in a dry run, from this size on.
_HEAVY_BYTES = 1 << 20

pinned = PinnedMemory()


def copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy ``source`` to ``target``, at least one of which is on a device."""
    if is_on_device(source):
        check_arrived(source.device.index, [source])
    if is_on_device(source) and is_on_device(target):
        _copy_on_devices(source, target)
    else:
        _cross(source, target, non_blocking)
    return target


def check_arrived(index: int, tensors: Iterable[torch.Tensor]) -> None:
    """Check that the current stream of a device may use ``tensors`` on it."""
    run = runtime()
    if run.clock.devices[index].pending:
        addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        run.clock.check_arrived(index, run.current_stream(index), addresses)


def _copy_on_devices(source: torch.Tensor, target: torch.Tensor) -> None:
    run = runtime()
    here, there = check_index(source.device.index), check_index(target.device.index)
    source_host, target_host = host_view(source), host_view(target)
    if _skips(source, target):
        target_host.zero_()  # as below
    else:
        target_host.copy_(source_host)
    if here == there:
        arguments = (target_host, source_host)
        charge_kernel(here, work_of(aten.copy_.default, arguments, {}, target_host))
    else:
        streams = (run.current_stream(here), run.current_stream(there))
        run.clock.copy_between(here, there, streams, _bytes_moved(source, target))


def _cross(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    run = runtime()
    to_device = is_on_device(target)
    device, host = (target, source) if to_device else (source, target)
    index, is_pinned = check_index(device.device.index), pinned.holds(host)
    stream, direction = run.current_stream(index), "h2d" if to_device else "d2h"
    unified = run.clock.devices[index].spec.unified_memory
    blocking = not (non_blocking and (is_pinned or unified))
    if not to_device:
        run.clock.finish_sends(index, stream)
    if _skips(source, target):
        # Defined, if not what was sent: a copy is often the first to write to its target.
        (host_view(device) if to_device else host).zero_()
    else:
        on_host = host_view(device)
        on_host.copy_(host) if to_device else host.copy_(on_host)
    nbytes = _bytes_moved(source, target)
    end_s = run.clock.copy(index, stream, nbytes, direction, pinned=is_pinned, blocking=blocking)
    if blocking or _skips(source, target):
        return
    if to_device:
        address = target.untyped_storage().data_ptr()
        check = _source_is_unchanged(host, index)
        run.clock.add_pending(index, stream, end_s, check, address=address)
    else:
        run.clock.add_pending(index, stream, end_s, _arrives_later(host))


def _bytes_moved(source: torch.Tensor, target: torch.Tensor) -> int:
    return target.numel() * source.element_size()


def _skips(source: torch.Tensor, target: torch.Tensor) -> bool:
    return runtime().clock.dry and _bytes_moved(source, target) >= _HEAVY_BYTES


def _arrives_later(target: torch.Tensor) -> Callable[[], None]:
    """Spoil what a non-blocking copy brings to the host, until the returned function is called."""
    target = target.detach()
    arriving = target.clone()
    if target.dtype == torch.bool:
        target.logical_not_()
    elif target.is_floating_point() or target.is_complex():
        target.fill_(float("nan"))
    else:
        target.fill_(torch.iinfo(target.dtype).min or torch.iinfo(target.dtype).max)

    def arrive() -> None:
        target.copy_(arriving)

    return arrive


def _source_is_unchanged(source: torch.Tensor, index: int) -> Callable[[], None]:
    """Check, when the returned function is called, that the host left the source alone."""
    source = source.detach()
    sent = source.clone()

    def check() -> None:
        if not torch.equal(source.nan_to_num(), sent.nan_to_num()):
            raise RuntimeError(
                f"host memory of shape {tuple(source.shape)} was overwritten while a "
                f"non-blocking copy to {DEVICE_TYPE}:{index} could still read it: wait for the "
                "copy (an event, a stream or the device) before reusing its source"
            )

    return check


def local_scalar_dense(tensor: torch.Tensor) -> Any:
    """The value of a tensor of one number, for which the host waits."""
    run = runtime()
    index = check_index(tensor.device.index)
    check_arrived(index, [tensor])
    run.clock.read_back(index, run.current_stream(index))
    return aten._local_scalar_dense(host_view(tensor))


def pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A page-locked copy of a CPU tensor."""
    if not is_active():
        raise RuntimeError("Cannot pin memory without an accelerator")
    return pinned.allocate_like(tensor).copy_(tensor)


def cannot_pin(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Refuse to page-lock device memory."""
    raise RuntimeError(f"cannot pin a tensor on {tensor.device}: only CPU memory can be pinned")
