"""The planner alone, on a stored calibration: nothing is measured and torch is not imported.

Run: python examples/planner_api.py
"""

import argparse
import sys
from pathlib import Path

import autoplace

REFERENCE = Path(__file__).parents[1] / "calibration" / "reference-2-cores.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", type=Path, default=REFERENCE)
    parser.add_argument("--env", default="CartPole-v1")
    args = parser.parse_args()

    calibration = autoplace.load_calibration(args.calibration)
    model = autoplace.fit_cost_model(calibration)

    # One cost: the trainer's own gradient step on 512 rows, with two threads.
    workload = autoplace.describe(args.env, calibration=calibration)
    task = autoplace.Task(op="update", network=workload.network, rows=512, threads=2)
    cost = model.predict([task])[task]
    print(
        f"one update of 512 rows: {1e3 * cost.seconds:.2f} ms "
        f"({1e3 * cost.low_s:.2f} to {1e3 * cost.high_s:.2f}, {cost.source})"
    )

    # How the choice changes with the width of the network.
    for width in (32, 64, 256, 1024):
        plan = autoplace.make_plan(
            calibration, workload.replace(hidden_sizes=(width, width)), model=model
        )
        placement = plan.placement
        print(
            f"hidden {width:5}: {plan.scheme}, minibatch {placement.minibatch_rows}, "
            f"{placement.learn_threads} threads to learn, "
            f"{plan.chosen.env_steps_per_s:,.0f} env steps/s, bottleneck {plan.bottleneck}"
        )

    # Everything that a choice was made from.
    plan = autoplace.make_plan(calibration, workload, model=model)
    print("\n" + plan.explain())
    print("\nreasons:", *plan.reasons, sep="\n  - ")
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
