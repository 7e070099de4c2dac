"""A plan as other trainers' own arguments, for people who stay with them.

Each trainer can run some of the placements that were costed; the best of those is handed over.
What it cannot express, or does differently, is listed beside the arguments. The predicted speed is
that of autoplace's own trainer under that placement: only the order of placements is claimed to
carry over.
"""

from __future__ import annotations

from collections.abc import Callable

from autoplace.planner.handover.commands import CommandArguments, for_cleanrl, for_sample_factory
from autoplace.planner.handover.sb3 import MakeEnv, Sb3Arguments, clip_rewards, for_sb3
from autoplace.planner.plan import Plan

__all__ = [
    "TRAINERS",
    "CommandArguments",
    "MakeEnv",
    "Sb3Arguments",
    "clip_rewards",
    "for_cleanrl",
    "for_sample_factory",
    "for_sb3",
]

# By the names that the command line takes.
TRAINERS: dict[str, Callable[[Plan], Sb3Arguments | CommandArguments]] = {
    "sb3": for_sb3,
    "cleanrl": for_cleanrl,
    "sample-factory": for_sample_factory,
}
