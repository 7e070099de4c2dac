"""Do calibrations of one machine, made one after the other, tell the same?

Every pair of them is compared: its crossovers, which should be within 10 % of each other or inside
both stated intervals, and its plans of 40 workloads, which should be the same or ones that either
calls a tie. Nothing is timed here:

    for i in 1 2 3 4 5; do autoplace calibrate --force --output $i.json; done
    python calibration/repeat.py 1.json 2.json 3.json 4.json 5.json
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplace.cost_model import fit_cost_model
from autoplace.crossover import Crossover, find_crossovers
from autoplace.measurement import Calibration
from autoplace.planner.plan import Candidate, Plan
from autoplace.planner.search import make_plan
from autoplace.store import read_calibration
from autoplace.whatif import given_steps, with_steps
from autoplace.workload import EnvSpec, Hyperparameters, NetworkSpec, Workload

TOLERANCE = 0.10
ENV_STEPS_S = (3e-6, 1e-5, 5e-5, 2e-4, 1e-3)
# (observation size, action size, continuous, hidden sizes)
NETWORKS = (
    (4, 2, False, (64, 64)),
    (17, 6, True, (64, 64)),
    (17, 6, True, (256, 256)),
    (376, 17, True, (512, 512)),
)
ROLLOUTS = ((8, 128), (32, 64))  # environments, steps


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """What one calibration says."""

    crossovers: dict[tuple[object, ...], Crossover]
    plans: tuple[Plan, ...]


def workloads() -> list[tuple[Workload, float]]:
    """40 workloads, each with the seconds of one step of one of its environments."""
    found = []
    combinations = itertools.product(NETWORKS, ROLLOUTS, ENV_STEPS_S)
    for (observation, action, continuous, hidden), (num_envs, steps), env_step_s in combinations:
        workload = Workload(
            env=EnvSpec.make("Given-v0"),
            network=NetworkSpec(
                observation_size=observation,
                hidden_sizes=hidden,
                action_size=action,
                continuous=continuous,
            ),
            hyperparameters=Hyperparameters(
                num_envs=num_envs, rollout_steps=steps, hidden_sizes=hidden
            ),
            action_bytes=4 * action if continuous else 8,
        )
        found.append((workload, env_step_s))
    return found


def say(calibration: Calibration) -> Repeated:
    """Crossovers and plans by one calibration."""
    model = fit_cost_model(calibration)
    plans = []
    for workload, env_step_s in workloads():
        num_envs = workload.hyperparameters.num_envs
        steps = given_steps(workload.env, env_step_s, calibration, num_envs)
        plans.append(make_plan(with_steps(calibration, workload.env, steps), workload))
    return Repeated(
        crossovers={
            (c.family, c.dtype, c.residency, c.threads, c.baseline, c.challenger): c
            for c in find_crossovers(calibration, model)
        },
        plans=tuple(plans),
    )


def same_crossover(first: Crossover, second: Crossover) -> bool:
    """Whether two sizes are within 10 %, or each inside the other's interval."""
    a, b = first.size, second.size
    if a is not None and b is not None and max(a, b) <= (1 + TOLERANCE) * min(a, b):
        return True
    return _is_inside(a, second) and _is_inside(b, first)


def _is_inside(size: float | None, interval: Crossover) -> bool:
    """No crossing within the range is inside what reaches beyond it, and beside no crossing."""
    if interval.low is None and interval.high is None and interval.size is None:
        return size is None
    if size is None:
        return interval.high is None or interval.low is None
    above = interval.low is None or size >= interval.low
    return above and (interval.high is None or size <= interval.high)


def same_plan(first: Plan, second: Plan) -> bool:
    """Whether two choices are the same, or one that either plan calls a tie."""
    return (
        _key(first.chosen) == _key(second.chosen)
        or _is_tied(first, second.chosen)
        or _is_tied(second, first.chosen)
    )


def _key(candidate: Candidate) -> tuple[object, ...]:
    return candidate.scheme, candidate.placement


def _is_tied(plan: Plan, choice: Candidate) -> bool:
    """Whether the plan has the choice among those that it cannot tell from its own."""
    if not plan.is_close or plan.runner_up is None:
        return False
    scores = [c.score for c in plan.candidates if _key(c) == _key(choice)]
    return any(score >= plan.runner_up.score for score in scores)


def compare(said: Sequence[Repeated]) -> dict[str, Any]:
    """Shares of the pairs that agree, and what does not."""
    crossings: list[bool] = []
    apart: list[str] = []
    for first, second in itertools.combinations(said, 2):
        for key in first.crossovers:
            if key not in second.crossovers:
                continue
            a, b = first.crossovers[key], second.crossovers[key]
            crossings.append(same_crossover(a, b))
            if not crossings[-1]:
                apart.append(f"{' '.join(map(str, key))}: {_shown(a)} and {_shown(b)}")
    planned = [
        all(
            same_plan(first.plans[index], second.plans[index])
            for first, second in itertools.combinations(said, 2)
        )
        for index in range(len(said[0].plans))
    ]
    return {
        "calibrations": len(said),
        "crossover_pairs": len(crossings),
        "same_crossovers": sum(crossings) / max(len(crossings), 1),
        "crossovers_apart": apart,
        "workloads": len(planned),
        "same_plans": sum(planned) / len(planned),
        "plans_apart": [
            [plan.plans[index].chosen.scheme for plan in said]
            for index, same in enumerate(planned)
            if not same
        ],
    }


def _shown(crossover: Crossover) -> str:
    ends = [f"{e:.0f}" if e is not None else "-" for e in (crossover.low, crossover.high)]
    size = "none" if crossover.size is None else f"{crossover.size:.0f}"
    return f"{size} ({' to '.join(ends)})"


def as_text(found: dict[str, Any]) -> str:
    """The shares, and a line for what is apart."""
    lines = [
        f"{found['calibrations']} calibrations",
        f"crossovers: {100 * found['same_crossovers']:.0f} % of {found['crossover_pairs']} pairs "
        "are within 10 % or inside both intervals",
        *(f"  apart: {line}" for line in found["crossovers_apart"]),
        f"plans: the same or tied for {100 * found['same_plans']:.0f} % of "
        f"{found['workloads']} workloads",
        *(f"  apart: {', '.join(schemes)}" for schemes in found["plans_apart"]),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("calibrations", type=Path, nargs="+", help="two files or more")
    parser.add_argument("--output", type=Path, help="write what was found there, as JSON")
    args = parser.parse_args()
    if len(args.calibrations) < 2:
        parser.error("there is nothing to compare in one calibration: name two or more")
    found = compare([say(read_calibration(path)) for path in args.calibrations])
    print(as_text(found))
    if args.output:
        args.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
