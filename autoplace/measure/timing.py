"""Repeated timing of one probe, with the clock as an argument of everything.

A sample is ``calls`` calls in a row, long enough for the clock to resolve; its time over ``calls``
is one raw time. Warm-up samples are taken and thrown away. Sampling stops when the median is known
well enough or the time is used up, whichever comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autoplace import device
from autoplace.interpreter import stretch
from autoplace.measurement import Measurement, Task

MIN_SAMPLES = 3  # before the time limit counts
# When the error is looked at: after so many samples, then after half as many again, and so on.
# Looking after every sample would stop just when a few of them happen to agree.
MIN_SAMPLES_TO_JUDGE = 10
JUDGE_GROWTH = 1.5
MAX_SAMPLES = 200
MIN_SAMPLE_S = 5e-4  # 1000 x the resolution of a clock that ticks every half microsecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Something ready to be timed.

    Attributes:
        tasks: what one run of it times; several where one step has several timed parts.
        sample: runs so many calls, waits until they are done, and returns the seconds per call of
            each task.
        min_calls: calls that a sample needs to show the steady state (queued work that is waited
            for once at the end).
        max_calls: calls that may be queued before the device holds the host up.
        close: gives back what the probe holds.
    """

    tasks: tuple[Task, ...]
    sample: Callable[[int], Sequence[float]]
    min_calls: int = 1
    max_calls: int = 1000
    close: Callable[[], None] = lambda: None


def timed_calls(call: Callable[[], object], on: str, *, wait_each: bool = False) -> _Sampler:
    """A ``sample`` function for one task: ``call`` repeated, and ``on`` synchronised.

    Args:
        call: one call of the task.
        on: the device to wait for before the clock is read.
        wait_each: whether to wait after every call (its latency) instead of once at the end (its
            throughput).
    """

    def sample(calls: int) -> tuple[float]:
        device.synchronize(on)
        start_s = device.now()
        for _ in range(calls):
            call()
            if wait_each:
                device.synchronize(on)
        device.synchronize(on)
        return ((device.now() - start_s) / calls,)

    return sample


def other_work(seconds: float) -> None:
    """So long of something else."""
    end_s = device.now() + seconds
    while device.now() < end_s:
        stretch()
        device.charge(seconds=seconds)


_Sampler = Callable[[int], Sequence[float]]


@dataclass(slots=True)
class Series:
    """The raw times that a probe has given so far, over one or several visits.

    Attributes:
        times_s: one list per task of the probe.
        visits: samples that each visit took.
        calls: calls per sample, chosen at the first visit.
    """

    tasks: tuple[Task, ...]
    times_s: list[list[float]] = field(default_factory=list)
    visits: list[int] = field(default_factory=list)
    calls: int = 0

    @property
    def error_fraction(self) -> float:
        """The largest standard error of a median; infinite before there are enough samples."""
        if not self.times_s or len(self.times_s[0]) < MIN_SAMPLES:
            return float("inf")
        return max(m.error_fraction for m in self.measurements())

    @property
    def wants_more(self) -> bool:
        """Whether more samples may still be added."""
        return not self.times_s or len(self.times_s[0]) < MAX_SAMPLES

    def visits_differ(self, least: float) -> bool:
        """Whether medians of two visits are further apart, as the logarithm of their ratio."""
        return any(
            math.log(max(m.visit_medians_s) / min(m.visit_medians_s)) > least
            for m in self.measurements()
        )

    def measurements(self) -> list[Measurement]:
        """One measurement per task, empty before the first sample."""
        return [
            Measurement(
                task=task,
                times_s=tuple(times),
                calls_per_sample=self.calls,
                visits=tuple(filter(None, self.visits)),
            )
            for task, times in zip(self.tasks, self.times_s, strict=False)
            if times
        ]


def run_probe(
    probe: Probe,
    series: Series,
    *,
    time_limit_s: float,
    min_samples: int = MIN_SAMPLES,
    target_error_fraction: float = 0.01,
) -> float:
    """Add samples of ``probe`` to ``series`` until its error is on target or the time is used up.

    At least ``min_samples`` are taken however long they last, so the limit may be overrun by a
    task whose single call is long.

    Returns:
        The seconds this visit took.
    """
    start_s = device.now()
    per_call_s = _warm_up(probe, first=series.calls == 0)
    if series.calls == 0:
        wanted = round(MIN_SAMPLE_S / max(per_call_s, 1e-9))
        series.calls = max(probe.min_calls, min(probe.max_calls, wanted))
        series.times_s = [[] for _ in probe.tasks]
    series.visits.append(0)
    judge_at = max(MIN_SAMPLES_TO_JUDGE, len(series.times_s[0]) + 1)
    while series.wants_more:
        for times, seconds in zip(series.times_s, probe.sample(series.calls), strict=True):
            # A part of a step can be too short for the clock to see; a time is above zero.
            times.append(max(seconds, 1e-9))
        series.visits[-1] += 1
        if series.visits[-1] < min_samples:
            continue
        if device.now() - start_s >= time_limit_s:
            break
        if len(series.times_s[0]) >= judge_at:
            if series.error_fraction <= target_error_fraction:
                break
            judge_at = math.ceil(JUDGE_GROWTH * judge_at)
    return device.now() - start_s


def _warm_up(probe: Probe, *, first: bool) -> float:
    """Run the probe until its time settles; returns seconds per call, the last seen.

    The first calls pay for lazy initialisation, cold caches and the choice of kernels. On the first
    visit calls are repeated until one is no more than a tenth faster than the best before it (at
    most five); on a later visit one call fills the caches.
    """
    best_s = sum(probe.sample(1))
    if not first:
        return best_s
    for _ in range(4):
        seconds = sum(probe.sample(1))
        settled = seconds > 0.9 * best_s
        best_s = min(best_s, seconds)
        if settled:
            break
    return best_s
