"""Sample efficiency beside Stable-Baselines3's PPO at the same hyperparameters, as curves.

    python tests/benchmarks/sample_efficiency.py --output DIR [--env CartPole-v1]... [--seeds N]

Both trainers get the same sizes and coefficients (Stable-Baselines3 through ``plan.for_sb3()``) and
the same number of env steps. Returns are those of the episodes that end in training. DIR gets a
CSV with a row per run, a picture, and a table of the mean return over the whole run (the area under
the curve) and over its last tenth, with the standard error over the seeds.

`--scheme double-buffer` has autoplace sample with weights that are one iteration old.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

import autoplace
from autoplace.planner.plan import Candidate, Placement, Plan

POINTS = 40  # of a curve
WINDOW = 20  # episodes that a point is the mean of
OURS, THEIRS = "autoplace", "Stable-Baselines3"

# Env steps, seeds, and what differs from the defaults.
TASKS: dict[str, tuple[int, int, dict[str, object]]] = {
    "CartPole-v1": (100_000, 5, {}),
    "Pendulum-v1": (200_000, 5, {"learning_rate": 1e-3, "gamma": 0.9}),
    "Hopper-v5": (300_000, 3, {"rollout_steps": 256}),
}
MINIBATCH_ROWS = 64


class Episodes:
    """The episodes that ended in a run, in order."""

    def __init__(self) -> None:
        self.env_steps: list[int] = []
        self.returns: list[float] = []

    def add(self, env_steps: int, episode_return: float) -> None:
        self.env_steps.append(env_steps)
        self.returns.append(episode_return)

    def curve(self, total_steps: int) -> np.ndarray:
        """``[POINTS]``: at equal distances, the mean of the last episodes that had ended by then.

        Before the first one has, what that one returned.
        """
        points = total_steps * np.arange(1, POINTS + 1) / POINTS
        ended = np.maximum(1, np.searchsorted(self.env_steps, points, side="right"))
        return np.array([np.mean(self.returns[max(0, n - WINDOW) : n]) for n in ended])


def make_plan(env: str, scheme: str) -> Plan:
    """A plan made by hand: nothing is measured, since what is learned does not depend on it."""
    changes = TASKS[env][2]
    workload = autoplace.describe(env, minibatch_rows=MINIBATCH_ROWS, **changes)
    hyper = workload.hyperparameters
    placement = Placement(
        device="cpu",
        sample_device="cpu",
        learn_device="cpu",
        transfer_interval_steps=hyper.rollout_steps,
        minibatch_rows=MINIBATCH_ROWS,
        num_envs=hyper.num_envs,
    )
    chosen = Candidate(scheme=scheme, placement=placement)
    return Plan(
        workload=workload,
        fingerprint="",
        chosen=chosen,
        candidates=(chosen,),
        runner_up=None,
        margin_fraction=0.0,
        is_close=False,
        bottleneck="",
        flips=(),
        changes_learning=(),
        reasons=(),
    )


def run_ours(plan: Plan, total_steps: int, seed: int) -> Episodes:
    found = Episodes()

    class Watch(autoplace.Callback):
        def on_iteration(self, report):
            for episode in report.episodes:
                found.add(episode.env_steps, episode.episode_return)

    autoplace.train(plan, total_steps=total_steps, seed=seed, callbacks=[Watch()])
    return found


def run_theirs(plan: Plan, total_steps: int, seed: int) -> Episodes:
    found = Episodes()

    class Watch(BaseCallback):
        def _on_step(self):
            for info in self.locals["infos"]:
                if "episode" in info:
                    found.add(self.num_timesteps, info["episode"]["r"])
            return True

    arguments = plan.for_sb3()
    torch.set_num_threads(arguments.torch_threads)
    env = make_vec_env(arguments.env, **arguments.vec_env, seed=seed)
    if arguments.vec_normalize is not None:
        env = VecNormalize(env, **arguments.vec_normalize)
    PPO(env=env, seed=seed, **arguments.ppo).learn(total_steps, callback=Watch())
    env.close()
    return found


def summary(curves: np.ndarray) -> tuple[float, float, float, float]:
    """(mean over the run, its standard error, mean over the last tenth, its standard error)."""
    root = math.sqrt(len(curves))
    whole, last = curves.mean(1), curves[:, -POINTS // 10 :].mean(1)
    return whole.mean(), whole.std(ddof=1) / root, last.mean(), last.std(ddof=1) / root


def describe(env: str, curves: dict[str, np.ndarray]) -> str:
    """A table, and whether the two differ by more than chance would explain."""
    lines = [f"{env:<20}{'whole run':>22}{'last tenth':>22}"]
    found = {name: summary(rows) for name, rows in curves.items()}
    for name, (whole, whole_error, last, last_error) in found.items():
        lines.append(
            f"  {name:<18}{whole:>12.1f} +- {whole_error:<6.1f}{last:>12.1f} +- {last_error:<6.1f}"
        )
    ours, theirs = found[OURS], found[THEIRS]
    for at, part in ((0, "whole run"), (2, "last tenth")):
        error = math.hypot(ours[at + 1], theirs[at + 1])
        lines.append(f"  {part}: {(ours[at] - theirs[at]) / error:+.1f} standard errors apart")
    return "\n".join(lines)


def draw(path: Path, results: dict[str, dict[str, np.ndarray]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 3.6), squeeze=False)
    for axis, (env, curves) in zip(axes[0], results.items(), strict=True):
        steps = TASKS[env][0] * np.arange(1, POINTS + 1) / POINTS
        for (name, rows), colour in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
            axis.plot(steps, rows.T, color=colour, alpha=0.25, linewidth=0.8)
            axis.plot(steps, rows.mean(0), color=colour, label=name)
        axis.set(title=f"{env}, {len(rows)} seeds", xlabel="env steps", ylabel="return")
        axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--env", action="append", choices=list(TASKS), dest="envs")
    parser.add_argument("--seeds", type=int, help="of each trainer; 5, for Hopper-v5 3")
    parser.add_argument("--scheme", default="cpu", choices=("cpu", "double-buffer"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    results: dict[str, dict[str, np.ndarray]] = {}
    with (args.output / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["env", "trainer", "seed", *(f"point_{i + 1}" for i in range(POINTS))])
        for env in args.envs or list(TASKS):
            total_steps, seeds, _ = TASKS[env]
            plan = make_plan(env, args.scheme)
            curves: dict[str, list[np.ndarray]] = {OURS: [], THEIRS: []}
            for seed in range(args.seeds or seeds):
                for name, run in ((OURS, run_ours), (THEIRS, run_theirs)):
                    curve = run(plan, total_steps, seed).curve(total_steps)
                    curves[name].append(curve)
                    writer.writerow([env, name, seed, *(f"{value:.2f}" for value in curve)])
                    file.flush()
            results[env] = {name: np.stack(rows) for name, rows in curves.items()}
            print(describe(env, results[env]), flush=True)
    draw(args.output / "curves.png", results)


if __name__ == "__main__":
    main()
