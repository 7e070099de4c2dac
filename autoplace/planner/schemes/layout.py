"""Pieces that layouts are put together from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoplace.device_names import CPU
from autoplace.planner.placements import Placements
from autoplace.planner.schemes.base import Array, Key, Span, Timing

Counts = NDArray[np.int_]


def in_sequence(seconds: Mapping[Key, Array], keys: Sequence[Key], start_s: Array) -> list[Span]:
    """Stages one after the other, from ``start_s`` on."""
    spans = []
    for name, lane in keys:
        total_s = seconds[name, lane]
        spans.append(Span(name=name, lane=lane, start_s=start_s, total_s=total_s))
        start_s = start_s + total_s
    return spans


def interleaved(
    seconds: Mapping[Key, Array], names: Sequence[str], steps: Counts, lane: str = "sampler"
) -> list[Span]:
    """Stages that alternate within every vector step: each first starts within the first step."""
    spans, start_s = [], np.zeros(np.shape(steps))
    for name in names:
        total_s = seconds[name, lane]
        spans.append(Span(name=name, lane=lane, start_s=start_s, total_s=total_s))
        start_s = start_s + total_s / steps
    return spans


def busy_s(spans: Sequence[Span]) -> Array:
    """Seconds of all stages together."""
    first, *others = (span.total_s for span in spans)
    return sum(others, start=first)


def wait(lane: str, start_s: Array, total_s: Array) -> list[Span]:
    """A wait, where there is one."""
    return [Span(name="wait", lane=lane, start_s=start_s, total_s=np.maximum(total_s, 0.0))]


def then_learning(seconds: Mapping[Key, Array], sampling: Sequence[Span]) -> tuple[Span, ...]:
    """Learning starts when sampling has ended; each side waits for the other."""
    sampled_s = busy_s(sampling)
    learning = in_sequence(seconds, [("gae", "learner"), ("update", "learner")], sampled_s)
    return (
        *sampling,
        *wait("sampler", sampled_s, busy_s(learning)),
        *wait("learner", np.zeros(np.shape(sampled_s)), sampled_s),
        *learning,
    )


def overlapped(
    timing: Timing,
    placements: Placements,
    sampling: Sequence[Key],
    learning: Sequence[Key],
    *,
    sampler_threads: Counts,
    processes: Counts | int = 1,
) -> dict[Key, Array]:
    """Seconds of each kind of work where sampling and learning start at the same time.

    While both sides are at work each is slowed by what the other keeps busy, and when one is
    through the other one goes on by itself. Threads beyond the cores take turns: where these are
    shared evenly all take longer by the factor ``threads / cores``; where threads stay on the core
    that they are on, those that count, the last to be through, take as long as the most threads on
    one core. What lies between, and what a message loses where all cores are busy, is timed
    (:mod:`autoplace.contention`), by how long they all are at work: as long as the shorter side is.

    Args:
        timing: seconds of all work by itself.
        placements: say how many threads the learner has, and where.
        sampling: the sampler's stages.
        learning: the learner's stages.
        sampler_threads: of all sampler processes together.
        processes: that sample at the same time.
    """
    cores, learner_threads, seconds = timing.usable_cpus, placements.learn_threads, timing.seconds
    work_s = np.minimum(
        *(np.sum([seconds[key] for key in keys], axis=0) for keys in (sampling, learning))
    )
    uneven = timing.unevenness(work_s)
    on_cpu = placements.learn_device == CPU

    def factors(keys: Sequence[Key], threads: Counts, busy: Counts, total: Counts) -> list[Array]:
        """Of stages of so many threads, beside so many busy cores, of so many threads in all."""
        even = np.maximum(1.0, total / cores)
        crowd = even + uneven * (np.ceil(even) - even)
        others = np.minimum(busy, cores - threads)
        slowed = []
        for name, _ in keys:
            if name == "handoff":  # timed with as much at work as there is
                slowed.append(np.maximum(crowd, timing.slowdown(name, threads, busy)))
                continue
            factor = timing.slowdown(name, threads, others)
            if keys is learning:  # of an accelerator only the host's part could be slowed
                factor = np.where(on_cpu, factor, 1.0)
            slowed.append(crowd * factor)
        return slowed

    each = sampler_threads // processes
    others = sampler_threads - each
    everything = sampler_threads + learner_threads
    nothing = np.zeros(np.shape(learner_threads), dtype=np.int_)
    sides = [
        (
            sampling,
            factors(sampling, each, others + learner_threads, everything),
            factors(sampling, each, others, sampler_threads),
        ),
        (
            learning,
            factors(learning, learner_threads, sampler_threads, everything),
            factors(learning, learner_threads, nothing, learner_threads),
        ),
    ]
    sampled_s, learned_s = slowed_s = [
        np.sum([seconds[key] * factor for key, factor in zip(keys, both, strict=True)], axis=0)
        for keys, both, _ in sides
    ]
    both_s = np.minimum(sampled_s, learned_s)
    stretched = {}
    for (keys, both, alone), side_s in zip(sides, slowed_s, strict=True):
        # Of the side's work, done beside the other.
        share = both_s / np.where(side_s > 0, side_s, 1.0)
        for key, beside, alone_ in zip(keys, both, alone, strict=True):
            stretched[key] = seconds[key] * (share * beside + (1 - share) * alone_)
    return stretched
