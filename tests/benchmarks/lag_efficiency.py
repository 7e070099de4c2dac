"""What a policy lag of one iteration costs in env steps, measured.

    python -m tests.benchmarks.lag_efficiency [--seeds N] [--env CartPole-v1] [--target 400]

Trains with scheme ``cpu`` and with ``double-buffer`` (lag 1) under the default hyperparameters, and
prints the env steps until the mean return of the last 100 episodes reaches the target, by seed, and
the ratio of their means with its standard error. One iteration of the difference is the rollout
that an overlapping scheme is ahead by.
"""

from __future__ import annotations

import argparse
import math
import statistics

from autoplace.train import StopRequested, train
from autoplace.train.callbacks import Callback, IterationReport
from autoplace.workload import Hyperparameters
from tests.train.plans import make_plan

MOST_STEPS = 300_000
_MINIBATCH_ROWS = 64


class Until(Callback):
    """Stops a run once it returns enough."""

    def __init__(self, target: float) -> None:
        self._target = target
        self.env_steps = MOST_STEPS

    def on_iteration(self, report: IterationReport) -> None:
        """Look at the mean return."""
        if (
            report.num_episodes >= 20
            and report.mean_return is not None
            and report.mean_return >= self._target
        ):
            self.env_steps = report.env_steps
            raise StopRequested


def steps_until(env: str, scheme: str, lag: int, target: float, seed: int) -> int:
    """Env steps of one run until it returns ``target``."""
    default, until = Hyperparameters(), Until(target)
    plan = make_plan(
        env,
        scheme=scheme,
        rows=_MINIBATCH_ROWS,
        lag=lag,
        num_envs=default.num_envs,
        rollout_steps=default.rollout_steps,
        epochs=default.epochs,
        hidden_sizes=default.hidden_sizes,
    )
    train(plan, total_steps=MOST_STEPS, seed=seed, callbacks=[until])
    return until.env_steps


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--target", type=float, default=400.0)
    args = parser.parse_args()
    found = {}
    for scheme, lag in (("cpu", 0), ("double-buffer", 1)):
        found[lag] = [
            steps_until(args.env, scheme, lag, args.target, seed) for seed in range(args.seeds)
        ]
        print(f"{scheme:<14}{statistics.mean(found[lag]):>9.0f}   {found[lag]}", flush=True)
    ratio = statistics.mean(found[0]) / statistics.mean(found[1])
    errors = [
        statistics.stdev(steps) / statistics.mean(steps) / math.sqrt(len(steps))
        for steps in found.values()
    ]
    print(f"sample efficiency under a lag of 1: {ratio:.3f} +- {ratio * math.hypot(*errors):.3f}")


if __name__ == "__main__":
    main()
