"""The emulated environments: declared cost, deterministic dynamics, both kinds of ending."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from autoplace import device
from autoplace.envs import inspect_env, make_vector_env, spawn_seeds
from autoplace.workload import EnvSpec
from tests.emulated import EmulatedMachine
from tests.emulated.env import make_cartpole, make_env

FILE = str(Path(__file__).with_name("env.py"))


@pytest.mark.parametrize("continuous", [False, True])
def test_gymnasiums_own_checks_pass(continuous: bool) -> None:
    check_env(make_env(obs_dim=5, num_actions=3, continuous=continuous), skip_render_check=True)


def test_a_step_takes_the_declared_time() -> None:
    with EmulatedMachine():
        env = make_env(env_step_s=3e-4)
        env.reset(seed=0)
        start_s = device.now()
        for _ in range(10):
            env.step(0)
        assert device.now() - start_s == pytest.approx(3e-3)


def test_steps_spread_as_declared() -> None:
    with EmulatedMachine():
        env = make_env(env_step_s=1e-3, env_step_spread_s=2e-4)
        env.reset(seed=0)
        times = []
        for _ in range(4000):
            start_s = device.now()
            env.step(0)
            times.append(device.now() - start_s)
    assert statistics.mean(times) == pytest.approx(1e-3, rel=0.02)
    assert statistics.stdev(times) == pytest.approx(2e-4, rel=0.05)
    assert min(times) > 0


def _trajectory(seed: int, **kwargs: object) -> list[tuple[float, ...]]:
    env = make_env(obs_dim=3, num_actions=4, episode_steps=20, **kwargs)
    env.reset(seed=seed)
    rows = []
    for step in range(60):
        observation, reward, terminated, truncated, _ = env.step(step % 4)
        rows.append((*observation.tolist(), reward, terminated, truncated))
        if terminated or truncated:
            env.reset()
    return rows


def test_a_seed_repeats_a_trajectory_and_its_time_does_not_change_it() -> None:
    assert _trajectory(1) == _trajectory(1) == _trajectory(1, env_step_spread_s=1e-5)
    assert _trajectory(1) != _trajectory(2)


@pytest.mark.parametrize("continuous", [False, True])
def test_episodes_end_in_both_ways_and_the_best_actions_pay(continuous: bool) -> None:
    env = make_env(obs_dim=4, num_actions=3, continuous=continuous)
    rewards, endings = {"best": 0.0, "random": 0.0}, set()
    for kind in rewards:
        observation, _ = env.reset(seed=0)
        for _ in range(3000):
            action = env.action_space.sample()
            if kind == "best":
                action = np.clip(observation[:3], -1, 1) if continuous else observation[:3].argmax()
            observation, reward, terminated, truncated, _ = env.step(action)
            rewards[kind] += reward / 3000
            if terminated or truncated:
                endings.add("terminated" if terminated else "truncated")
                observation, _ = env.reset()
    assert endings == {"terminated", "truncated"}
    assert rewards["best"] == pytest.approx(1.0)
    assert rewards["random"] < 0.6


def test_cartpole_is_gymnasiums_with_a_declared_time() -> None:
    with EmulatedMachine():
        env = make_cartpole(env_step_s=1e-4)
        env.reset(seed=0)
        start_s = device.now()
        observation, reward, *_ = env.step(1)
        assert (observation.shape, reward) == ((4,), 1.0)
        assert device.now() - start_s == pytest.approx(1e-4)


def test_autoplace_makes_it_by_its_path_and_steps_it_in_virtual_time() -> None:
    spec = EnvSpec.make(f"{FILE}:make_env", {"obs_dim": 6, "num_actions": 3, "env_step_s": 1e-3})
    with EmulatedMachine():
        description = inspect_env(spec)
        envs = make_vector_env(description, num_envs=4, backend="sync")
        envs.reset(spawn_seeds(0, 4))
        start_s = device.now()
        envs.step(np.zeros(4, np.int64))
        assert device.now() - start_s == pytest.approx(4e-3)
        envs.close()
