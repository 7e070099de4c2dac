"""The errors that a user can act on.

Each message is one line: the rule, the value that broke it, the next step. The command line prints
it and exits with ``exit_code``; anything else that is raised is a bug and keeps its traceback.
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of an error's message, "" where it has none."""
    return next(filter(None, map(str.strip, str(error).splitlines())), "")


def brief(error: BaseException) -> str:
    """The type of an error that was not foreseen and the first line of its message, cut short."""
    line = first_line(error)
    return f"{type(error).__name__}: {line[:160]}" if line else type(error).__name__


class AutoplaceError(Exception):
    """A failure that its one-line message explains."""

    exit_code = 1


class UsageError(AutoplaceError, ValueError):
    """A value or a combination of values that cannot work, found before anything runs."""

    exit_code = 2


class EnvError(AutoplaceError):
    """An environment that cannot be made, has an unsupported space, or misbehaves.

    Attributes:
        evidence: the traceback of the environment's own code, "" where none is to blame.
    """

    def __init__(self, message: str, *, evidence: str = "") -> None:
        super().__init__(message)
        self.evidence = evidence


class DeviceError(AutoplaceError):
    """A device that does not exist here or does not work."""


class EngineError(AutoplaceError):
    """An engine that cannot execute the trainer's steps here."""


class CalibrationError(AutoplaceError):
    """A calibration that is missing, unreadable, or of another machine."""


class RunError(AutoplaceError):
    """A run that cannot start, go on, or be read back."""
