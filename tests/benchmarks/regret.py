"""What the planner's choices lose on this machine, measured.

    python -m tests.benchmarks.regret [--workloads NAME ...] [--seconds S] [--json FILE]

The choice is that of a long run: the plan's, and where that is a tie what a short race among its
rivals says (:mod:`autoplace.close_calls`). It, the plan's own, the best of every other scheme,
single changes of the choice and three fixed rules (all on one thread; torch's default threads; one
process per environment) are then run in turns (:mod:`autoplace.race`). Printed are, per workload
and over all:

- *regret*: what the choice loses against the best of all that ran, picked on one half of the turns
  and scored on the other; *noise*: how much the halves of the same candidate differ;
- *tied*: whether that regret is no more than the noise; *as fast*: no more than the 3 % within
  which a plan takes placements to be equally fast, and prefers the smaller minibatch;
- *plan alone*: regret of what the plan chose before any race;
- *error*: measured over predicted time of an iteration, of the choice and of all with a prediction;
- *pace*: how many times their calibrated times steps of the trainer take right before and after a
  workload's turns (geometric mean), and the error at that pace: what the model has wrong, apart
  from a machine that is no longer as fast as it was;
- *against a rule*: the choice's score over the rule's, paired turn by turn, with a 95 % interval.

Plans with the stored calibration; what it lacks of a workload is timed first, as ever. With the
defaults it takes about half an hour on two cores; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Before numpy, whose OpenBLAS it tells to let its threads sleep.
from autoplace.close_calls import decide, run_race  # isort: split

import numpy as np
import torch
from scipy import stats

from autoplace.envs import describe
from autoplace.kept_model import cost_model_of
from autoplace.measurement import Calibration, Measurement
from autoplace.planner.explain import describe_placement
from autoplace.planner.plan import Candidate, Plan
from autoplace.planner.ranking import SAME_SPEED_FRACTION
from autoplace.planner.search import make_plan
from autoplace.prepare import prepare_calibration
from autoplace.race import Raced, RaceResult, best_of_schemes, fixed_rules, race, without_repeats
from autoplace.train.witness import slowdown_of
from autoplace.workload import EnvSpec, Workload

HERE = Path(__file__).parent
_SLOW = f"{HERE / 'slow_env.py'}:make_env"
_IMAGES = f"{HERE.parent / 'envs' / 'catch.py'}:Catch"
_MOST = 8  # candidates that run together
_PACED, _PACED_S = 16, 2e-3  # steps of the trainer that are timed again, and how long they take

# name: (environment, its arguments, width, environments, rollout steps, epochs). Iterations of up
# to about a second, so that each is run many times; widths 32 to 1024, 1 to 64 environments.
WORKLOADS: dict[str, tuple[str, dict[str, Any], int, int, int, int]] = {
    "cartpole 32 x 1": ("CartPole-v1", {}, 32, 1, 512, 10),
    "cartpole 64 x 8": ("CartPole-v1", {}, 64, 8, 128, 10),
    "cartpole 64 x 64": ("CartPole-v1", {}, 64, 64, 32, 10),
    "cartpole 256 x 16": ("CartPole-v1", {}, 256, 16, 64, 4),
    "acrobot 32 x 4": ("Acrobot-v1", {}, 32, 4, 128, 10),
    "acrobot 64 x 16": ("Acrobot-v1", {}, 64, 16, 64, 10),
    "acrobot 512 x 8": ("Acrobot-v1", {}, 512, 8, 64, 2),
    "pendulum 32 x 16": ("Pendulum-v1", {}, 32, 16, 64, 10),
    "pendulum 64 x 4": ("Pendulum-v1", {}, 64, 4, 256, 10),
    "pendulum 128 x 32": ("Pendulum-v1", {}, 128, 32, 32, 10),
    "pendulum 1024 x 4": ("Pendulum-v1", {}, 1024, 4, 64, 2),
    "hopper 64 x 1": ("Hopper-v5", {}, 64, 1, 512, 10),
    "hopper 64 x 8": ("Hopper-v5", {}, 64, 8, 128, 10),
    "hopper 256 x 16": ("Hopper-v5", {}, 256, 16, 64, 4),
    "halfcheetah 64 x 4": ("HalfCheetah-v5", {}, 64, 4, 128, 10),
    "halfcheetah 256 x 8": ("HalfCheetah-v5", {}, 256, 8, 128, 4),
    "halfcheetah 512 x 16": ("HalfCheetah-v5", {}, 512, 16, 32, 2),
    "ant 64 x 8": ("Ant-v5", {}, 64, 8, 64, 10),
    "ant 128 x 32": ("Ant-v5", {}, 128, 32, 16, 10),
    "ant 512 x 4": ("Ant-v5", {}, 512, 4, 128, 2),
    "slow 64 x 4": (_SLOW, {"step_s": 1e-3}, 64, 4, 64, 10),
    "slow 64 x 16": (_SLOW, {"step_s": 5e-4}, 64, 16, 32, 10),
    "slow 256 x 8": (_SLOW, {"step_s": 1e-3}, 256, 8, 32, 4),
    "slower 64 x 8": (_SLOW, {"step_s": 5e-3}, 64, 8, 16, 10),
    "images 64 x 4": (_IMAGES, {}, 64, 4, 64, 4),
    "images 128 x 16": (_IMAGES, {}, 128, 16, 32, 4),
}


def workload_of(name: str) -> Workload:
    """A workload of the table; its minibatch is the planner's to choose."""
    env, kwargs, width, num_envs, steps, epochs = WORKLOADS[name]
    return describe(
        EnvSpec.make(env, kwargs),
        hidden_sizes=(width, width),
        num_envs=num_envs,
        rollout_steps=steps,
        epochs=epochs,
    )


