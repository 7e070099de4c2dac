"""A stand-in for the package ``envpool``: its interface and its ways, over Gymnasium's own envs.

As EnvPool 1.2 has it: ``make`` with a seed that is fixed then (``reset(seed=...)`` warns and
ignores it) and one further seed per environment; ``autoreset_mode`` next step; a step after an end
ignores its action, resets, pays 0 and has ``elapsed_step`` 0; unknown arguments are a TypeError, an
unknown id an AssertionError.
"""

from __future__ import annotations

import types
import warnings
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

IDS = ("CartPole-v1", "Pendulum-v1", "Blackjack-v1", "Acrobot-v1")


class Pool(gym.vector.VectorEnv):
    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, env_id, num_envs, num_threads, seed, max_episode_steps):
        self.num_envs, self.seed = num_envs, seed
        self.config = {
            "num_envs": num_envs,
            "num_threads": num_threads,
            "seed": seed,
            "max_episode_steps": max_episode_steps,
        }
        self.envs = [gym.make(env_id, max_episode_steps=max_episode_steps) for _ in range(num_envs)]
        self.single_observation_space = self.envs[0].observation_space
        if env_id == "Blackjack-v1":  # as EnvPool has it; Gymnasium's is a Tuple
            self.single_observation_space = gym.spaces.Box(0, 31, (3,), np.int32)
        self.single_action_space = self.envs[0].action_space
        self.elapsed = np.zeros(num_envs, np.int32)
        self.over = np.zeros(num_envs, bool)

    def reset(self, env_id=None, *, seed=None, options=None):
        if seed is not None:
            warnings.warn("EnvPool seeds are fixed when the environment is created", stacklevel=2)
        self.elapsed[:] = 0
        self.over[:] = False
        rows = [env.reset(seed=self.seed + i)[0] for i, env in enumerate(self.envs)]
        return np.stack(rows), {"elapsed_step": self.elapsed.copy()}

    def step(self, actions):
        rows, rewards = [], np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for i, env in enumerate(self.envs):
            if self.over[i]:
                rows.append(env.reset()[0])
                self.elapsed[i] = 0
                continue
            row, rewards[i], terminated[i], truncated[i], _ = env.step(actions[i])
            rows.append(row)
            self.elapsed[i] += 1
        self.over = terminated | truncated
        return np.stack(rows), rewards, terminated, truncated, {"elapsed_step": self.elapsed.copy()}


def module() -> types.ModuleType:
    """What ``import envpool`` gives."""
    made = types.ModuleType("envpool")

    def make(
        task_id, env_type, num_envs=1, num_threads=0, seed=42, max_episode_steps=None
    ):  # a TypeError for anything else, as EnvPool's own
        assert task_id in IDS, f"{task_id} is not supported, `envpool.list_all_envs()` may help."
        assert env_type == "gymnasium"
        limit = max_episode_steps or gym.spec(task_id).max_episode_steps or 2**31 - 1
        made.made.append((task_id, num_envs, num_threads, seed))
        return Pool(task_id, num_envs, num_threads, seed, limit)

    made.make = make
    made.made = []
    made.list_all_envs = lambda: list(IDS)
    return made
