"""Where calibrations, plans and run folders are kept, and how they are read back.

No other file of the package knows a path in the data folder or in a run folder. Nothing is created
or looked up when this module is imported, and torch is not needed: a checkpoint is bytes here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from autoplace.errors import CalibrationError, RunError
from autoplace.files import (
    Content,
    FileLock,
    cannot_write,
    one_line,
    read_json_object,
    remove_temporaries,
    replace,
    type_problem,
    write_bytes_atomic,
    write_json_atomic,
)
from autoplace.home import data_dir, runs_dir, wanted_dir
from autoplace.machine import Machine, detect_machine
from autoplace.measurement import SCHEMA_VERSION, Calibration, Measurement
from autoplace.sections import is_of_env, stale_sections, what_holds

__all__ = [
    "RunDir",
    "Stored",
    "calibration_path",
    "create_run_dir",
    "data_dir",
    "find_calibration",
    "kept_checkpoint",
    "latest_checkpoint",
    "load_calibration",
    "merge_calibration",
    "read_calibration",
    "read_json_object",
    "read_plan",
    "read_run_config",
    "read_run_plan",
    "redact",
    "resume_run_dir",
    "runs_dir",
    "save_calibration",
    "save_plan",
    "stored_calibration",
    "stored_path",
    "write_bytes_atomic",
    "write_json_atomic",
]

log = logging.getLogger(__name__)

_LOCK_WAIT_S = 30.0
_RECALIBRATE = "run autoplace calibrate"
_OTHER_RUN = "name the folder of a run that autoplace train made"


# --------------------------------------------------------------------------------------------------
# Calibrations

# Schema versions of a calibration file. An old file is brought up to date one version at a time,
# by the entry of _UPGRADES for the version it has; a test reads a file of every version.
#   1  the first
_UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


def calibration_path(machine: Machine) -> Path:
    """The file that a calibration of ``machine`` is saved to."""
    return data_dir() / "calibrations" / f"{machine.key}.json"


def save_calibration(calibration: Calibration, path: Path | None = None) -> Path:
    """Save a calibration as its machine's stored one, or to ``path``; returns the file.

    Raises:
        CalibrationError: it cannot be written; or without a ``path``, it was not measured.
    """
    if path is None and calibration.origin != "measured":
        raise CalibrationError(
            f"a calibration that was {calibration.origin} is not kept as a machine's own: "
            "name a file for it"
        )
    if path is not None:
        write_json_atomic(path, calibration.to_json(), fault=CalibrationError)
        return path
    path = calibration_path(calibration.machine)
    with _locked(path):
        write_json_atomic(path, calibration.to_json(), fault=CalibrationError)
    return path


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file, of whatever machine it is.

    Raises:
        CalibrationError: it is missing, cut off, damaged, or of a newer version.
    """
    remedy = f"{_RECALIBRATE} to replace it, or choose another with --calibration"
    data = read_json_object(path, "calibration", fault=CalibrationError, remedy=remedy)
    version = data.get("schema_version")
    if type(version) is not int or version < 1:
        raise CalibrationError(f"calibration {path} has no schema_version: {remedy}")
    if version > SCHEMA_VERSION:
        raise CalibrationError(
            f"calibration {path} is of schema version {version}, this autoplace reads up to "
            f"{SCHEMA_VERSION}: upgrade autoplace, or {_RECALIBRATE} to replace it"
        )
    try:
        for old in range(version, SCHEMA_VERSION):
            data = _UPGRADES[old](data)
        calibration = Calibration.from_json(data)
        problem = type_problem(calibration, Calibration) or _time_problem(calibration)
    except KeyError as error:
        problem = f"{error} is missing"
    except (TypeError, ValueError, AttributeError, AssertionError) as error:
        problem = one_line(error) or type(error).__name__
    if problem:
        raise CalibrationError(f"calibration {path} is not one ({problem}): {remedy}")
    return calibration


