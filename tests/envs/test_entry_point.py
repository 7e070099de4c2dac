"""Gymnasium's own vector environments, in each of its three ways to reset."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from autoplace.envs import EntryPointVectorEnv, inspect_env, make_vector_env, spawn_seeds
from autoplace.envs.episodes import EpisodeTracker
from autoplace.errors import EnvError, UsageError
from autoplace.workload import EnvSpec
from tests.envs.toys import Counter

MODES = list(AutoresetMode)


def register(monkeypatch, factory, vector_factory, name="Vector", **registered):
    env_id = f"AutoplaceTest/{name}-v0"
    monkeypatch.setitem(gym.registry, env_id, None)  # taken out again after the test
    del gym.registry[env_id]
    gym.register(env_id, entry_point=factory, vector_entry_point=vector_factory, **registered)
    return env_id


def of_mode(factory, mode):
    """A vector entry point that resets in ``mode`` and takes no argument about it."""

    def make(num_envs, max_episode_steps=None):
        def limited():
            env = factory()
            return gym.wrappers.TimeLimit(env, max_episode_steps) if max_episode_steps else env

        return gym.vector.SyncVectorEnv([limited] * num_envs, autoreset_mode=mode)

    return make


def counters(monkeypatch, mode, lengths, **registered):
    left = iter([99, *lengths])

    def factory():
        return Counter(length=next(left))

    env_id = register(monkeypatch, factory, of_mode(factory, mode), **registered)
    return make_vector_env(inspect_env(EnvSpec(id=env_id)), num_envs=len(lengths), backend="vector")


def transitions(envs, steps):
    """(environment, before, reward, after, terminated, truncated) of every valid row."""
    found = []
    envs.reset(spawn_seeds(0, envs.num_envs))
    before = envs.observations.copy()
    for _ in range(steps):
        step = envs.step(np.zeros(envs.num_envs, np.int64))
        for index in range(envs.num_envs):
            if step.valid is not None and not step.valid[index]:
                assert not (step.terminated[index] or step.truncated[index])
                assert step.rewards[index] == 0.0
                continue
            after = step.observations[index]
            if index in step.ended:
                after = step.final_observations[list(step.ended).index(index)]
            flags = (bool(step.terminated[index]), bool(step.truncated[index]))
            reward = float(step.rewards[index])
            found.append((index, *map(tuple, (before[index], after)), reward, *flags))
        before = step.observations.copy()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_reset_gives_the_transitions_of_sync(monkeypatch, mode):
    envs = counters(monkeypatch, mode, [2, 3])
    assert envs.autoreset_mode is mode
    got = transitions(envs, 24)
    lengths = iter([2, 3])
    env_id = register(monkeypatch, lambda: Counter(length=next(lengths, 9)), None, "Plain")
    description = inspect_env(EnvSpec(id=env_id))
    lengths = iter([2, 3])
    expected = transitions(make_vector_env(description, num_envs=2), 24)
    for index, length in enumerate([2, 3]):
        mine = [row for row in got if row[0] == index]
        # A step in each ``length`` + 1 only resets where the next step does it.
        count = 24 - 24 // (length + 1) if mode is AutoresetMode.NEXT_STEP else 24
        assert mine == [row for row in expected if row[0] == index][:count]
        assert len(mine) == count


@pytest.mark.parametrize("mode", MODES)
def test_a_time_limit_truncates_and_gives_its_final_observation(monkeypatch, mode):
    envs = counters(monkeypatch, mode, [99, 99], max_episode_steps=4)
    envs.reset([0, 1])
    for _ in range(4):
        step = envs.step(np.zeros(2, np.int64))
    assert step.truncated.tolist() == [True, True] and not step.terminated.any()
    assert step.final_observations.tolist() == [[0, 4], [0, 4]]


def test_the_same_step_is_asked_for_where_the_entry_point_takes_the_mode(monkeypatch):
    def make(num_envs, autoreset_mode=AutoresetMode.NEXT_STEP):
        return gym.vector.SyncVectorEnv([Counter] * num_envs, autoreset_mode=autoreset_mode)

    env_id = register(monkeypatch, Counter, make)
    envs = make_vector_env(inspect_env(EnvSpec(id=env_id)), num_envs=2, backend="vector")
    assert envs.autoreset_mode is AutoresetMode.SAME_STEP


def test_cartpole_counts_only_what_single_environments_count():
    """Rows that only reset are marked: what is left adds up to whole episodes."""
    envs = make_vector_env(inspect_env(EnvSpec(id="CartPole-v1")), num_envs=4, backend="vector")
    assert isinstance(envs, EntryPointVectorEnv)
    envs.reset(spawn_seeds(0, 4))
    episodes = EpisodeTracker(4)
    rng = np.random.default_rng(0)
    ends = valid = 0
    for _ in range(300):
        step = envs.step(rng.integers(2, size=4))
        episodes.add(step)
        valid += 4 if step.valid is None else int(step.valid.sum())
        ends += len(step.ended)
    assert ends >= 20 and valid == 1200 - episodes.num_skipped
    assert 0 <= ends - episodes.num_skipped <= 4  # those that ended last are still to be reset
    # CartPole pays 1 per step, so a return that differs from its length counted a fake step.
    assert all(total == length for total, length in episodes.recent)
    envs.close()


def test_cartpole_steps_as_a_single_one_does_from_the_same_states():
    envs = make_vector_env(inspect_env(EnvSpec(id="CartPole-v1")), num_envs=3, backend="vector")
    envs.reset(spawn_seeds(0, 3))
    singles = [gym.make("CartPole-v1").unwrapped for _ in range(3)]
    rng = np.random.default_rng(1)
    checked = 0
    for single in singles:
        single.reset(seed=0)
    for _ in range(200):
        states = envs._envs.unwrapped.state.copy()
        actions = rng.integers(2, size=3)
        step = envs.step(actions)
        for index, single in enumerate(singles):
            if step.valid is not None and not step.valid[index]:
                continue
            single.state, single.steps_beyond_terminated = tuple(states[:, index]), None
            observation, reward, terminated, _, _ = single.step(int(actions[index]))
            after = step.observations[index]
            if index in step.ended:
                after = step.final_observations[list(step.ended).index(index)]
            np.testing.assert_allclose(after, observation, rtol=1e-6)
            assert step.rewards[index] == reward and step.terminated[index] == terminated
            checked += 1
    assert checked > 500
    envs.close()


def test_cartpole_is_truncated_after_its_500_steps():
    envs = make_vector_env(
        inspect_env(EnvSpec.make("CartPole-v1", {"max_episode_steps": 7})),
        num_envs=2,
        backend="vector",
    )
    envs.reset([0, 1])
    for t in range(7):
        step = envs.step(np.array([t % 2, t % 2]))
    assert step.truncated.all() and list(step.ended) == [0, 1]
    assert envs._envs.unwrapped.max_episode_steps == 7
    plain = make_vector_env(inspect_env(EnvSpec(id="CartPole-v1")), num_envs=1, backend="vector")
    assert plain._envs.unwrapped.max_episode_steps == 500


@pytest.mark.parametrize(
    "spec",
    [
        EnvSpec(id="Pendulum-v1"),
        EnvSpec.make("CartPole-v1", {"max_episode_steps": -1}),
        EnvSpec(id="tests/envs/cartpole.py:make_env"),
    ],
)
def test_what_has_no_entry_point_that_fits_is_refused(spec, monkeypatch):
    description = inspect_env(EnvSpec(id="Pendulum-v1"))
    object.__setattr__(description, "env", spec)
    with pytest.raises(UsageError, match=r"--env-backend vector cannot run .*: use sync"):
        make_vector_env(description, num_envs=2, backend="vector")


def test_an_environment_that_does_not_say_how_it_resets_is_refused(monkeypatch):
    def make(num_envs):
        envs = gym.vector.SyncVectorEnv([Counter] * num_envs)
        envs.metadata = {}
        return envs

    env_id = register(monkeypatch, Counter, make)
    with (
        pytest.warns(UserWarning, match="AutoresetMode"),
        pytest.raises(EnvError, match=r"says how it resets .*, got None from AutoplaceTest"),
    ):
        make_vector_env(inspect_env(EnvSpec(id=env_id)), num_envs=2, backend="vector")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replaces", [False, True])
def test_a_number_that_is_not_finite_is_named_or_replaced(monkeypatch, mode, replaces):
    observers = iter([None, None, lambda plain, step: plain / (step != 2)])

    def factory():
        return Counter(length=99, observe=next(observers))

    env_id = register(monkeypatch, factory, of_mode(factory, mode))
    spec = EnvSpec(id=env_id, replace_non_finite=replaces)
    envs = make_vector_env(inspect_env(spec), num_envs=2, backend="vector")
    envs.reset([0, 1])
    envs.step(np.zeros(2, np.int64))
    if replaces:
        with np.errstate(all="ignore"):
            step = envs.step(np.zeros(2, np.int64))
        assert step.observations.tolist() == [[0, 2], [0, 0]]
        return
    with (
        np.errstate(all="ignore"),
        pytest.raises(EnvError, match=r"got (nan|inf) from .*environment 1, vector step 2"),
    ):
        envs.step(np.zeros(2, np.int64))
