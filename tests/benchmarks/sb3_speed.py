"""Stable-Baselines3 as ``plan.for_sb3()`` says, beside its own defaults, in turns.

    python tests/benchmarks/sb3_speed.py [--workload W1]... [--turns 7] [--seconds 8]

Sizes and coefficients are the same on both sides; what differs is what the plan decides: threads,
device and vector environment. Both models live in one process and take turns of whole iterations,
so that a machine that is faster for a while is so for both. What counts is the ratio of a pair of
neighbouring turns: their median, with the 90 % interval of the bootstrap over the pairs. The
hand-over is slower where the whole interval lies below 1 and the two differ at all.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common import vec_env as vec_envs
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import get_device

import autoplace
from autoplace.planner.handover import Sb3Arguments
from autoplace.prepare import prepare_calibration

PLAIN = {
    "normalize_observations": False,
    "normalize_rewards": False,
    "anneal_learning_rate": False,
}
WORKLOADS: dict[str, tuple[str, dict[str, object]]] = {
    "W1": ("CartPole-v1", {"epochs": 4, "minibatch_rows": 256}),
    "W2": ("Hopper-v5", {"rollout_steps": 256, "minibatch_rows": 64}),
    "W3": (
        "HalfCheetah-v5",
        {"rollout_steps": 256, "minibatch_rows": 512, "hidden_sizes": (256, 256)},
    ),
    "W4": ("ALE/Pong-v5", {"epochs": 4, "minibatch_rows": 256, "hidden_sizes": ()}),
}


class Side:
    """A model and the settings that hold while it has its turn."""

    def __init__(self, model: PPO, threads: int) -> None:
        self._model, self._threads = model, threads
        self._learn()  # warm up

    def _learn(self) -> int:
        before = self._model.num_timesteps
        rows = self._model.n_steps * self._model.n_envs
        self._model.learn(rows, reset_num_timesteps=False)
        return self._model.num_timesteps - before

    def turn(self, seconds: float) -> float:
        """Env steps per second over whole iterations of at least ``seconds``."""
        torch.set_num_threads(self._threads)
        start_s, env_steps = time.perf_counter(), 0
        while time.perf_counter() - start_s < seconds:
            env_steps += self._learn()
        return env_steps / (time.perf_counter() - start_s)


def planned(arguments: Sb3Arguments) -> Side:
    torch.set_num_threads(arguments.torch_threads)
    backend = getattr(vec_envs, arguments.vec_env_class)
    env = make_vec_env(arguments.env, **arguments.vec_env, vec_env_cls=backend)
    return Side(PPO(env=env, **arguments.ppo), arguments.torch_threads)


def defaults(arguments: Sb3Arguments, threads: int) -> Side:
    """The same learning, placed as Stable-Baselines3 places it where nobody says otherwise."""
    torch.set_num_threads(threads)
    env = make_vec_env(arguments.env, **arguments.vec_env)
    return Side(PPO(env=env, **{**arguments.ppo, "device": "auto"}), threads)


def is_default(arguments: Sb3Arguments, threads: int) -> bool:
    """Whether the plan places the run just as Stable-Baselines3 would."""
    return (
        arguments.torch_threads == threads
        and arguments.vec_env_class == "DummyVecEnv"
        and get_device(arguments.ppo["device"]) == get_device("auto")
    )


def interval(ratios: list[float]) -> tuple[float, float]:
    """90 % interval of the median ratio, by the bootstrap over the pairs."""
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), (0.05, 0.95))
    return float(low), float(high)


def compare(name: str, threads: int, turns: int, seconds: float) -> str:
    """One line on a workload; ``threads`` are Stable-Baselines3's own."""
    env, changes = WORKLOADS[name]
    if name == "W4" and importlib.util.find_spec("ale_py") is None:
        return f"{name}: ale_py is not installed"
    workload = autoplace.describe(env, **PLAIN, **changes)
    plan = autoplace.make_plan(prepare_calibration(workload).calibration, workload)
    arguments = plan.for_sb3()
    ours, theirs = planned(arguments), defaults(arguments, threads)
    pairs = []
    for turn in range(turns):  # each side begins every other pair
        order = (ours, theirs) if turn % 2 else (theirs, ours)
        rates = {side: side.turn(seconds) for side in order}
        pairs.append((rates[ours], rates[theirs]))
    ratios = [ours_rate / theirs_rate for ours_rate, theirs_rate in pairs]
    low, high = interval(ratios)
    if is_default(arguments, threads):
        word = "the same placement, so what differs is noise"
    else:
        word = "slower" if high < 1 else "no slower"
    planned_rate, default_rate = (statistics.median(column) for column in zip(*pairs, strict=True))
    return (
        f"{name} {env}: planned {planned_rate:,.0f} env steps/s ({arguments.torch_threads} "
        f"threads, {arguments.vec_env_class}, {arguments.ppo['device']}), defaults "
        f"{default_rate:,.0f} ({threads} threads, DummyVecEnv, auto), ratio "
        f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}): {word}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), dest="workloads")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    threads = torch.get_num_threads()  # what Stable-Baselines3 finds and keeps

    for name in args.workloads or list(WORKLOADS):
        print(compare(name, threads, args.turns, args.seconds), flush=True)


if __name__ == "__main__":
    main()
