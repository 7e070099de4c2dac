"""Env steps per second of whole training iterations on four standard workloads.

    python -m tests.benchmarks.throughput --workload W1 --seconds 8 --max-policy-lag 1

Plans with the stored calibration (the environment is timed first where that lacks it), trains, and
prints one JSON line: env steps and seconds of whole iterations, the first one left out, and the
memory of the process tree. `python -m tests.benchmarks.sb3` is the other side.
"""

from __future__ import annotations

import argparse
import contextlib
import json

import autoplace
from autoplace.device import now
from autoplace.envs import describe
from autoplace.kept_model import cost_model_of
from autoplace.planner.explain import describe_placement
from autoplace.prepare import prepare_calibration
from autoplace.train import Callback
from tests.benchmarks.memory import tree_bytes
from tests.benchmarks.workloads import COMMON, WORKLOADS


class Enough(Exception):  # noqa: N818 - not an error
    """The time is up."""


class Meter(Callback):
    """Counts whole iterations from the end of the first one on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start: tuple[float, int] | None = None
        self.env_steps, self.wall_s, self.iterations = 0, 0.0, 0

    def on_iteration(self, report):
        if self._start is None:
            self._start = now(), report.env_steps
            return
        self.wall_s = now() - self._start[0]
        self.env_steps = report.env_steps - self._start[1]
        self.iterations += 1
        if self.wall_s >= self._seconds and self.iterations >= 2:
            self.peak_bytes, self.proportional_bytes = tree_bytes()
            raise Enough


def run(name: str, seconds: float, placement: dict[str, object], max_policy_lag: int) -> dict:
    """Train workload ``name`` for ``seconds``."""
    env, sizes = WORKLOADS[name]
    workload = describe(env, **{**COMMON, **sizes})
    calibration = prepare_calibration(workload).calibration
    scheme = str(placement.pop("scheme", "auto"))
    plan = autoplace.make_plan(
        calibration,
        workload,
        model=cost_model_of(calibration),
        scheme=scheme,
        max_policy_lag=max_policy_lag,
        placement=placement,
    )
    meter = Meter(seconds)
    with contextlib.suppress(Enough):
        autoplace.train(plan, total_steps=10**9, callbacks=[meter])
    return {
        "peer": "autoplace",
        "version": autoplace.__version__,
        "workload": name,
        "env_steps": meter.env_steps,
        "wall_s": round(meter.wall_s, 3),
        "env_steps_per_s": round(meter.env_steps / meter.wall_s, 1),
        "peak_rss_mb": round(meter.peak_bytes / 2**20),
        "peak_pss_mb": round(meter.proportional_bytes / 2**20),
        "note": f"{plan.scheme}, {describe_placement(plan.placement)}, predicted "
        f"{plan.chosen.env_steps_per_s:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="W1")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--max-policy-lag", type=int, default=1)
    parser.add_argument("--scheme", default="auto")
    parser.add_argument("--engine")
    parser.add_argument("--env-backend")
    parser.add_argument("--num-workers", type=int)
    options = parser.parse_args()
    names = ("scheme", "engine", "env_backend", "num_workers")
    placement = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in placement.items() if value is not None}
    print(json.dumps(run(options.workload, options.seconds, given, options.max_policy_lag)))


if __name__ == "__main__":
    main()
