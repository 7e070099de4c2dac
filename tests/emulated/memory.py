"""Host memory seen as device memory, page-locked memory, and what is allocated.

A device tensor is an ordinary ``torch.Tensor`` over host memory that carries a device label. The
label is changed without a copy by passing the tensor through a DLPack capsule (DLPack 1.0,
``struct DLTensor { void* data; DLDevice { int32 type, int32 index } device; ... }``) and rewriting
the device in between; torch maps DLPack's ``kDLExtDev`` to its extension device.
"""

from __future__ import annotations

import bisect
import ctypes
import weakref

import numpy as np
import torch

DEVICE_TYPE = "emu"

_DLPACK_CPU, _DLPACK_EXT_DEV = 1, 12
_TYPE_OFFSET, _INDEX_OFFSET = 8, 12  # bytes into DLTensor, after the data pointer

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_int32_at = ctypes.c_int32.from_address


def _relabelled(tensor: torch.Tensor, dlpack_type: int, index: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(tensor)
    address = _capsule_pointer(capsule, b"dltensor")
    _int32_at(address + _TYPE_OFFSET).value = dlpack_type
    _int32_at(address + _INDEX_OFFSET).value = index
    return torch._C._from_dlpack(capsule)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory as a device tensor."""
    view = _relabelled(tensor, _DLPACK_CPU, 0)
    # DLPack knows nothing of lazy conjugation and negation.
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view


def device_view(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A tensor on device ``index`` over the same memory as a CPU tensor."""
    return _relabelled(tensor, _DLPACK_EXT_DEV, index)


def is_on_device(value: object) -> bool:
    """Whether ``value`` is a tensor on an emulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE


class DeviceMemory:
    """What is allocated on one device, against its limit.

    Counts whole storages, so views cost nothing, and gives them back when torch frees them.
    """

    def __init__(self, device: str, total_bytes: int) -> None:
        self.device = device
        self.total_bytes = total_bytes
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Count a new tensor's storage.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if not nbytes:
            return
        if self.allocated_bytes + nbytes > self.total_bytes:
            raise self.out_of_memory(nbytes)
        self.allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

        # torch keeps a storage's Python object exactly as long as the storage.
        def freed(reference: weakref.ref[torch.UntypedStorage]) -> None:
            if self._live.pop(id(reference), None) is not None:
                self.allocated_bytes -= nbytes

        reference = weakref.ref(storage, freed)
        self._live[id(reference)] = reference

    def out_of_memory(self, nbytes: int) -> torch.OutOfMemoryError:
        """The error that says that ``nbytes`` more do not fit."""
        return torch.OutOfMemoryError(
            f"{self.device} out of memory. Tried to allocate {nbytes / 2**20:.2f} MiB: "
            f"{self.allocated_bytes / 2**20:.2f} MiB of {self.total_bytes / 2**20:.2f} MiB "
            "are allocated."
        )


class PinnedMemory:
    """Page-locked host memory: which addresses are, as the driver of a real device knows."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}

    def allocate_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous page-locked tensor of ``tensor``'s shape and dtype, not initialised."""
        nbytes = tensor.numel() * tensor.element_size()
        block = np.empty(max(nbytes, 1), dtype=np.uint8)
        start = block.ctypes.data
        bisect.insort(self._starts, start)
        self._ends[start] = start + block.nbytes
        # The tensor below owns the block, so the block dies with the tensor's storage.
        weakref.finalize(block, self._release, start).atexit = False
        return torch.from_numpy(block)[:nbytes].view(tensor.dtype).view(tensor.shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a CPU tensor's memory is page-locked."""
        if not self._starts:
            return False
        address = tensor.untyped_storage().data_ptr()
        position = bisect.bisect_right(self._starts, address) - 1
        return position >= 0 and address < self._ends[self._starts[position]]

    def _release(self, start: int) -> None:
        del self._ends[start]
        self._starts.remove(start)
