"""Which of the costed placements another trainer can run, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autoplace.planner.plan import Candidate, Placement, Plan
from autoplace.units import format_rate


def best(plan: Plan, fits: Callable[[Candidate], bool]) -> Candidate | None:
    """The best costed candidate that fits; the plan's own choice where it does."""
    if fits(plan.chosen):
        return plan.chosen
    legal = (c for c in plan.candidates if c.rejected_because is None and fits(c))
    return max(legal, key=lambda candidate: candidate.score, default=None)


def is_plain_step(placement: Placement) -> bool:
    """Whether gradient steps are those that any trainer takes."""
    return (
        placement.engine == "eager"
        and placement.precision == "fp32"
        and placement.accumulation_steps == 1
    )


def is_single_loop(candidate: Candidate) -> bool:
    """Whether one loop on one device, with one number of threads, does the same."""
    placement = candidate.placement
    one_number = placement.sample_threads == placement.learn_threads
    return (
        candidate.scheme in ("cpu", "gpu")
        and (one_number or placement.learn_device != "cpu")
        and placement.env_backend in ("sync", "process")
        and placement.num_groups == 1
        and is_plain_step(placement)
    )


def other_placement(plan: Plan, found: Candidate | None, trainer: str) -> Iterable[str]:
    """A line where what is handed over is not the plan's choice."""
    if found is None:
        yield f"{trainer} can run none of the placements that were costed: this is the nearest"
    elif found is not plan.chosen:
        slower = 1 - found.score / plan.chosen.score
        yield (
            f"the plan's choice (scheme {plan.scheme}, {plan.placement.env_backend} envs) has no "
            f"counterpart in {trainer}: this is the best that has, {slower:.0%} below it in "
            "autoplace's own trainer"
        )


def threads_differ(placement: Placement) -> Iterable[str]:
    """A line where each phase has its own number of threads."""
    if placement.learn_device == "cpu" and placement.sample_threads != placement.learn_threads:
        yield (
            f"one number of threads for both phases, instead of {placement.sample_threads} for "
            f"sampling and {placement.learn_threads} for learning"
        )


def with_remarks(text: str, candidate: Candidate, differences: Iterable[str]) -> str:
    """Code below comments on what it comes from and what it leaves out."""
    rate = format_rate(candidate.env_steps_per_s)
    head = (
        f"# scheme {candidate.scheme}, {candidate.placement.env_backend} envs: "
        f"{rate} env steps/s predicted for autoplace's own trainer"
    )
    remarks = [f"# - {line}" for line in differences]
    return "\n".join([head, *(["# What differs:", *remarks] if remarks else []), text])
