"""A file that a run writes to as it goes on, and that never ends the run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)


class LogFile:
    """Appends to a file; where that fails once, it says so and the file is left as it is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        try:
            self._file = path.open("ab")
        except OSError as error:
            self._give_up(error)

    def append(self, data: bytes) -> None:
        """Write ``data`` and hand it to the operating system."""
        if self._file is None:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning(
            "cannot write %s: %s; training goes on without it", self._path, error.strerror or error
        )
        self.close()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:  # what it still held in memory has nowhere to go
                log.debug("cannot close %s", self._path, exc_info=True)
