"""``episodes.csv`` in a run folder: every training episode that ended, one a row.

| column | meaning |
|---|---|
| ``env_steps`` | env steps of the whole run by the episode's end |
| ``wall_s`` | seconds of the whole run by the end of the iteration in which it ended |
| ``env`` | index of its environment |
| ``return`` | undiscounted sum of its raw rewards |
| ``length`` | its steps |

A resumed run takes out what its checkpoint has not seen, so the file tells one history.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from autoplace.errors import RunError
from autoplace.files import write_bytes_atomic
from autoplace.train.callbacks import Callback, IterationReport, RunStart
from autoplace.train.log_file import LogFile

log = logging.getLogger(__name__)

FILE_NAME = "episodes.csv"
COLUMNS = ("env_steps", "wall_s", "env", "return", "length")
_HEADER = (",".join(COLUMNS) + "\n").encode()


class EpisodeLog(Callback):
    """Writes ``episodes.csv``."""

    def __init__(self) -> None:
        self._file: LogFile | None = None

    def on_start(self, start: RunStart) -> None:
        """Begin the file, or go on with it from where the run does."""
        assert start.run_dir is not None
        path = start.run_dir / FILE_NAME
        try:
            write_bytes_atomic(path, _HEADER + b"".join(_rows_up_to(path, start.env_steps)))
        except RunError as fault:
            log.warning("%s", fault)
            return
        self._file = LogFile(path)

    def on_iteration(self, report: IterationReport) -> None:
        """Write the episodes that ended in it."""
        if self._file is not None and report.episodes:
            rows = (
                f"{e.env_steps},{report.run_wall_s:.3f},{e.env},{e.episode_return:.9g},{e.length}\n"
                for e in report.episodes
            )
            self._file.append("".join(rows).encode())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _rows_up_to(path: Path, env_steps: int) -> list[bytes]:
    """The rows of a file that a checkpoint of ``env_steps`` has seen; a torn one is left out."""
    kept = []
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines(keepends=True):
            cells = line.split(b",")
            is_row = line.endswith(b"\n") and len(cells) == len(COLUMNS) and cells[0].isdigit()
            if is_row and int(cells[0]) <= env_steps:
                kept.append(line)
    return kept
