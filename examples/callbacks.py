"""Listen to a run: stop it once it is good enough, and hear of what differs from the plan.

A callback overrides what it needs of autoplace.Callback:

    on_start(start)       the plan, the seed, how far it goes, snapshot() for the policy
    on_iteration(report)  step counts, returns, episodes that ended, seconds by stage, losses
    on_check(check)       stages that are off their predictions, and why
    on_switch(plan)       the run goes on under another plan (only with `replan`)
    on_end(result)        what happened

Run: python examples/callbacks.py
"""

import argparse

import autoplace


class StopWhenSolved(autoplace.Callback):
    """Ends the run, as Ctrl-C would, once 100 episodes in a row have this mean return."""

    def __init__(self, target):
        self.target = target

    def on_iteration(self, report):
        if report.num_episodes >= 100 and report.mean_return >= self.target:
            raise autoplace.StopRequested


class Tell(autoplace.Callback):
    def on_start(self, start):
        print(f"{start.plan.scheme} for {start.num_iterations} iterations at most")

    def on_check(self, check):
        for line in check.lines:
            print(f"iteration {check.iteration}: {line}")

    def on_switch(self, plan):
        print(f"on with {plan.scheme} from here")

    def on_end(self, result):
        ended = "stopped" if result.interrupted else "went to its end"
        print(f"{ended} after {result.env_steps:,} env steps, mean return {result.mean_return:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=float, default=475.0)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of calibration")
    args = parser.parse_args()

    calibration = autoplace.calibrate(budget_s=args.budget, envs=["CartPole-v1"])
    plan = autoplace.make_plan(calibration, autoplace.describe("CartPole-v1"))
    autoplace.train(
        plan,
        total_steps=args.steps,
        callbacks=[Tell(), StopWhenSolved(args.target)],
        calibration=calibration,  # lets a slower machine be told from other reasons
        replan=autoplace.make_replanner(calibration),
    )


if __name__ == "__main__":
    main()
