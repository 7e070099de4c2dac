"""How well medians are known, and how far visits of one task differ."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from autoplace.measurement import Measurement, Task
from autoplace.standard_errors import standard_errors

NOISE = 0.01  # of samples


def products(
    count: int,
    between: float,
    *,
    threads: int = 1,
    visits: tuple[int, ...] = (10, 10),
    seed: int = 0,
) -> list[Measurement]:
    """Products whose visits differ by ``between``, as a relative standard error."""
    rng = np.random.default_rng(seed)
    return [
        Measurement(
            task=Task(op="matmul", threads=threads, shape=(16, 16, 16 + index)),
            times_s=tuple(
                1e-3 * math.exp(level + NOISE * rng.standard_normal())
                for taken in visits
                for level in [between * rng.standard_normal()]
                for _ in range(taken)
            ),
            visits=visits,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("between", [0.02, 0.05, 0.1])
def test_what_visits_differ_by_is_found_from_tasks_that_were_visited_twice(between: float) -> None:
    _, visits = standard_errors(products(200, between))
    assert visits.of(Task(op="matmul", shape=(8, 8, 8))) == pytest.approx(between, rel=0.2)


def test_visits_that_differ_by_no_more_than_their_samples_do_not_differ() -> None:
    _, visits = standard_errors(products(200, 0.0))
    # Two medians of ten samples each: 1.2533 x 1 % / sqrt(10) = 0.4 % each.
    assert visits.of(Task(op="matmul", shape=(8, 8, 8))) < 0.003


def test_several_threads_differ_on_their_own_and_what_was_not_seen_goes_by_the_device() -> None:
    timed = products(100, 0.02) + products(100, 0.08, threads=2, seed=1)
    _, visits = standard_errors(timed)
    one, two = (Task(op="matmul", threads=n, shape=(8, 8, 8)) for n in (1, 2))
    assert visits.of(one) == pytest.approx(0.02, rel=0.25)
    assert visits.of(two) == pytest.approx(0.08, rel=0.25)
    assert visits.of(dataclasses.replace(two, op="elementwise")) == pytest.approx(0.08, rel=0.25)
    assert visits.of(dataclasses.replace(two, device="cuda:0")) == 0.0


def test_two_visits_tell_a_median_better_than_one() -> None:
    twice, once = products(100, 0.05), products(100, 0.05, visits=(20,), seed=1)
    once = [
        dataclasses.replace(m, task=dataclasses.replace(m.task, shape=(32, *m.task.shape[1:])))
        for m in once
    ]
    errors, _ = standard_errors(twice + once)
    assert errors[once[0].task] == pytest.approx(0.05, rel=0.25)
    assert errors[twice[0].task] == pytest.approx(0.05 / math.sqrt(2), rel=0.25)


@pytest.mark.parametrize(("every", "expected"), [(20, 0.02), (4, math.log(1.5) / 1.645 / 2**0.5)])
def test_visits_that_met_other_programs_count_where_they_are_many(
    every: int, expected: float
) -> None:
    """However much longer they took: 90 % of the differences keep within what is said."""
    timed = products(100, 0.02)
    spoilt = {
        m.task: dataclasses.replace(m, times_s=(*m.times_s[:10], *(50 * t for t in m.times_s[10:])))
        for m in timed[::every]
    }
    _, visits = standard_errors([spoilt.get(m.task, m) for m in timed])
    assert visits.of(timed[0].task) == pytest.approx(expected, rel=0.3)