def load_calibration(path: Path | None = None) -> Calibration:
    """This machine's stored calibration, or the one in ``path``, which may be of another machine.

    Raises:
        CalibrationError: there is none, or it no longer holds; the message says why.
    """
    if path is not None:
        return read_calibration(Path(path))
    calibration, reason = stored_calibration(detect_machine(accelerators=False))
    if calibration is None:
        raise CalibrationError(reason)
    return calibration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What is stored of a machine.

    Attributes:
        calibration: all of it, as it was stored; ``None`` where there is none that can be read.
        stale: its sections that no longer hold, each with what has changed.
        reason: one line on what is missing, ``None`` where all holds.
    """

    calibration: Calibration | None = None
    stale: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    reason: str | None = None


def find_calibration(machine: Machine) -> Stored:
    """The stored calibration of ``machine``, and what of it no longer holds.

    A damaged file counts as none. Accelerators, BLAS and driver are compared where ``machine``
    knows them.
    """
    path = stored_path(machine)
    if not path.exists():
        return Stored(reason=f"this machine has no calibration yet: {_RECALIBRATE}")
    try:
        calibration = read_calibration(path)
    except CalibrationError as fault:
        return Stored(reason=str(fault))
    if calibration.origin != "measured":
        reason = f"calibration {path} is {calibration.origin}, not measured: {_RECALIBRATE}"
        return Stored(reason=reason)
    stale = stale_sections(calibration, machine)
    if stale:
        changes = list(dict.fromkeys(change for found in stale.values() for change in found))
        shown = "; ".join(changes[:3]) + (f"; {len(changes) - 3} more" if changes[3:] else "")
        reason = f"calibration {path} no longer holds ({shown}): {_RECALIBRATE}"
        return Stored(calibration=calibration, stale=stale, reason=reason)
    return Stored(calibration=what_holds(calibration, machine))


def stored_calibration(machine: Machine) -> tuple[Calibration | None, str | None]:
    """The stored calibration of ``machine``, or ``None`` and one line on why it cannot be used."""
    found = find_calibration(machine)
    return (None if found.reason else found.calibration), found.reason


def merge_calibration(machine: Machine, measurements: Iterable[Measurement]) -> Calibration:
    """Add measurements to the stored calibration of ``machine`` and return the whole.

    Each replaces an older one of the same task; environments whose times no longer hold are left
    out. Several processes may do so at once. Where nothing usable is stored, a calibration of just
    these is begun.

    Raises:
        CalibrationError: what is stored was measured under other conditions, or cannot be written.
    """
    path = calibration_path(machine)
    with _locked(path):
        source = stored_path(machine)
        try:
            stored = read_calibration(source) if source.exists() else None
        except CalibrationError as fault:
            log.warning("%s", fault)
            stored = None
        if stored is None or stored.origin != "measured":
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            stored = Calibration(machine=machine, measurements=(), created=now)
        for section, changes in stale_sections(stored, machine).items():
            if not is_of_env(section):
                raise CalibrationError(
                    f"calibration {source} no longer holds ({changes[0]}): {_RECALIBRATE}"
                )
        merged = what_holds(stored, machine).with_measurements(measurements)
        write_json_atomic(path, merged.to_json(), fault=CalibrationError)
    return merged


def redact(calibration: Calibration) -> Calibration:
    """A copy without the UUIDs of the accelerators, to be published."""
    machine = calibration.machine
    renamed = {
        card.uuid: f"redacted-{index}"
        for index, card in enumerate(machine.accelerators)
        if card.uuid
    }

    def clean(text: str) -> str:
        for uuid, name in renamed.items():
            text = text.replace(uuid, name)
        return text

    cards = tuple(
        dataclasses.replace(
            card,
            uuid=renamed.get(card.uuid, ""),
            reason=None if card.reason is None else clean(card.reason),
        )
        for card in machine.accelerators
    )
    return dataclasses.replace(
        calibration,
        machine=dataclasses.replace(machine, accelerators=cards),
        warnings=tuple(map(clean, calibration.warnings)),
    )


def stored_path(machine: Machine) -> Path:
    """The file to read: a read-only home may hold one although saving goes elsewhere."""
    path = calibration_path(machine)
    wanted = wanted_dir()
    if path.exists() or wanted is None:
        return path
    return wanted / "calibrations" / path.name


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing a calibration between its reading and its writing."""
    lock_path = path.with_suffix(".lock")
    lock = FileLock(lock_path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        taken = lock.acquire(wait_s=_LOCK_WAIT_S)
    except OSError as error:
        raise cannot_write(lock_path, error, CalibrationError) from error
    if not taken:
        raise CalibrationError(
            f"process {lock.holder()} has kept {lock_path} locked for {_LOCK_WAIT_S:g} s: "
            "end it and try again"
        )
    try:
        yield
    finally:
        lock.release()


def _time_problem(calibration: Calibration) -> str:
    for measurement in calibration.measurements:
        times = measurement.times_s
        if not times or not all(t > 0 and math.isfinite(t) for t in times):
            return f"the times of a {measurement.task.op} are not positive numbers"
    return ""


# --------------------------------------------------------------------------------------------------
# Plans and run folders

_CONFIG, _PLAN, _RESULT = "config.json", "plan.json", "result.json"

# Newest first. "next" exists only where a save was interrupted after it was whole.
_CHECKPOINTS = ("checkpoint-next.pt", "checkpoint-latest.pt", "checkpoint-previous.pt")
_KEPT = re.compile(r"checkpoint-(best|\d+)\.pt")  # "best", or the env steps of one that is kept


def save_plan(path: Path, plan: dict[str, Any]) -> None:
    """Save a plan's JSON object to a file."""
    write_json_atomic(path, plan)


def read_plan(path: Path) -> dict[str, Any]:
    """The JSON object of a plan in a file, as ``autoplace plan --json`` prints it.

    Raises:
        RunError: it is missing, cut off or damaged.
    """
    return read_json_object(path, "plan", remedy="make one with autoplace plan ENV --json")


def read_run_plan(run_dir: Path) -> dict[str, Any]:
    """The JSON object of the plan that a run follows.

    Raises:
        RunError: there is none, or it is damaged.
    """
    return read_json_object(run_dir / _PLAN, "plan", remedy=_OTHER_RUN)


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """The JSON object of a run's settings.

    Raises:
        RunError: there is none, or it is damaged.
    """
    return read_json_object(run_dir / _CONFIG, "run configuration", remedy=_OTHER_RUN)


class RunDir:
    """A run folder that this process alone may write to, until :meth:`close` or its end."""

    def __init__(self, path: Path) -> None:
        """Take the folder, which exists.

        Raises:
            RunError: another training has it, or it cannot be written.
        """
        self.path = path
        self._lock = FileLock(path / ".lock")
        try:
            taken = self._lock.acquire()
        except OSError as error:
            raise cannot_write(path, error, RunError) from error
        if not taken:
            raise RunError(
                f"process {self._lock.holder()} is training into {path}: "
                "wait for it to end or choose another --run-dir"
            )
        remove_temporaries(path)

    @property
    def config_path(self) -> Path:
        """Where the settings of the run are kept."""
        return self.path / _CONFIG

    @property
    def plan_path(self) -> Path:
        """Where the plan that it follows is kept."""
        return self.path / _PLAN

    @property
    def result_path(self) -> Path:
        """Where what happened is kept."""
        return self.path / _RESULT

    def save_checkpoint(self, content: Content) -> Path:
        """Save a checkpoint and keep the one before it; returns the file.

        At every moment in between, at least one whole checkpoint exists.

        Args:
            content: the bytes, or a function that writes them to the open file it is given.
        """
        new, latest, previous = (self.path / name for name in _CHECKPOINTS)
        write_bytes_atomic(new, content)
        try:
            if latest.exists():
                replace(latest, previous)
            replace(new, latest)
        except OSError as error:
            raise cannot_write(latest, error, RunError) from error
        return latest

    def keep_checkpoint(self, name: str, content: Content) -> Path:
        """Save a checkpoint beside the latest, in place of an earlier one of that name.

        Args:
            name: ``best``, or the env steps after which it was taken.
            content: the bytes, or a function that writes them to the open file it is given.
        """
        path = self.path / f"checkpoint-{name}.pt"
        assert _KEPT.fullmatch(path.name), name
        write_bytes_atomic(path, content)
        return path

    def close(self) -> None:
        """Let others write to the folder."""
        self._lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def create_run_dir(
    path: Path | None = None, *, env_id: str, seed: int, home: Path | None = None
) -> RunDir:
    """Make a folder for a new run and take it.

    Args:
        path: the folder; where not given, a new one below ``home`` named after the rest.
        env_id: the environment that is trained on.
        seed: the seed of the run.
        home: the data folder, :func:`data_dir` where not given.

    Raises:
        RunError: it cannot be made, another training has it, or it holds a finished run's
            checkpoints, which are never overwritten.
    """
    if path is None:
        return RunDir(_new_folder(home / "runs" if home else runs_dir(), env_id, seed))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error, RunError) from error
    run_dir = RunDir(path)
    if latest_checkpoint(path):
        run_dir.close()
        raise RunError(
            f"{path} holds the checkpoints of an earlier run: "
            "go on with it by --resume or choose another --run-dir"
        )
    return run_dir


