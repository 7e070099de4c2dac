"""Seconds until CartPole-v1 is solved: a mean return of 475 over 20 deterministic episodes.

    python -m tests.benchmarks.time_to_return --seed 0

Trains with the preset and the planned scheme, and plays 20 episodes side by side every 10
iterations; prints one JSON line: ``train_s`` leaves the evaluations out, ``total_s`` is everything
from the start of the process on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time

import gymnasium as gym
import numpy as np
import psutil

PROCESS_START_S = psutil.Process().create_time()

import autoplace  # noqa: E402 - the clock starts first
from autoplace.kept_model import cost_model_of  # noqa: E402
from autoplace.prepare import prepare_calibration  # noqa: E402
from autoplace.presets import preset_hyperparameters  # noqa: E402

ENV, SOLVED, EPISODES, EVERY = "CartPole-v1", 475.0, 20, 10


class Solved(Exception):  # noqa: N818 - not an error
    """The return is reached."""


class Examiner(autoplace.Callback):
    """Evaluates now and then, and ends the run once it is solved."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._start_s = self.evaluation_s = self.train_s = self.total_s = 0.0
        self.env_steps = 0

    def on_start(self, start):
        self._snapshot = start.snapshot
        self._envs = gym.make_vec(
            ENV, num_envs=EPISODES, vectorization_mode=gym.VectorizeMode.VECTOR_ENTRY_POINT
        )
        self._start_s = time.perf_counter()

    def on_iteration(self, report):
        if report.iteration % EVERY:
            return
        start_s = time.perf_counter()
        mean_return = self._mean_return()
        self.evaluation_s += time.perf_counter() - start_s
        if mean_return >= SOLVED:
            self.env_steps = report.env_steps
            self.train_s = time.perf_counter() - self._start_s - self.evaluation_s
            self.total_s = time.time() - PROCESS_START_S
            raise Solved

    def _mean_return(self) -> float:
        """Of one episode of each environment: a reward of 1 a step until it ends."""
        policy = self._snapshot()
        observations, _ = self._envs.reset(seed=1000 + self._seed)
        returns, running = np.zeros(EPISODES), np.ones(EPISODES, bool)
        while running.any():
            observations, _, terminated, truncated, _ = self._envs.step(policy(observations))
            returns += running
            running &= ~(terminated | truncated)
        return float(returns.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=100_000)
    options = parser.parse_args()
    workload = autoplace.describe(ENV, **preset_hyperparameters("auto", ENV))
    calibration = prepare_calibration(workload).calibration
    plan = autoplace.make_plan(
        calibration,
        workload,
        model=cost_model_of(calibration),
        total_steps=options.total_steps,
    )
    examiner = Examiner(options.seed)
    with contextlib.suppress(Solved):
        autoplace.train(
            plan, total_steps=options.total_steps, seed=options.seed, callbacks=[examiner]
        )
    print(
        json.dumps(
            {
                "peer": "autoplace",
                "version": autoplace.__version__,
                "seed": options.seed,
                "reached": bool(examiner.env_steps),
                "steps": examiner.env_steps,
                "train_s": round(examiner.train_s, 2),
                "evaluation_s": round(examiner.evaluation_s, 2),
                "total_s": round(examiner.total_s, 2),
                "scheme": plan.scheme,
            }
        )
    )


if __name__ == "__main__":
    main()
