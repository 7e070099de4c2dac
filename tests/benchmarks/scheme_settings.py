"""Settings that are said to go with a policy lag, against the defaults, by time to a return.

    python -m tests.benchmarks.scheme_settings [--seeds N] [--env CartPole-v1] [--target 400]

Trains with scheme ``double-buffer`` on the CPU, once with the default hyperparameters and once with
those of ``--scheme-settings`` (minibatches apart), and prints env steps and seconds until the mean
return of the last 100 episodes reaches the target.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

from autoplace.planner.plan import Plan
from autoplace.planner.scheme_settings import with_scheme_settings
from autoplace.train import train
from autoplace.workload import Hyperparameters
from tests.benchmarks.lag_efficiency import MOST_STEPS, Until
from tests.train.plans import make_plan

_ENTROPY_COEF = 0.01  # a default of 0 would leave nothing to change


def default_plan(env: str) -> Plan:
    """What the settings are compared with."""
    default = Hyperparameters()
    return make_plan(
        env,
        scheme="double-buffer",
        rows=64,
        lag=1,
        num_envs=default.num_envs,
        rollout_steps=default.rollout_steps,
        epochs=default.epochs,
        hidden_sizes=default.hidden_sizes,
        entropy_coef=_ENTROPY_COEF,
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--target", type=float, default=400.0)
    args = parser.parse_args()
    plan = default_plan(args.env)
    settings = dataclasses.replace(plan, workload=with_scheme_settings(plan))
    for name, each in (("default", plan), ("settings", settings)):
        steps, seconds = [], []
        for seed in range(args.seeds):
            until, start_s = Until(args.target), time.perf_counter()
            train(each, total_steps=MOST_STEPS, seed=seed, callbacks=[until])
            steps.append(until.env_steps)
            seconds.append(time.perf_counter() - start_s)
        hyper = each.workload.hyperparameters
        print(
            f"{name:<10} entropy_coef {hyper.entropy_coef:g}, clip_range {hyper.clip_range:g}: "
            f"{statistics.mean(steps):,.0f} env steps, {statistics.mean(seconds):.1f} s   {steps}",
            flush=True,
        )


if __name__ == "__main__":
    main()
