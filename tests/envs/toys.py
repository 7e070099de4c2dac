"""Small environments whose transitions can be told apart."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np


class Counter(gym.Env):
    """Counts its steps: after step k of episode e it observes (e, k) and pays k.

    Terminates after ``length`` steps, or is truncated then.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, length=3, truncates=False, reward=None, observe=None):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = gym.spaces.Discrete(2)
        self.length, self.truncates = length, truncates
        self.reward, self.observe = reward, observe
        self.episode, self.steps = -1, 0
        self.total_steps = 0
        self.seeds = []
        self.actions = []

    def observation(self):
        plain = np.array([self.episode, self.steps], np.float64)
        return plain if self.observe is None else self.observe(plain, self.total_steps)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode += 1
        self.steps = 0
        return self.observation(), {}

    def step(self, action):
        self.actions.append(action)
        self.steps += 1
        self.total_steps += 1
        over = self.steps >= self.length
        reward = float(self.steps) if self.reward is None else self.reward(self.total_steps)
        return self.observation(), reward, over and not self.truncates, over and self.truncates, {}


class Stateless(gym.Env):
    """Every episode is one step long, so that a reset loses nothing: runs can be compared."""

    def __init__(self):
        self.observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.array([0.5, -0.5, 0.25], np.float32), {}

    def step(self, action):
        return np.ones(3, np.float32), float(action), True, False, {}


class Recorder(gym.Env):
    """A Box action space that remembers what it was given, and never ends."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, low=-2.0, high=2.0, shape=(2,), dtype=np.float32):
        self.observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = gym.spaces.Box(low, high, shape, dtype)
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.actions.append(np.array(action))
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Spaces(gym.Env):
    """Any spaces; every observation is a sample."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}


def register(name, factory):
    """Make ``factory`` (called without arguments) an environment of Gymnasium; returns its id."""
    env_id = f"AutoplaceTest/{name}-v0"
    gym.registry.pop(env_id, None)
    gym.register(env_id, entry_point=factory)
    return env_id
