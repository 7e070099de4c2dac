"""Pieces that layouts are put together from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    sampling: Sequence[Key],
    learning: Sequence[Key],
    *,
    sampler_threads: int,
    learner_threads: int,
) -> dict[Key, float]:
    """Seconds of each kind of work where sampling and learning start at the same time.

    Threads beyond the cores take turns: while both sides are at work each runs by the factor
    ``(threads of both) / cores`` slower, and then the slower side by its own threads alone.
    """
    cores = timing.usable_cpus
    crowd = max(1.0, (sampler_threads + learner_threads) / cores)
    sides = (
        (sampling, max(1.0, sampler_threads / cores)),
        (learning, max(1.0, learner_threads / cores)),
    )
    crowded_s = [crowd * sum(timing.seconds[key] for key in keys) for keys, _ in sides]
    both_s = min(crowded_s)
    stretched = {}
    for (keys, alone), side_s in zip(sides, crowded_s, strict=True):
        share = both_s / side_s if side_s else 1.0  # of the side's work, done beside the other
        for key in keys:
            stretched[key] = timing.seconds[key] * (share * crowd + (1 - share) * alone)
    return stretched
