"""Which step times of an environment are taken."""

from __future__ import annotations

import pytest

from autoplace.envs import EnvDescription, inspect_env
from autoplace.measure import env_start
from autoplace.measure import envs as envs_module
from autoplace.measure.envs import env_tasks, measure_env, part_sizes
from autoplace.workload import EnvSpec


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
