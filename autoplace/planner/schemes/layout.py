"""Pieces that layouts are put together from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplace.planner.plan import Placement
from autoplace.planner.schemes.base import Key, Span, Timing


def in_sequence(seconds: Mapping[Key, float], keys: list[Key], start_s: float) -> list[Span]:
    """Stages one after the other, from ``start_s`` on."""
    spans = []
    for name, lane in keys:
        total_s = seconds[name, lane]
        spans.append(Span(name=name, lane=lane, start_s=start_s, total_s=total_s))
        start_s += total_s
    return spans


def interleaved(
    seconds: Mapping[Key, float], names: list[str], steps: int, lane: str = "sampler"
) -> list[Span]:
    """Stages that alternate within every vector step: each first starts within the first step."""
    spans, start_s = [], 0.0
    for name in names:
        total_s = seconds[name, lane]
        spans.append(Span(name=name, lane=lane, start_s=start_s, total_s=total_s))
        start_s += total_s / steps
    return spans


def busy_s(spans: list[Span]) -> float:
    """Seconds of all stages together."""
    return sum(span.total_s for span in spans)


def wait(lane: str, start_s: float, total_s: float) -> list[Span]:
    """A wait, where there is one."""
    return [Span(name="wait", lane=lane, start_s=start_s, total_s=total_s)] if total_s > 0 else []


def then_learning(seconds: Mapping[Key, float], sampling: list[Span]) -> tuple[Span, ...]:
    """Learning starts when sampling has ended; each side waits for the other."""
    sampled_s = busy_s(sampling)
    learning = in_sequence(seconds, [("gae", "learner"), ("update", "learner")], sampled_s)
    return (
        *sampling,
        *wait("sampler", sampled_s, busy_s(learning)),
        *wait("learner", 0.0, sampled_s),
        *learning,
    )


def overlapped(
    timing: Timing,
    placement: Placement,
    sampling: Sequence[Key],
    learning: Sequence[Key],
    *,
    sampler_threads: int,
    processes: int = 1,
) -> dict[Key, float]:
    """Seconds of each kind of work where sampling and learning start at the same time.

    While both sides are at work each is slowed by what the other keeps busy, and when one is
    through the other one goes on by itself. Threads beyond the cores take turns: all take longer by
    the factor ``threads / cores``.

    Args:
        timing: seconds of all work by itself.
        placement: says how many threads the learner has, and where.
        sampling: the sampler's stages.
        learning: the learner's stages.
        sampler_threads: of all sampler processes together.
        processes: that sample at the same time.
    """
    cores, learner_threads = timing.usable_cpus, placement.learn_threads

    def factors(keys: Sequence[Key], threads: int, busy: int, total: int) -> dict[Key, float]:
        """Of stages of so many threads, beside so many busy cores, of so many threads in all."""
        crowd = max(1.0, total / cores)
        if keys is learning and placement.learn_device != "cpu":
            return dict.fromkeys(keys, crowd)  # only the host's part could be slowed
        busy = min(busy, cores - threads)
        return {key: crowd * timing.slowdown(key[0], threads, busy) for key in keys}

    each = sampler_threads // processes
    others = sampler_threads - each
    everything = sampler_threads + learner_threads
    sides = [
        (
            factors(sampling, each, others + learner_threads, everything),
            factors(sampling, each, others, sampler_threads),
        ),
        (
            factors(learning, learner_threads, sampler_threads, everything),
            factors(learning, learner_threads, 0, learner_threads),
        ),
    ]
    seconds = timing.seconds
    slowed_s = [sum(seconds[key] * both[key] for key in both) for both, _ in sides]
    both_s = min(slowed_s)
    stretched = {}
    for (both, alone), side_s in zip(sides, slowed_s, strict=True):
        share = both_s / side_s if side_s else 1.0  # of the side's work, done beside the other
        for key in both:
            stretched[key] = seconds[key] * (share * both[key] + (1 - share) * alone[key])
    return stretched
