"""Files that are never half written, JSON that is read with one clear line of complaint, and locks.

What is written replaces what was there in one step: a temporary file in the same folder, forced to
the disk, then renamed. Whoever reads sees the old content or the new; an interruption, a full disk
or a kill leaves the old. Text is UTF-8 whatever the locale; a byte-order mark and Windows line ends
are accepted. A user's own Python files are run from here too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib.util
import json
import logging
import os
import secrets
import shutil
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from autoplace.errors import AutoplaceError, RunError

log = logging.getLogger(__name__)

Content = bytes | Callable[[BinaryIO], object]
Fault = type[AutoplaceError]

_TEMPORARY = ".autoplace-{}.tmp"
_NO_LOCKS_HERE = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}


def write_bytes_atomic(path: Path, content: Content, *, fault: Fault = RunError) -> None:
    """Put ``content`` in place of the file at ``path``, wholly or not at all.

    Args:
        path: the file; folders above it are made.
        content: the bytes, or a function that writes them to the open file it is given.
        fault: what to raise where the file cannot be written.
    """
    # The process and a random part: two writers of one file never share a temporary name.
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    temporary = path.with_name(_TEMPORARY.format(unique))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise cannot_write(path, error, fault) from error
        raise


def write_json_atomic(path: Path, obj: object, *, fault: Fault = RunError) -> None:
    """Write ``obj`` as JSON, wholly or not at all; NaN and infinity are refused."""
    try:
        text = format_json(obj)
    except ValueError as error:
        raise fault(
            f"cannot write {path}: it would hold a number that JSON has no form for "
            f"({one_line(error)}): find what computed it"
        ) from error
    # A path that the locale could not decode holds lone surrogates; as escapes they are valid JSON.
    write_bytes_atomic(path, text.encode("utf-8", "backslashreplace"), fault=fault)


def replace(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, in whose place it comes, and force that to the disk."""
    for attempt in range(20):
        try:
            source.replace(target)
            break
        except PermissionError:  # Windows refuses while another process reads the target
            if sys.platform != "win32" or attempt == 19:
                raise
            time.sleep(0.05)
    if sys.platform != "win32":  # where folders cannot be opened
        with contextlib.suppress(OSError):
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def remove_temporaries(folder: Path) -> None:
    """Remove what killed writers left in a folder that nobody else writes to now."""
    for path in folder.glob(_TEMPORARY.format("*")):
        with contextlib.suppress(OSError):
            path.unlink()


def cannot_write(path: Path, error: OSError, fault: Fault) -> AutoplaceError:
    """The fault that names the path, the reason, and the room that is left."""
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), Path())
    try:
        room = f", {shutil.disk_usage(existing).free / 1e6:,.0f} MB free there"
    except OSError:
        room = ""
    return fault(
        f"cannot write {path}: {error.strerror or error}{room}: make room or choose another folder"
    )


def one_line(error: object) -> str:
    """An error's text, short and without line breaks."""
    text = " ".join(str(error).split())
    return text if len(text) <= 120 else text[:117] + "..."


# --------------------------------------------------------------------------------------------------
# JSON


def format_json(obj: object) -> str:
    """JSON to read and to compare: the outer two levels, and each object in a list, on own lines.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return "".join(_pieces(obj, 0)) + "\n"


def _pieces(value: object, depth: int) -> Iterator[str]:
    pad = " " * (depth + 1)
    if isinstance(value, dict) and value and depth < 2:
        for index, (key, item) in enumerate(value.items()):
            yield f"{',' if index else '{'}\n{pad}{json.dumps(str(key), ensure_ascii=False)}: "
            yield from _pieces(item, depth + 1)
        yield f"\n{pad[1:]}}}"
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
        for index, item in enumerate(value):
            row = json.dumps(item, ensure_ascii=False, allow_nan=False)
            yield f"{',' if index else '['}\n{pad}{row}"
        yield f"\n{pad[1:]}]"
    else:
        yield json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_json_object(
    path: Path, what: str, *, fault: Fault = RunError, remedy: str = "choose another file"
) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: the file.
        what: what it should be, for the message.
        fault: what to raise where it is not.
        remedy: the next step, for the message.
    """

    def refuse(problem: str) -> AutoplaceError:
        return fault(f"{what} {path} {problem}: {remedy}")

    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise refuse("does not exist") from None
    except OSError as error:
        raise refuse(f"cannot be read ({error.strerror or error})") from error
    if not data.strip():
        raise refuse("is empty")
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise refuse(f"is not UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise refuse(f"is not whole JSON ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise refuse(f"holds a JSON {type(value).__name__}, not an object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def type_problem(value: object, hint: Any) -> str:  # noqa: ANN401 - a type hint has no type
    """Why ``value``, made from JSON, is not of the type that ``hint`` says; "" where it is."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        problems = [type_problem(value, option) for option in arguments]
        return "" if "" in problems else problems[0]
    if origin is tuple and isinstance(value, tuple):
        if arguments[1:] == (...,):
            arguments = arguments[:1] * len(value)
        if len(value) != len(arguments):
            return f"{value!r} has {len(value)} entries, not {len(arguments)}"
        pairs = zip(value, arguments, strict=True)
        return next((problem for pair in pairs if (problem := type_problem(*pair))), "")
    if dataclasses.is_dataclass(hint) and isinstance(value, hint):  # type: ignore[arg-type]
        for name, field_hint in _field_hints(type(value)).items():
            if problem := type_problem(getattr(value, name), field_hint):
                return problem if problem.startswith("the ") else f"the {name} {problem}"
        return ""
    accepted = (int, float) if hint is float else origin or hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        return f"{one_line(repr(value))} is not a {getattr(hint, '__name__', hint)}"
    return ""


@functools.cache
def _field_hints(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


# --------------------------------------------------------------------------------------------------
# Locks


class FileLock:
    """An exclusive lock that the operating system releases when its process ends, however it ends.

    The file holds the owner's process id for messages and is never removed: a process that waits
    on it would otherwise wait on a file that no longer has the name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self, *, wait_s: float = 0.0) -> bool:
        """Take the lock; ``False`` where somebody else still has it after ``wait_s``.

        Raises:
            OSError: the file cannot be made.
        """
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        give_up = time.monotonic() + wait_s
        while not self._try_lock(file):
            if time.monotonic() >= give_up:
                os.close(file)
                return False
            time.sleep(0.02)
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.write(file, str(os.getpid()).encode())
        self._file = file
        return True

    def release(self) -> None:
        """Give the lock back; nothing to do where it is not held."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)  # closing releases
            self._file = None

    def holder(self) -> int | None:
        """Process id of the owner, ``None`` where nobody is."""
        try:
            return int(self._path.read_bytes())
        except (OSError, ValueError):
            return None

    def _try_lock(self, file: int) -> bool:
        try:
            _lock(file)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                return False
            # Some network file systems cannot lock; a living owner's process id has to do.
            log.debug("%s: this file system has no locks (%s)", self._path, error)
            return not self._is_owned_by_a_living_process()
        return True

    def _is_owned_by_a_living_process(self) -> bool:
        import psutil

        owner = self.holder()
        return owner is not None and bool(psutil.pid_exists(owner))


def _lock(file: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, 1 << 30, os.SEEK_SET)  # past the process id, which others must still read
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def load_module(path: Path, prefix: str) -> types.ModuleType:
    """Run a Python file of the user's and return it as a module; its own errors go through."""
    name = f"{prefix}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    spec.loader.exec_module(module)
    return module
