"""Environments whose step takes a declared time on the virtual clock.

Named to autoplace as ``tests/emulated/env.py:make_env`` or ``...:make_cartpole``, with keyword
arguments; the file is loaded by its path, so it imports nothing of its neighbours. A reset is free
unless it is given a time, too.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np

from autoplace import device


class StepTimer:
    """Charges the clock for one step: lognormal, so never negative, with given mean and spread.

    A lognormal of mean m and standard deviation s has the parameters sigma^2 = ln(1 + (s/m)^2) and
    mu = ln m - sigma^2 / 2.
    """

    def __init__(self, step_s: float, spread_s: float) -> None:
        if step_s < 0 or spread_s < 0:
            raise ValueError(f"a step takes 0 seconds or more, got {step_s} +- {spread_s}")
        self._step_s = step_s
        variance = math.log1p((spread_s / step_s) ** 2) if step_s and spread_s else 0.0
        self._sigma = math.sqrt(variance)
        self._mu = math.log(step_s) - variance / 2 if step_s else 0.0

    def charge(self, rng: np.random.Generator) -> None:
        """Let one step's time pass."""
        seconds = self._step_s
        if self._sigma:
            seconds = math.exp(self._mu + self._sigma * rng.standard_normal())
        device.charge(seconds=seconds)


class EmulatedEnv(gym.Env[np.ndarray, Any]):
    """A small control task of any size whose step takes a declared time.

    The state s of ``obs_dim`` numbers is observed whole and decays towards 0 under noise. The best
    action can be read off it: with discrete actions, the largest of the first numbers (taken
    around, where there are more actions than numbers), worth a reward of 1; with continuous ones,
    those numbers themselves, worth 1 minus the mean squared miss. An action pushes one number of
    the state, and an episode terminates when the first one leaves [-3, 3]; it is truncated after
    ``episode_steps``.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it so

    def __init__(
        self,
        *,
        obs_dim: int = 4,
        num_actions: int = 2,
        continuous: bool = False,
        env_step_s: float = 2e-5,
        env_step_spread_s: float = 0.0,
        episode_steps: int = 100,
        reset_s: float = 0.0,
    ) -> None:
        self._reset_s = reset_s
        self._continuous = continuous
        self._episode_steps = episode_steps
        self._timer = StepTimer(env_step_s, env_step_spread_s)
        self._targets = np.arange(num_actions) % obs_dim
        self._state = np.zeros(obs_dim, np.float32)
        self._time = np.random.default_rng(0)
        self._step = 0
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32)
        self.action_space: gym.Space[Any]
        if continuous:
            self.action_space = gym.spaces.Box(-1.0, 1.0, (num_actions,), np.float32)
        else:
            self.action_space = gym.spaces.Discrete(num_actions)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode at a random state."""
        super().reset(seed=seed)
        device.charge(seconds=self._reset_s)
        if seed is not None:
            # Apart from the dynamics, so that a declared time never changes what is learned.
            self._time = np.random.default_rng(seed)
        self._step = 0
        self._state = self.np_random.standard_normal(self._state.size, dtype=np.float32)
        return self._state.copy(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Let the declared time pass and the state move on."""
        self._timer.charge(self._time)
        wanted = self._state[self._targets]
        noise = self.np_random.standard_normal(self._state.size, dtype=np.float32)
        state = 0.9 * self._state + 0.3 * noise
        if self._continuous:
            given = np.clip(np.asarray(action, np.float32), -1.0, 1.0)
            reward = 1.0 - float(np.mean((given - np.clip(wanted, -1.0, 1.0)) ** 2))
            np.add.at(state, self._targets, 0.2 * given)
        else:
            reward = float(int(action) == int(np.argmax(wanted)))
            state[self._targets[int(action)]] += 0.2
        self._state = state
        self._step += 1
        terminated = bool(abs(state[0]) > 3.0)
        truncated = not terminated and self._step >= self._episode_steps
        return state.copy(), reward, terminated, truncated, {}


class _Timed(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose step also takes a declared time."""

    def __init__(self, env: gym.Env[Any, Any], env_step_s: float, env_step_spread_s: float) -> None:
        super().__init__(env)
        self._timer = StepTimer(env_step_s, env_step_spread_s)
        self._time = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode; a seed also seeds the times."""
        if seed is not None:
            self._time = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Let the declared time pass, and step."""
        self._timer.charge(self._time)
        return self.env.step(action)


def make_env(**kwargs: Any) -> EmulatedEnv:
    """An :class:`EmulatedEnv`; the keyword arguments are its own."""
    return EmulatedEnv(**kwargs)


def make_cartpole(*, env_step_s: float = 5e-6, env_step_spread_s: float = 0.0) -> gym.Env[Any, Any]:
    """Gymnasium's CartPole-v1, whose step takes a declared time."""
    env = gym.make("CartPole-v1", disable_env_checker=True)
    return _Timed(env, env_step_s, env_step_spread_s)
