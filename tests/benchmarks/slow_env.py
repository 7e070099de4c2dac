"""An environment whose step takes a declared time of the CPU."""

import time

import gymnasium as gym
import numpy as np


class Slow(gym.Env):
    """Eight numbers that wander, and a step that takes ``step_s`` seconds of work.

    Of the thread's own time: a process that waits for a core gets nothing done.
    """

    def __init__(self, step_s=1e-3):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (8,), np.float32)
        self.action_space = gym.spaces.Discrete(4)
        self._step_s = step_s

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(8, np.float32), {}

    def step(self, action):
        end_s = time.thread_time() + self._step_s
        while time.thread_time() < end_s:
            pass
        self._steps += 1
        observation = self.np_random.standard_normal(8, dtype=np.float32)
        return observation, float(action == 0), False, self._steps >= 200, {}


def make_env(**kwargs):
    return Slow(**kwargs)
