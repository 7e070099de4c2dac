"""What is checked of everything that an environment answers."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from autoplace.envs.spaces import ObservationCodec
from autoplace.errors import EnvError, first_line

if TYPE_CHECKING:
    from autoplace.envs.description import EnvDescription

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

log = logging.getLogger(__name__)
_warned: set[str] = set()  # environments of which it was said here that numbers are replaced

_MEND = ": mend the environment, or take 0 for such numbers by --replace-non-finite"

Where = Callable[[int], str]  # names environment ``index``, and the step it is at


def meet_non_finite(
    description: EnvDescription,
    observations: np.ndarray,
    rewards: np.ndarray,
    final_observations: np.ndarray | None,
    ended: Sequence[int],
    where: Where,
) -> None:
    """Name the first number that is not finite, or put 0 in place of all that are not.

    Args:
        description: of the environment: which columns of an observation are numbers, what they are
            called, and what is wanted.
        observations: ``[N, D]``.
        rewards: ``[N]``.
        final_observations: ``[len(ended), D]``.
        ended: the environment of each final observation.
        where: names an environment.

    Raises:
        EnvError: a number is NaN or infinite, and that is to stop the run.
    """
    codec = description.observations
    try:
        _refuse_all(codec, observations, rewards, final_observations, ended, where)
    except EnvError as fault:
        if not description.env.replace_non_finite:
            raise
        if description.env.id not in _warned:
            _warned.add(description.env.id)
            what = str(fault).removesuffix(_MEND)
            log.warning("%s: 0 stands in for it, and for all that follow", what)
        finals = () if final_observations is None else (codec.numbers(final_observations),)
        for numbers in (codec.numbers(observations), rewards, *finals):
            np.nan_to_num(numbers, copy=False, nan=0.0, posinf=0.0, neginf=0.0)


def _refuse_all(
    codec: ObservationCodec,
    observations: np.ndarray,
    rewards: np.ndarray,
    final_observations: np.ndarray | None,
    ended: Sequence[int],
    where: Where,
) -> None:
    everyone = range(len(observations))
    _refuse(codec, codec.numbers(observations), everyone, where)
    bad = np.flatnonzero(~np.isfinite(rewards))
    if len(bad):
        index = int(bad[0])
        raise EnvError(
            f"every reward must be finite, got {rewards[index]} from {where(index)}{_MEND}"
        )
    if final_observations is not None and len(final_observations):
        _refuse(codec, codec.numbers(final_observations), ended, where)


def _refuse(
    codec: ObservationCodec, numbers: np.ndarray, indices: Sequence[int], where: Where
) -> None:
    rows, columns = np.nonzero(~np.isfinite(numbers))
    if len(rows):
        row, column = int(rows[0]), int(columns[0])
        key = codec.key_of(column)
        part = f" part {key!r} of an" if key else ""
        raise EnvError(
            f"every{part} observation must be finite, got {numbers[row, column]} from "
            f"{where(indices[row])}{_MEND}"
        )


def own_traceback(error: BaseException) -> str:
    """The traceback of an error from where it leaves this package for the user's code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def raise_from_env(error: Exception, where: str) -> NoReturn:
    """Raise what an environment raised, saying where.

    Raises:
        EnvError: always; its cause is the environment's own exception.
    """
    message = f"{type(error).__name__} from {where}: {first_line(error)}"
    raise EnvError(message, evidence=own_traceback(error)) from error
