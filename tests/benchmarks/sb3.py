"""Stable-Baselines3 on the work of the other benchmarks.

    python -m tests.benchmarks.sb3 --workload W1 --seconds 8
    python -m tests.benchmarks.sb3 --solve --seed 0

Prints one JSON line: what ``tests.benchmarks.throughput`` prints, or with ``--solve`` what
``tests.benchmarks.time_to_return`` does, under the tuned hyperparameters of RL Baselines3 Zoo.
"""

from __future__ import annotations

import argparse
import json
import time

import psutil

PROCESS_START_S = psutil.Process().create_time()

import gymnasium as gym  # noqa: E402 - the clock starts first
import numpy as np  # noqa: E402
import stable_baselines3  # noqa: E402
from stable_baselines3 import PPO  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.env_util import make_atari_env, make_vec_env  # noqa: E402
from stable_baselines3.common.vec_env import VecFrameStack  # noqa: E402
from torch import nn  # noqa: E402

from tests.benchmarks.memory import tree_bytes  # noqa: E402
from tests.benchmarks.workloads import COMMON, WORKLOADS  # noqa: E402

ENV, SOLVED, EPISODES, EVERY = "CartPole-v1", 475.0, 20, 10


class _Meter(BaseCallback):
    """Counts whole iterations from the end of the first one on."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._is_over = seconds, False
        self._start: tuple[float, int] | None = None
        self.wall_s, self.env_steps = 0.0, 0
        self.memory_bytes = (0, 0)

    def _on_rollout_start(self) -> None:
        if not self.num_timesteps:
            return
        if self._start is None:
            self._start = time.perf_counter(), self.num_timesteps
            return
        self.wall_s = time.perf_counter() - self._start[0]
        self.env_steps = self.num_timesteps - self._start[1]
        if self.wall_s >= self._seconds:
            self.memory_bytes, self._is_over = tree_bytes(), True

    def _on_step(self) -> bool:
        return not self._is_over


def throughput(name: str, seconds: float) -> dict:
    """Train workload ``name`` for ``seconds``."""
    env_id, sizes = WORKLOADS[name]
    if env_id.startswith("ALE/"):
        import ale_py

        gym.register_envs(ale_py)
        kwargs = {"frameskip": 1, "repeat_action_probability": 0.0}
        env = VecFrameStack(make_atari_env(env_id, n_envs=8, env_kwargs=kwargs), 4)
        policy, policy_kwargs = "CnnPolicy", {}
    else:
        env = make_vec_env(env_id, n_envs=COMMON["num_envs"])
        hidden = list(sizes.get("hidden_sizes", (64, 64)))
        policy = "MlpPolicy"
        policy_kwargs = {"net_arch": {"pi": hidden, "vf": hidden}, "activation_fn": nn.Tanh}
    model = PPO(
        policy,
        env,
        n_steps=sizes["rollout_steps"],
        batch_size=sizes["minibatch_rows"],
        n_epochs=sizes["epochs"],
        learning_rate=COMMON["learning_rate"],
        ent_coef=COMMON["entropy_coef"],
        policy_kwargs=policy_kwargs,
        device="cpu",
    )
    meter = _Meter(seconds)
    model.learn(10**9, callback=meter)
    peak_bytes, proportional_bytes = meter.memory_bytes
    return {
        "workload": name,
        "env_steps": meter.env_steps,
        "wall_s": round(meter.wall_s, 3),
        "env_steps_per_s": round(meter.env_steps / meter.wall_s, 1),
        "peak_rss_mb": round(peak_bytes / 2**20),
        "peak_pss_mb": round(proportional_bytes / 2**20),
    }


class _Examiner(BaseCallback):
    """Evaluates now and then, and ends the run once it is solved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed, self._iterations = seed, 0
        self._envs = gym.make_vec(
            ENV, num_envs=EPISODES, vectorization_mode=gym.VectorizeMode.VECTOR_ENTRY_POINT
        )
        self.evaluation_s = self.train_s = self.total_s = 0.0
        self.env_steps = 0

    def _on_training_start(self) -> None:
        self._start_s = time.perf_counter()

    def _on_rollout_start(self) -> None:
        if not self.num_timesteps:
            return
        self._iterations += 1
        if self._iterations % EVERY:
            return
        start_s = time.perf_counter()
        mean_return = self._mean_return()
        self.evaluation_s += time.perf_counter() - start_s
        if mean_return >= SOLVED:
            self.env_steps = self.num_timesteps
            self.train_s = time.perf_counter() - self._start_s - self.evaluation_s
            self.total_s = time.time() - PROCESS_START_S

    def _on_step(self) -> bool:
        return not self.env_steps

    def _mean_return(self) -> float:
        observations, _ = self._envs.reset(seed=1000 + self._seed)
        returns, running = np.zeros(EPISODES), np.ones(EPISODES, bool)
        while running.any():
            actions, _ = self.model.predict(observations, deterministic=True)
            observations, _, terminated, truncated, _ = self._envs.step(actions)
            returns += running
            running &= ~(terminated | truncated)
        return float(returns.mean())


def solve(seed: int) -> dict:
    """Train until CartPole-v1 is solved."""
    model = PPO(
        "MlpPolicy",
        make_vec_env(ENV, n_envs=8, seed=seed),
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gae_lambda=0.8,
        gamma=0.98,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        seed=seed,
        device="cpu",
    )
    examiner = _Examiner(seed)
    model.learn(100_000, callback=examiner)
    return {
        "seed": seed,
        "reached": bool(examiner.env_steps),
        "steps": examiner.env_steps,
        "train_s": round(examiner.train_s, 2),
        "evaluation_s": round(examiner.evaluation_s, 2),
        "total_s": round(examiner.total_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="W1")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--solve", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = solve(options.seed) if options.solve else throughput(options.workload, options.seconds)
    print(json.dumps({"peer": "sb3", "version": stable_baselines3.__version__, **found}))


if __name__ == "__main__":
    main()
