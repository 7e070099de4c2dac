"""Sample efficiency beside Stable-Baselines3's PPO at the same hyperparameters, as curves.

    python tests/benchmarks/sample_efficiency.py --output DIR [--env CartPole-v1]... [--seeds N]
    python tests/benchmarks/sample_efficiency.py --output DIR --curves FILE.csv...

Both trainers get the same sizes and coefficients (Stable-Baselines3 through ``plan.for_sb3()``) and
the same number of env steps. Returns are those of the episodes that end in training. DIR gets a
CSV with a row per run, a picture, and a table: the mean return over the whole run (the area under
the curve) and over its last tenth, with the standard error over the seeds, and whether the two
trainers differ by more than the seeds explain: the 95 % interval of the difference and the p-value
of Welch's test. `--curves` makes the picture and the table of runs that are there already.

`--scheme double-buffer` has autoplace sample with weights that are one iteration old.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

import autoplace
from autoplace.engines import EAGER, NUMPY
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


def make_plan(env: str, scheme: str, engine: str) -> Plan:
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
        engine=engine,
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


def compared(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Two sets of seeds, and whether they differ by more than chance: Welch's test."""
    sides = "".join(
        f"{x.mean():>10.1f} +- {x.std(ddof=1) / len(x) ** 0.5:<7.1f}" for x in (ours, theirs)
    )
    apart = ours.mean() - theirs.mean()
    if np.ptp(np.concatenate([ours, theirs])) == 0:
        return f"{sides}  the same"
    test = stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = test.confidence_interval(0.95)
    word = "within noise" if test.pvalue > 0.05 else "apart"
    return f"{sides}  {apart:+.1f} ({low:+.1f} to {high:+.1f}), p {test.pvalue:.2f}: {word}"


def describe(env: str, curves: dict[str, np.ndarray]) -> str:
    """A table of what was returned, and whether the two trainers differ."""
    rows = [f"{env:<14}{OURS:>20}{THEIRS:>21}  difference (95 % interval)"]
    for part, points in (("whole run", slice(None)), ("last tenth", slice(-POINTS // 10, None))):
        ours, theirs = (curves[name][:, points].mean(1) for name in (OURS, THEIRS))
        rows.append(f"  {part:<12}{compared(ours, theirs)}")
    return "\n".join(rows)


def draw(path: Path, results: dict[str, dict[str, np.ndarray]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 3.6), squeeze=False)
    for axis, (env, curves) in zip(axes[0], results.items(), strict=True):
        steps = TASKS[env][0] * np.arange(1, POINTS + 1) / POINTS
        seeds = " and ".join(str(n) for n in dict.fromkeys(len(rows) for rows in curves.values()))
        for (name, rows), colour in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
            axis.plot(steps, rows.T, color=colour, alpha=0.25, linewidth=0.8)
            axis.plot(steps, rows.mean(0), color=colour, label=name)
        axis.ticklabel_format(axis="x", style="sci", scilimits=(3, 3))
        axis.set(title=f"{env}, {seeds} seeds", xlabel="env steps", ylabel="return")
        axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def run(envs: list[str], first: int, num_seeds: int | None, scheme: str, file: Path) -> None:
    """Train with both, by seeds from ``first`` on; a row per run as soon as it is done."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["env", "trainer", "seed", *(f"point_{i + 1}" for i in range(POINTS))])
        for env in envs:
            total_steps, seeds, _ = TASKS[env]
            ours, theirs = (make_plan(env, scheme, engine) for engine in (NUMPY, EAGER))
            for seed in range(first, first + (num_seeds or seeds)):
                for name, train, plan in ((OURS, run_ours, ours), (THEIRS, run_theirs, theirs)):
                    curve = train(plan, total_steps, seed).curve(total_steps)
                    writer.writerow([env, name, seed, *(f"{value:.2f}" for value in curve)])
                    out.flush()


def read(files: list[Path]) -> dict[str, dict[str, np.ndarray]]:
    """``[seeds, POINTS]`` by environment and trainer."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for file in files:
        with file.open(newline="", encoding="utf-8") as lines:
            for env, name, _, *values in list(csv.reader(lines))[1:]:
                curves = found.setdefault(env, {OURS: [], THEIRS: []})
                curves[name].append([float(value) for value in values])
    return {
        env: {name: np.array(rows) for name, rows in curves.items()}
        for env, curves in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--env", action="append", choices=list(TASKS), dest="envs")
    parser.add_argument("--seeds", type=int, help="of each trainer; 5, for Hopper-v5 3")
    parser.add_argument("--first-seed", type=int, default=0, help="to add seeds to earlier runs")
    parser.add_argument("--scheme", default="cpu", choices=("cpu", "double-buffer"))
    parser.add_argument("--curves", type=Path, nargs="+", help="of earlier runs")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    files = args.curves
    if files is None:
        files = [args.output / "curves.csv"]
        run(args.envs or list(TASKS), args.first_seed, args.seeds, args.scheme, *files)
    results = read(files)
    for env, curves in results.items():
        print(describe(env, curves), flush=True)
    draw(args.output / "curves.png", results)


if __name__ == "__main__":
    main()
