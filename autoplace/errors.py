"""The errors that a user can act on.

Each message is one line: the rule, the value that broke it, the next step. The command line prints
it and exits with ``exit_code``; anything else that is raised is a bug and keeps its traceback.
"""

from __future__ import annotations


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
