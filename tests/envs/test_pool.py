"""EnvPool: what it ignores and resets, where it may run, and its own episodes where installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys

import gymnasium as gym
import numpy as np
import pytest

from autoplace import store
from autoplace.envs import BACKENDS, describe, inspect_env, make_vector_env, spawn_seeds
from autoplace.envs.pool import has_pool
from autoplace.errors import UsageError
from autoplace.machine import detect_machine
from autoplace.measure.envs import env_tasks
from autoplace.planner.choices import OWN_DYNAMICS
from autoplace.planner.search import make_plan as make_any_plan
from autoplace.prepare import prepare_calibration
from autoplace.train import train
from autoplace.workload import EnvSpec
from tests.envs import fake_envpool
from tests.envs.toys import Counter, register
from tests.synthetic import Truth, env_measurements, make_calibration
from tests.train.plans import Listener, make_plan

CARTPOLE = EnvSpec(id="CartPole-v1")
PENDULUM = EnvSpec(id="Pendulum-v1")
installed = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="envpool is not installed"
)


@pytest.fixture
def fake(monkeypatch):
    module = fake_envpool.module()
    monkeypatch.setitem(sys.modules, "envpool", module)
    return module


def make_pool(spec, num_envs, num_workers=2):
    return make_vector_env(
        inspect_env(spec), num_envs=num_envs, backend="envpool", num_workers=num_workers
    )


# --------------------------------------------------------------------------------------------------
# A stand-in whose transitions are known


def test_every_transition_is_that_of_a_single_environment_and_resets_are_none(fake):
    """The stand-in runs Gymnasium's CartPole, so a lone one with the same actions is the truth."""
    num_envs, steps = 3, 120
    envs = make_pool(CARTPOLE, num_envs)
    first = envs.reset(spawn_seeds(1, num_envs)).copy()
    _, _, threads, seed = fake.made[-1]
    assert threads == 2
    actions = np.random.default_rng(0).integers(2, size=(steps, num_envs))
    lone = [gym.make("CartPole-v1") for _ in range(num_envs)]
    current = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(lone)])
    np.testing.assert_array_equal(first, current)
    over, num_ended = np.zeros(num_envs, bool), 0
    for row in actions:
        step = envs.step(row)
        assert (step.valid is None) == (not over.any())
        for i, env in enumerate(lone):
            if over[i]:  # this step only reset it
                current[i], over[i] = env.reset()[0], False
                assert not step.valid[i] and step.rewards[i] == 0.0 and i not in list(step.ended)
            else:
                current[i], reward, terminated, truncated, _ = env.step(row[i])
                assert step.rewards[i] == reward and step.terminated[i] == terminated
                assert step.truncated[i] == truncated
                over[i] = terminated or truncated
                assert step.valid is None or step.valid[i]
        np.testing.assert_array_equal(step.observations, current)
        assert list(step.ended) == np.flatnonzero(over).tolist()
        np.testing.assert_array_equal(step.final_observations, current[over])
        num_ended += int(over.sum())
    assert num_ended > 6
    envs.close()


def test_a_reset_makes_the_pool_anew_since_its_seeds_are_fixed(fake, recwarn):
    envs = make_pool(CARTPOLE, 4)
    first = envs.reset(spawn_seeds(0, 4)).copy()
    assert not np.array_equal(first, envs.reset(spawn_seeds(1, 4)))
    np.testing.assert_array_equal(first, envs.reset(spawn_seeds(0, 4)))
    assert len({tuple(row) for row in first.tolist()}) == 4
    assert not [w for w in recwarn if "seeds are fixed" in str(w.message)]
    envs.close()


def test_a_run_counts_real_transitions_only(fake):
    plan = make_plan(num_envs=4, rollout_steps=64)
    placement = dataclasses.replace(plan.placement, env_backend="envpool", num_workers=1)
    chosen = dataclasses.replace(plan.chosen, placement=placement)
    plan = dataclasses.replace(plan, chosen=chosen, candidates=(chosen,))
    listener = Listener()
    result = train(plan, total_steps=1024, callbacks=[listener])
    assert result.num_episodes > 10
    assert 0 <= result.num_episodes - (1024 - result.env_steps) <= 4


@pytest.mark.parametrize(
    ("env_id", "kwargs", "usable"),
    [
        ("CartPole-v1", {}, True),
        ("Pendulum-v1", {}, True),
        ("CartPole-v1", {"max_episode_steps": 50}, True),
        ("Pendulum-v1", {"g": 9.81}, False),  # an argument that EnvPool does not take
        ("Blackjack-v1", {}, False),  # other observations
        ("MountainCar-v0", {}, False),  # no such environment
    ],
)
def test_it_is_offered_only_where_the_environment_is_the_same(fake, env_id, kwargs, usable):
    assert has_pool(inspect_env(EnvSpec.make(env_id, kwargs))) is usable


