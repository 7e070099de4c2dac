"""How long a search takes, on a synthetic machine with a wide space.

python -m pytest -m bench -s tests/benchmarks/test_search_speed.py
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from autoplace.cost_model import fit_cost_model
from autoplace.measurement import Measurement, Task
from autoplace.planner import schemes, search
from autoplace.planner.ranking import Ranking
from tests.planner.test_search import ENV, workload
from tests.synthetic import Truth, make_calibration

CPUS, NUM_ENVS = 256, 256
LEAST_CANDIDATES, BUDGET_S = 10_000, 0.05


def seconds(run: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


@pytest.mark.bench
def test_ten_thousand_candidates_are_costed_and_ranked_in_fifty_milliseconds() -> None:
    calibration = make_calibration(Truth(gpu=True), env=ENV, env_step_s=1e-4, usable_cpus=CPUS)
    calibration = calibration.with_measurements(
        Measurement(
            task=Task(op="env_step", env=ENV, backend="process", num_envs=number, workers=workers),
            times_s=(2e-5 + 1e-4 * number / workers,) * 5,
        )
        for workers in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for number in (workers, NUM_ENVS)
    )
    model = fit_cost_model(calibration)
    given = workload(num_envs=NUM_ENVS)

    def plan() -> None:
        search.make_plan(calibration, given, model=model)

    def fresh() -> search.Search:
        return search.Search(calibration, model, schemes.SCHEMES, 1, None, {}, None)

    def rank(found: search.Search) -> Ranking:
        ranking, _ = found.rank(given)
        assert ranking.best.score > 0 and ranking.runner_up is not None
        return ranking

    count = len(rank(fresh()))
    assert count >= LEAST_CANDIDATES
    cold_s = min(seconds(functools.partial(rank, fresh())) for _ in range(5))
    known = fresh()
    rank(known)

    def with_costs() -> search.Search:
        found = fresh()
        found.coster.costs.update(known.coster.costs)  # the costs of tasks, and nothing else
        return found

    warm_s = min(seconds(functools.partial(rank, with_costs())) for _ in range(10))
    plan_s = min(seconds(plan) for _ in range(3))
    print(
        f"\n{count:,} candidates: {warm_s * 1e3:.1f} ms where the tasks have their costs, "
        f"{cold_s * 1e3:.0f} ms where they have none, {plan_s * 1e3:.0f} ms with all flips"
    )
    assert warm_s <= BUDGET_S
