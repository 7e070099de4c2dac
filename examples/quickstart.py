"""The whole path in one file: calibrate, plan, explain, train, compare, evaluate.

Run: python examples/quickstart.py
"""

import argparse

import autoplace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of calibration")
    args = parser.parse_args()

    # Once per machine. `autoplace calibrate` does this and stores it; here it is kept in memory.
    calibration = autoplace.calibrate(budget_s=args.budget, envs=[args.env])

    # What has to be done, and where it is fastest.
    workload = autoplace.describe(args.env)
    plan = autoplace.make_plan(calibration, workload)
    print(plan.explain())

    # The same plan, run. `run_dir="runs/quickstart"` would keep checkpoints and TensorBoard events.
    policies = []

    class KeepPolicy(autoplace.Callback):
        def on_start(self, start):
            self.snapshot = start.snapshot

        def on_end(self, result):
            policies.append(self.snapshot())

    result = autoplace.train(plan, total_steps=args.steps, seed=0, callbacks=[KeepPolicy()])
    print(f"\n{result.env_steps:,} env steps at {result.env_steps_per_s:,.0f} a second")

    # What the plan promised, stage by stage, beside what happened.
    for row in autoplace.compare_stages(plan, result):
        measured = "" if row.measured_s is None else f"{1e3 * row.measured_s:8.2f} ms measured"
        print(f"{row.name:18}{row.lane:9}{1e3 * row.predicted_s:8.2f} ms predicted {measured}")

    score = autoplace.evaluate(policies[0], episodes=20)
    print(f"mean return over {score.episodes} episodes: {score.mean_return:.1f}")


if __name__ == "__main__":
    main()
