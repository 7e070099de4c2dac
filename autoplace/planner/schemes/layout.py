"""Pieces that layouts are put together from."""

from __future__ import annotations

from collections.abc import Mapping

from autoplace.planner.schemes.base import Key, Span


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
