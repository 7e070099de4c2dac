"""Which step times of an environment are taken."""

from __future__ import annotations

import numpy as np
import pytest

from autoplace import device
from autoplace.envs import EnvDescription, inspect_env
from autoplace.envs.sync import SyncVectorEnv
from autoplace.envs.vector import Step
from autoplace.measure import env_start
from autoplace.measure import envs as envs_module
from autoplace.measure.envs import _Steps, env_tasks, measure_env, part_sizes
from autoplace.workload import EnvSpec
from tests.emulated import EmulatedMachine
from tests.emulated import env as emulated_env

EMULATED_ENV = emulated_env.__file__


def test_parts_are_timed_as_sampler_processes_would_step_them() -> None:
    assert part_sizes(8, 1) == (8,)
    assert part_sizes(8, 2) == (8, 4)  # one process and the learner, or two processes
    assert part_sizes(16, 8) == (4, 2)  # seven do not divide 16, four do
    assert part_sizes(7, 4) == (7,)


def test_the_share_of_rows_that_are_transitions_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(envs_module, "_TIME_LIMIT_S", 0.05)
    env = EnvSpec.make("CartPole-v1")
    found = {m.task.backend: m for m in measure_env(env, env_tasks(env, (8,)))}
    assert found["sync"].valid_fraction == 1.0
    assert all(len(m.visits) == 2 for m in found.values())
    # Random actions end an episode after some 22 steps, and the vector entry point then spends one
    # on the reset: 1 / (1 + 1 / 22).
    assert found["vector"].valid_fraction == pytest.approx(22 / 23, abs=0.02)


def test_what_the_end_of_an_episode_takes_is_told_from_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(envs_module, "_TIME_LIMIT_S", 0.1)
    sizes = {"env_step_s": 1e-5, "reset_s": 3e-5, "episode_steps": 5}
    env = EnvSpec.make(f"{EMULATED_ENV}:make_env", sizes)
    with EmulatedMachine():
        (timed,) = measure_env(env, env_tasks(env, (2,), backend="sync"))
    assert timed.episodes is not None
    assert timed.episodes.end_s == pytest.approx(3e-5, rel=0.01)
    assert timed.episodes.steps == pytest.approx(5, rel=0.05)  # few leave the range before
    assert timed.median_s == pytest.approx(2 * (1e-5 + 3e-5 / 5), rel=0.05)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_reset_that_takes_a_row_of_its_own_counts_whole(num_envs: int) -> None:
    """Of a vector step of 1 us: 5 us more for an end, and 20 us more for the reset behind it."""
    steps = _Steps(episode_limit=50)
    lengths = [3 + env for env in range(num_envs)]
    place, resets = [0] * num_envs, [False] * num_envs
    for number in range(600):
        if number % 20 == 0:
            first = steps.count
        place = [0 if reset else p + 1 for p, reset in zip(place, resets, strict=True)]
        ended = [env for env in range(num_envs) if place[env] == lengths[env]]
        seconds = 1e-6 + 5e-6 * len(ended) + 2e-5 * sum(resets)
        flags = np.zeros(num_envs, bool)
        step = Step(
            observations=np.zeros((num_envs, 1)),
            rewards=np.zeros(num_envs),
            terminated=flags,
            truncated=flags,
            ended=ended,
            final_observations=np.zeros((len(ended), 1)),
            valid=~np.array(resets),
        )
        steps.add(seconds, step)
        resets = [env in ended for env in range(num_envs)]
        if number % 20 == 19:
            steps.add_sample(first, num_envs)
    found = steps.episodes
    assert found is not None
    assert found.end_s == pytest.approx(2.5e-5, rel=0.02)
    rows = [length / (length + 1) for length in lengths]  # transitions, of each environment's rows
    assert found.steps == pytest.approx(sum(rows) / (num_envs - sum(rows)), rel=0.02)
    ends = sum(1 / (length + 1) for length in lengths) / num_envs
    assert found.timed_ends == pytest.approx(ends, rel=0.1)


def test_too_few_ends_tell_nothing() -> None:
    steps = _Steps(episode_limit=None)
    for _ in range(100):
        flags = np.zeros(2, bool)
        steps.add(1e-6, Step(np.zeros((2, 1)), np.zeros(2), flags, flags, [], np.zeros((0, 1))))
    assert steps.episodes is None and steps.valid_fraction == 1.0


def test_policy_steps_behind_vector_steps_are_set_against_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a machine on which a policy step takes 2 us, and another 3 or 7 right behind a step."""
    monkeypatch.setattr(envs_module, "_TIME_LIMIT_S", 0.02)
    monkeypatch.setattr(device, "engines_on", lambda _: ("eager", "numpy"))
    is_cold = False
    step = SyncVectorEnv.step

    def stepped(*args: object) -> Step:
        nonlocal is_cold
        is_cold = True
        return step(*args)

    def policy_step(_: object, __: object, engine: str, *, standardized: bool) -> object:
        def act(call: int) -> None:
            nonlocal is_cold
            device.charge(seconds=2e-6 + is_cold * (3e-6 if engine == "numpy" else 7e-6))
            is_cold = False

        return act

    monkeypatch.setattr(SyncVectorEnv, "step", stepped)
    monkeypatch.setattr(envs_module, "host_policy_step", policy_step)
    env = EnvSpec.make(f"{EMULATED_ENV}:make_env", {"env_step_s": 1e-5})
    with EmulatedMachine():
        (timed,) = measure_env(env, env_tasks(env, (2,), backend="sync"))
    assert dict(timed.cold_s) == pytest.approx({"numpy": 3e-6, "eager": 7e-6}, rel=0.01)
    assert timed.median_s == pytest.approx(2e-5, rel=1e-3)


def test_an_environment_is_made_once_to_read_its_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(spec: EnvSpec) -> EnvDescription:
        made.append(spec)
        return inspect_env(spec)

    for module in (envs_module, env_start):
        monkeypatch.setattr(module, "inspect_env", counted)
    monkeypatch.setattr(envs_module, "_TIME_LIMIT_S", 0.01)
    timed = envs_module.measure_backends(EnvSpec.make("CartPole-v1"), (1, 2), 1)
    assert {m.task.op for m in timed} == {"env_step", "process_start"}
    assert made == [EnvSpec.make("CartPole-v1")]


def test_environments_that_are_slow_to_make_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs_module, "_TIME_LIMIT_S", 0.01)
    monkeypatch.setattr(envs_module, "_SLOW_TO_MAKE_S", 0.0)
    env = EnvSpec.make("CartPole-v1")
    (timed,) = measure_env(env, env_tasks(env, (1,), backend="sync"))
    assert timed.visits == (timed.num_samples,)