def resume_run_dir(path: Path) -> RunDir:
    """Take the folder of an earlier run to go on with it.

    Raises:
        RunError: there is no checkpoint in it, or another training has it.
    """
    if not latest_checkpoint(path):
        raise RunError(f"{path} holds no checkpoint to resume from: train without --resume")
    return RunDir(path)


def latest_checkpoint(run_dir: Path) -> tuple[Path, ...]:
    """The checkpoints of a run, the newest first, for whoever loads to try in turn."""
    files = (run_dir / name for name in _CHECKPOINTS)
    return tuple(file for file in files if file.is_file() and file.stat().st_size > 0)


def kept_checkpoint(run_dir: Path, name: str) -> Path:
    """The checkpoint of a run that is called ``best``, or after that many env steps.

    Raises:
        RunError: there is none of that name; the message says which there are.
    """
    matches = (_KEPT.fullmatch(file.name) for file in run_dir.glob("checkpoint-*.pt"))
    names = sorted((match[1] for match in matches if match), key=lambda kept: kept.zfill(20))
    if name not in names:
        there = ", ".join([*(["latest"] if latest_checkpoint(run_dir) else []), *names])
        raise RunError(
            f"{run_dir} holds no checkpoint {name!r}: "
            + (f"name one of {there}" if there else _OTHER_RUN)
        )
    return run_dir / f"checkpoint-{name}.pt"


def _new_folder(runs: Path, env_id: str, seed: int) -> Path:
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", env_id).strip("-.")[-60:] or "run"
    name = f"{slug}-seed{seed}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
            folder = runs / f"{name}{suffix}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise cannot_write(runs / name, error, RunError) from error
    raise RunError(f"{runs} holds a thousand runs named {name}: choose a --run-dir")