def test_it_is_not_offered_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(
        UsageError, match=r"envpool cannot run CartPole-v1 \(the package envpool, .*\): use sync"
    ):
        make_pool(CARTPOLE, 2)
    env_id = register("NoPool", Counter)
    assert not has_pool(inspect_env(EnvSpec(id=env_id)))


def test_backends_of_other_physics_are_known_to_the_planner():
    assert {entry.name for entry in BACKENDS if entry.has_own_dynamics} == OWN_DYNAMICS


def test_it_is_timed_and_planned_only_where_it_is_named(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPLACE_HOME", str(tmp_path))
    assert "envpool" not in {t.backend for t in env_tasks(CARTPOLE, (1, 8), (1, 2))}
    assert {
        (t.backend, t.workers) for t in env_tasks(CARTPOLE, (8,), (1, 2), backend="envpool")
    } == {
        ("envpool", 1),
        ("envpool", 2),
    }
    machine = detect_machine(accelerators=False)
    slow = env_measurements(CARTPOLE, 2e-5)
    calibration = dataclasses.replace(
        make_calibration(Truth(), usable_cpus=machine.usable_cpus), machine=machine
    ).with_measurements(slow)
    store.save_calibration(calibration)
    workload = describe("CartPole-v1")
    timed = []

    def measure(env, backend, nums_envs, usable_cpus):
        timed.append(backend)
        return [
            dataclasses.replace(
                m, task=dataclasses.replace(m.task, backend=backend, workers=1), times_s=(1e-6,) * 5
            )
            for m in slow
        ]

    monkeypatch.setattr("autoplace.measure.envs.measure_backend", measure)
    for _ in range(2):  # once and for all
        prepared = prepare_calibration(workload, env_backend="envpool").calibration
    assert timed == ["envpool"]
    asked = make_any_plan(prepared, workload, placement={"env_backend": "envpool"})
    assert asked.placement.env_backend == "envpool"
    assert any("envpool steps its own implementation" in line for line in asked.changes_learning)
    # It is 20 times as fast, and stored by now; a plan that was not told of it leaves it alone.
    unasked = make_any_plan(prepare_calibration(workload).calibration, workload)
    assert unasked.placement.env_backend == "sync"
    assert not any("envpool" in line for line in unasked.changes_learning)


# --------------------------------------------------------------------------------------------------
# EnvPool itself: its physics differ, so its episodes are checked for what they must be


@installed
def test_cartpoles_episodes_end_where_the_pole_fell_or_the_time_was_up():
    num_envs = 8
    envs = make_pool(EnvSpec.make("CartPole-v1", {"max_episode_steps": 30}), num_envs)
    first = envs.reset(spawn_seeds(1, num_envs))
    assert (np.abs(first) <= 0.05).all() and len({tuple(row) for row in first.tolist()}) == num_envs
    rng = np.random.default_rng(0)
    lengths, over = np.zeros(num_envs, int), np.zeros(num_envs, bool)
    seen = {"terminated": 0, "truncated": 0}
    for _ in range(200):
        step = envs.step(rng.integers(2, size=num_envs))
        valid = np.ones(num_envs, bool) if step.valid is None else step.valid
        np.testing.assert_array_equal(valid, ~over)  # the step after an end is a reset
        assert (np.abs(step.observations[~valid]) <= 0.05).all()
        assert (step.rewards[valid] == 1.0).all() and not step.rewards[~valid].any()
        lengths += valid
        over = np.zeros(num_envs, bool)
        for index, final in zip(step.ended, step.final_observations, strict=True):
            fell = abs(final[0]) > 2.4 or abs(final[2]) > 12 * np.pi / 180
            assert step.terminated[index] == fell
            assert step.truncated[index] == (lengths[index] == 30 and not fell)
            seen["terminated" if fell else "truncated"] += 1
            lengths[index], over[index] = 0, True
        running = valid & ~over
        assert (np.abs(step.observations[running, 0]) <= 2.4).all()
    assert seen["terminated"] > 10 and seen["truncated"] > 3
    envs.close()


@installed
def test_pendulum_is_cut_off_after_200_steps_and_seeds_repeat_to_the_bit():
    runs = []
    for _ in range(2):
        envs = make_pool(PENDULUM, 3)
        rows = [envs.reset(spawn_seeds(5, 3)).copy()]
        rng = np.random.default_rng(1)
        for t in range(1, 204):
            step = envs.step(rng.standard_normal((3, 1)).astype(np.float32) * 4)
            rows.append(step.observations.copy())
            assert list(step.ended) == ([0, 1, 2] if t == 200 else [])
            assert step.truncated.all() == (t == 200) and not step.terminated.any()
            assert (step.valid is None) == (t != 201)
            circle = step.observations[:, 0] ** 2 + step.observations[:, 1] ** 2
            np.testing.assert_allclose(circle, 1.0, atol=1e-5)
        runs.append(np.stack(rows))
        envs.close()
    np.testing.assert_array_equal(*runs)
