"""The folder in which calibrations and runs are kept."""

from __future__ import annotations

import functools
import getpass
import logging
import os
import tempfile
from pathlib import Path

import platformdirs

from autoplace.errors import RunError

log = logging.getLogger(__name__)


def data_dir() -> Path:
    """The folder of everything that is kept.

    ``AUTOPLACE_HOME``, else the platform's folder for user data. Where that cannot be written (no
    home, a read-only one), a folder of this user's among the temporary files, with one warning.
    """
    wanted = wanted_dir()
    if wanted is not None and _is_writable(wanted):
        return wanted
    return _fallback_dir(wanted)


def runs_dir() -> Path:
    """The folder in which a run is kept for which none is named."""
    return data_dir() / "runs"


def wanted_dir() -> Path | None:
    """The folder that was asked for, ``None`` where there is no home to put it in."""
    named = os.environ.get("AUTOPLACE_HOME", "")
    if named.strip():
        return Path(os.path.expanduser(named)).absolute()
    try:
        folder = Path(platformdirs.user_data_dir("autoplace", appauthor=False))
    except RuntimeError:  # no home is known at all
        return None
    home = Path(os.path.expanduser("~"))
    # A home that does not exist means "none" (system users have /nonexistent): it is not made.
    homeless = not home.is_absolute() or (home in folder.parents and not home.is_dir())
    return None if homeless else folder


@functools.cache
def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@functools.cache
def _fallback_dir(wanted: Path | None) -> Path:
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    try:
        folder = Path(tempfile.gettempdir()) / f"autoplace-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if hasattr(os, "getuid") and folder.lstat().st_uid != user:  # somebody else's name for it
            folder = Path(tempfile.mkdtemp(prefix="autoplace-"))
    except OSError as error:
        raise RunError(
            f"no folder can be written, not even for temporary files ({error.strerror or error}): "
            "set AUTOPLACE_HOME to one that can"
        ) from error
    log.warning(
        "%s cannot be written: using %s, which may not outlive a restart; "
        "set AUTOPLACE_HOME to a folder that can",
        wanted if wanted is not None else "the home folder",
        folder,
    )
    return folder
