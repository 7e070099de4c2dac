"""Copies to, from and between devices, and the page-locked memory that some of them need.

A non-blocking copy to the host leaves garbage behind until the host has waited for it, and one from
the host complains at that wait if its source was changed in the meantime: what reads or writes too
early on a real device is caught here.
"""

from __future__ import annotations

from collections.abc import Callable
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
    run = runtime()
    nbytes = target.numel() * source.element_size()
    dry = run.clock.dry and nbytes >= _HEAVY_BYTES
    source_host = host_view(source) if is_on_device(source) else source
    target_host = host_view(target) if is_on_device(target) else target
    if is_on_device(source) and is_on_device(target):
        here, there = check_index(source.device.index), check_index(target.device.index)
        if not dry:
            target_host.copy_(source_host)
        if here == there:
            charge_kernel(
                here, work_of(aten.copy_.default, (target_host, source_host), {}, target_host)
            )
        else:
            streams = (run.current_stream(here), run.current_stream(there))
            run.clock.copy_between(here, there, streams, nbytes)
        return target
    to_device = is_on_device(target)
    device, host = (target, source) if to_device else (source, target)
    index, is_pinned = check_index(device.device.index), pinned.holds(host)
    stream, direction = run.current_stream(index), "h2d" if to_device else "d2h"
    blocking = not (non_blocking and is_pinned)
    if is_pinned and not to_device:
        run.clock.finish_sends(index, stream)
    if not dry:
        target_host.copy_(source_host)
    end = run.clock.copy(index, stream, nbytes, direction, pinned=is_pinned, blocking=blocking)
    if not blocking and not dry:
        finish = _source_is_unchanged(host, index) if to_device else _arrives_later(host)
        run.clock.add_pending(index, stream, direction, end, finish)
    return target


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
                f"page-locked memory of shape {tuple(source.shape)} was overwritten while a "
                f"non-blocking copy to {DEVICE_TYPE}:{index} could still read it: wait for the "
                "copy (an event, a stream or the device) before reusing its source"
            )

    return check


def local_scalar_dense(tensor: torch.Tensor) -> Any:
    run = runtime()
    index = check_index(tensor.device.index)
    run.clock.read_back(index, run.current_stream(index))
    return aten._local_scalar_dense(host_view(tensor))


def pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    if not is_active():
        raise RuntimeError("Cannot pin memory without an accelerator")
    return pinned.allocate_like(tensor).copy_(tensor)


def cannot_pin(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    raise RuntimeError(f"cannot pin a tensor on {tensor.device}: only CPU memory can be pinned")
