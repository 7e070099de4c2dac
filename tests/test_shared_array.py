"""Memory that processes share is taken when it is asked for."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from autoplace.shared_array import SharedArray


def test_an_array_is_written_and_read_through_every_view() -> None:
    shared = SharedArray((3, 2), "float32")
    shared.array[:] = np.arange(6).reshape(3, 2)
    assert shared.array.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system reserves nothing")
def test_too_little_shared_memory_is_an_error_and_no_later_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match="bytes of shared memory: no space left"):
        SharedArray((3, 2), "float32")


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system reserves nothing")
def test_a_file_system_that_cannot_reserve_is_taken_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot(fd: int, start: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    assert SharedArray((2,), "int64").array.shape == (2,)
