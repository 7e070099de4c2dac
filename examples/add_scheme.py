"""Add a scheme: ``polite`` works like ``cpu`` and rests as long as it has worked.

On a machine that others use too, that keeps half of the time free. A scheme has two halves: what
the planner costs (which work, and when), and what the trainer runs. In the package each half is a
file and an entry in a tuple; here both entries are added from outside.

Run: python examples/add_scheme.py
"""

import argparse
import dataclasses
import time

import autoplace
from autoplace.planner import schemes as planned
from autoplace.planner.schemes.cpu import CPU
from autoplace.train import schemes as run
from autoplace.train.schemes.cpu import CpuScheme


def rest_after_work(timing, placement):
    """When things happen: as in ``cpu``, then both lanes wait as long as that took."""
    spans = CPU.layout(timing, placement)
    busy_s = sum(span.total_s for span in spans if span.lane == "sampler")
    return tuple(
        dataclasses.replace(span, total_s=span.total_s + busy_s) if span.name == "wait" else span
        for span in spans
    )


class PoliteScheme(CpuScheme):
    """The same sampler and learner; ``publish`` ends an iteration."""

    def sample(self, noise):
        self._start_s = time.perf_counter()
        super().sample(noise)

    def publish(self):
        super().publish()
        time.sleep(time.perf_counter() - self._start_s)


planned.SCHEMES += (dataclasses.replace(CPU, name="polite", layout=rest_after_work),)
run.SCHEMES += (run.SchemeEntry(name="polite", make=PoliteScheme),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--budget", type=float, default=7.0)
    args = parser.parse_args()

    calibration = autoplace.calibrate(budget_s=args.budget, envs=["CartPole-v1"])
    workload = autoplace.describe("CartPole-v1")
    plan = autoplace.make_plan(calibration, workload, scheme="polite")
    print(plan.explain())
    result = autoplace.train(plan, total_steps=args.steps)
    print(
        f"\n{result.env_steps_per_s:,.0f} env steps/s measured, "
        f"{plan.chosen.env_steps_per_s:,.0f} predicted by the plan"
    )


if __name__ == "__main__":
    main()
