"""An array in memory that a process and those that it starts both see. Needs no torch."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from multiprocessing.heap import Arena
from typing import Any

import numpy as np


class SharedArray:
    """Memory of its own, on a page boundary, without a name that could outlive the processes.

    It crosses, by reference, among the arguments of a process that is being started.

    Attributes:
        shape: of the array.
        dtype: numpy's name of its type.
    """

    def __init__(
        self, shape: Sequence[int], dtype: str, *, memory: np.ndarray | None = None
    ) -> None:
        """Allocate, or use memory of this process where what is started shares all of it."""
        self.shape, self.dtype = tuple(shape), dtype
        size = math.prod(self.shape) * np.dtype(dtype).itemsize
        self._memory: Any = _reserved(Arena(max(1, size))) if memory is None else memory

    @property
    def array(self) -> np.ndarray:
        """The array as this process sees it; not initialised by anyone."""
        if isinstance(self._memory, np.ndarray):
            return self._memory
        count = math.prod(self.shape)
        return np.frombuffer(self._memory.buffer, self.dtype, count).reshape(self.shape)


def _reserved(arena: Arena) -> Arena:
    """The same, its memory taken: a page that is missing later would kill the process.

    Raises:
        MemoryError: there is too little.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(arena.fd, 0, arena.size)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise MemoryError(
                    f"{arena.size} bytes of shared memory: no space left (/dev/shm)"
                ) from error
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV):
                raise
    return arena