def timed_again(calibration: Calibration) -> list[Measurement]:
    """Steps of the trainer on one and on all CPUs, short ones, by which the pace is judged."""
    found = [
        m
        for m in calibration.measurements
        if m.task.op in ("policy_step", "update")
        and (m.task.device, m.task.beside) == ("cpu", 0)
        and m.task.network is not None
        and m.task.network.is_plain
        and m.median_s < _PACED_S
    ]
    return found[:: max(1, len(found) // _PACED)]


def pace(steps: Sequence[Measurement]) -> float:
    """How many times their calibrated times they take now."""
    return statistics.geometric_mean(slowdown_of(step, time_limit_s=0.0) for step in steps)


def single_changes(plan: Plan) -> Iterator[tuple[str, Candidate]]:
    """The best candidates that differ from the choice in one part of the placement."""
    own = dataclasses.asdict(plan.placement)
    seen: set[str] = set()
    for candidate in sorted(plan.candidates, key=lambda c: -c.score):
        if candidate.rejected_because is not None or candidate.scheme != plan.scheme:
            continue
        other = dataclasses.asdict(candidate.placement)
        parts = [part for part in own if own[part] != other[part]]
        if len(parts) == 1 and parts[0] not in seen:
            seen.add(parts[0])
            yield f"{parts[0]} {other[parts[0]]}", candidate


def process_per_env(plan: Plan) -> tuple[str, Candidate]:
    """All on one thread, but for the environments: one process each. Without a prediction."""
    placement = dataclasses.replace(
        plan.placement,
        device="cpu",
        sample_device="cpu",
        learn_device="cpu",
        transfer_interval_steps=plan.workload.hyperparameters.rollout_steps,
        env_backend="process",
        num_workers=plan.placement.num_envs,
        sample_threads=1,
        learn_threads=1,
        engine="eager",
        max_policy_lag=0,
        num_groups=1,
    )
    efficiency = plan.chosen.sample_efficiency
    return "process per env", Candidate(
        scheme="cpu", placement=placement, sample_efficiency=efficiency
    )


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Plan a workload, run the candidates, and say what came of it."""
    workload = workload_of(name)
    calibration = prepare_calibration(workload, note=log).calibration
    model = cost_model_of(calibration)
    planned = make_plan(calibration, workload, model=model)
    plan = decide(planned, run_race(planned)) if planned.rivals else planned
    rules = fixed_rules(plan, calibration, model, torch.get_num_threads())
    rules.append(process_per_env(plan))
    named = [(plan.scheme, plan.chosen), (f"{planned.scheme}, not raced", planned.chosen)]
    named += [*best_of_schemes(plan), *rules, *single_changes(plan)]
    candidates = without_repeats(named)[:_MOST]
    steps = timed_again(calibration)
    before = pace(steps)
    result = race(plan, candidates, seconds=seconds)
    now = math.sqrt(before * pace(steps))
    by_placement = {(e.candidate.scheme, e.candidate.placement): e for e in result.entrants}
    alone = by_placement[planned.scheme, planned.placement]
    unraced = RaceResult(
        entrants=(alone, *(entrant for entrant in result.entrants if entrant is not alone))
    )
    return {
        "workload": name,
        "chosen": f"{plan.scheme}: {describe_placement(plan.placement)}",
        "best": f"{result.best.candidate.scheme}: "
        f"{describe_placement(result.best.candidate.placement)}",
        "is_close": bool(planned.rivals),
        "env_steps_per_s": result.chosen.env_steps_per_s,
        "regret_fraction": result.regret_fraction,
        "unraced_regret_fraction": unraced.regret_fraction,
        "noise_fraction": result.noise_fraction,
        "tied": result.regret_fraction <= result.noise_fraction,
        "errors": {e.name: error(e) for e in result.entrants if e.candidate.iteration_s},
        "chosen_error": error(result.chosen),
        "pace": now,
        "against": {
            rule: paired_ratio(result.chosen, by_placement[c.scheme, c.placement])
            for rule, c in rules
        },
        "race": result.to_json(),
    }


def error(entrant: Raced) -> float:
    """Measured over predicted time of an iteration, less 1."""
    return entrant.iteration_s / entrant.candidate.iteration_s - 1


def paired_ratio(chosen: Raced, rule: Raced) -> dict[str, float]:
    """Score of the choice over that of a rule, turn by turn: geometric mean and 95 % interval."""
    if rule is chosen:
        return {"ratio": 1.0, "low": 1.0, "high": 1.0}
    weight = math.log(chosen.candidate.sample_efficiency / rule.candidate.sample_efficiency)
    logs = np.log(rule.turns_s) - np.log(chosen.turns_s) + weight
    mean, spread = float(logs.mean()), float(logs.std(ddof=1))
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * spread / math.sqrt(len(logs))
    return {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}


def percentile(values: Sequence[float], share: float) -> float:
    """Linearly interpolated."""
    return float(np.quantile(np.array(values), share))


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The figures over all workloads."""
    regrets = [row["regret_fraction"] for row in rows]
    unraced = [row["unraced_regret_fraction"] for row in rows]
    chosen_errors = [abs(row["chosen_error"]) for row in rows]
    all_errors = [abs(value) for row in rows for value in row["errors"].values()]
    at_pace = [abs((1 + row["chosen_error"]) / row["pace"] - 1) for row in rows]
    paces = [row["pace"] for row in rows]
    lines = [
        f"{len(rows)} workloads on {describe_machine()}",
        f"regret: mean {100 * statistics.mean(regrets):.1f} %, 95th percentile "
        f"{100 * percentile(regrets, 0.95):.1f} %; noise: median "
        f"{100 * statistics.median(row['noise_fraction'] for row in rows):.1f} %",
        f"of what the plans chose before any race ({sum(row['is_close'] for row in rows)} were "
        f"ties): mean {100 * statistics.mean(unraced):.1f} %, 95th percentile "
        f"{100 * percentile(unraced, 0.95):.1f} %",
        f"best or tied: {share(row['tied'] for row in rows)} within the noise, "
        f"{share(is_as_fast(row) for row in rows)} within it or "
        f"{100 * SAME_SPEED_FRACTION:.0f} %",
        f"error of the choice's iteration: median {100 * statistics.median(chosen_errors):.1f} %, "
        f"95th percentile {100 * percentile(chosen_errors, 0.95):.1f} %; of all {len(all_errors)} "
        f"candidates: median {100 * statistics.median(all_errors):.1f} %, 95th percentile "
        f"{100 * percentile(all_errors, 0.95):.1f} %",
        f"pace: {min(paces):.2f} to {max(paces):.2f} times the calibrated times, median "
        f"{statistics.median(paces):.2f}; error of the choice's iteration at that pace: median "
        f"{100 * statistics.median(at_pace):.1f} %, 95th percentile "
        f"{100 * percentile(at_pace, 0.95):.1f} %",
    ]
    for rule in rows[0]["against"]:
        pairs = [row["against"][rule] for row in rows if rule in row["against"]]
        geometric = math.exp(statistics.mean(math.log(pair["ratio"]) for pair in pairs))
        losing = sum(pair["high"] < 0.98 for pair in pairs)
        lines.append(
            f"against {rule}: geometric mean {geometric:.2f}, "
            f"interval wholly below 0.98 in {losing} of {len(pairs)}"
        )
    return lines


def is_as_fast(row: dict[str, Any]) -> bool:
    """Whether the choice is the best, by the measure of a plan or by that of the noise."""
    return row["regret_fraction"] <= max(SAME_SPEED_FRACTION, row["noise_fraction"])


def share(flags: Iterable[bool]) -> str:
    """How many of them hold."""
    values = list(flags)
    return f"{sum(values)} of {len(values)} ({100 * statistics.mean(values):.0f} %)"


def describe_machine() -> str:
    """What the figures hold for."""
    from autoplace.machine import detect_machine

    machine = detect_machine(accelerators=False)
    return f"{machine.usable_cpus} usable CPUs, {machine.cpu_model}"


def line(row: dict[str, Any]) -> str:
    """One workload."""
    against = ", ".join(
        f"{rule} {pair['ratio']:.2f} ({pair['low']:.2f} to {pair['high']:.2f})"
        for rule, pair in row["against"].items()
    )
    return (
        f"{row['workload']:<22}{row['env_steps_per_s']:>9,.0f}/s  "
        f"regret {100 * row['regret_fraction']:>4.1f} %  "
        f"plan alone {100 * row['unraced_regret_fraction']:>4.1f} %  "
        f"noise {100 * row['noise_fraction']:>4.1f} %  "
        f"{'tied' if row['tied'] else 'as fast' if is_as_fast(row) else 'lost'}  "
        f"error {100 * row['chosen_error']:>+6.1f} %  pace {row['pace']:.2f}\n"
        f"    chosen {row['chosen']}\n    best   {row['best']}\n    against {against}"
    )


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring each candidate")
    parser.add_argument("--json", type=Path, help="write every turn's times to this file")
    options = parser.parse_args()
    rows = []
    for name in options.workloads:
        log(name)
        rows.append(measure(name, options.seconds))
        print(line(rows[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows))
    print()
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
