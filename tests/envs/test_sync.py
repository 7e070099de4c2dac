import math

import gymnasium as gym
import numpy as np
import pytest

from autoplace.envs import inspect_env, make_vector_env, spawn_seeds
from autoplace.errors import EnvError, UsageError
from autoplace.workload import EnvSpec
from tests.envs.toys import Counter, Recorder, Spaces, register


def vector(factory, num_envs=2, name="Toy", **options):
    """(vector env, the environments inside it)."""
    made = []

    def remember():
        made.append(factory())
        return made[-1]

    description = inspect_env(EnvSpec(id=register(name, remember), **options))
    envs = make_vector_env(description, num_envs=num_envs)
    return envs, made[1:]  # the first was only looked at


ZEROS = np.zeros(2, np.int64)


def test_an_episode_that_ends_gives_its_final_observation_and_starts_the_next():
    envs, _ = vector(lambda: Counter(length=2))
    assert envs.reset([0, 1]).tolist() == [[0, 0], [0, 0]]
    step = envs.step(ZEROS)
    assert step.observations.tolist() == [[0, 1], [0, 1]]
    assert step.ended == [] and step.final_observations.shape == (0, 2)
    step = envs.step(ZEROS)
    assert step.ended == [0, 1]
    assert step.terminated.tolist() == [True, True] and not step.truncated.any()
    assert step.final_observations.tolist() == [[0, 2], [0, 2]]
    assert step.observations.tolist() == [[1, 0], [1, 0]]
    assert step.rewards.tolist() == [2.0, 2.0]


def test_environments_end_at_different_steps_without_disturbing_each_other():
    lengths = iter([99, 2, 3])
    envs, _ = vector(lambda: Counter(length=next(lengths), truncates=True))
    envs.reset([0, 1])
    ends = []
    for _ in range(6):
        step = envs.step(ZEROS)
        ends.append((list(step.ended), step.final_observations.tolist()))
    assert ends == [
        ([], []),
        ([0], [[0, 2]]),
        ([1], [[0, 3]]),
        ([0], [[1, 2]]),
        ([], []),
        ([0, 1], [[2, 2], [1, 3]]),
    ]
    assert step.truncated.tolist() == [True, True]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_every_transition_is_one_that_a_single_environment_makes(env_id):
    """Same seed, same actions: no step is skipped, doubled or invented across 3 resets and more."""
    description = inspect_env(EnvSpec(id=env_id))
    envs = make_vector_env(description, num_envs=2)
    seeds = spawn_seeds(5, 2)
    envs.reset(seeds)
    singles = [gym.make(env_id) for _ in range(2)]
    current = [env.reset(seed=seed)[0] for env, seed in zip(singles, seeds, strict=True)]
    generator = np.random.default_rng(0)
    transitions = ends = 0
    for _ in range(650):
        np.testing.assert_array_equal(envs.observations, np.stack(current))
        actions = (
            generator.normal(size=(2, 1)).astype(np.float32)
            if description.continuous
            else generator.integers(0, 2, 2)
        )
        step = envs.step(actions)
        for index, env in enumerate(singles):
            action = np.clip(actions[index], -2, 2) if description.continuous else actions[index]
            observation, reward, over, cut, _ = env.step(action)
            transitions += 1
            assert step.rewards[index] == np.float32(reward)
            assert (step.terminated[index], step.truncated[index]) == (over, cut)
            current[index] = observation
            if over or cut:
                final = step.final_observations[list(step.ended).index(index)]
                np.testing.assert_array_equal(final, observation)
                current[index] = env.reset()[0]
                ends += 1
    assert transitions == 1300 and ends >= 6
    envs.close()


def test_a_final_observation_is_a_copy_that_later_steps_leave_alone():
    envs, _ = vector(lambda: Counter(length=1))
    envs.reset([0, 1])
    first = envs.step(ZEROS)
    kept = first.final_observations
    envs.step(ZEROS)
    assert kept.tolist() == [[0, 1], [0, 1]]
    assert not np.shares_memory(kept, envs.observations)


def test_only_the_first_reset_is_seeded():
    envs, made = vector(lambda: Counter(length=1))
    envs.reset([11, 12])
    envs.step(ZEROS)
    envs.step(ZEROS)
    assert [env.seeds for env in made] == [[11, None, None], [12, None, None]]


def test_environments_and_runs_have_seeds_of_their_own():
    runs = [spawn_seeds(seed, 8) for seed in (0, 1, 2)] + [spawn_seeds(0, 8, stream=3)]
    everything = [seed for run in runs for seed in run]
    assert len(set(everything)) == len(everything) == 32
    assert spawn_seeds(0, 8) == runs[0]


def test_first_observations_differ_between_environments():
    envs = make_vector_env(inspect_env(EnvSpec(id="CartPole-v1")), num_envs=8)
    observations = envs.reset(spawn_seeds(1, 8))
    assert len({tuple(row) for row in observations.tolist()}) == 8
    envs.close()


@pytest.mark.parametrize(
    ("low", "high", "given", "received"),
    [
        (-2.0, 2.0, [3.0, -0.5], [2.0, -0.5]),
        (-2.0, 0.0, [-5.0, 1.0], [-2.0, 0.0]),
        (0.0, 5.0, [-1.0, 9.0], [0.0, 5.0]),
        (-np.inf, np.inf, [1e6, -1e6], [1e6, -1e6]),
        (0.0, np.inf, [-1.0, 1e6], [0.0, 1e6]),
    ],
)
def test_actions_are_clipped_for_the_environment_and_kept_as_they_were(low, high, given, received):
    envs, made = vector(lambda: Recorder(low, high), num_envs=1)
    envs.reset([0])
    actions = np.array([given], np.float32)
    envs.step(actions)
    assert made[0].actions[0].tolist() == received
    assert actions.tolist() == [given]


def test_actions_have_the_shape_and_type_of_their_space():
    envs, made = vector(lambda: Recorder(shape=(2, 3), dtype=np.float64), num_envs=1)
    envs.reset([0])
    envs.step(np.arange(6, dtype=np.float32).reshape(1, 6) / 10)
    action = made[0].actions[0]
    assert action.shape == (2, 3) and action.dtype == np.float64
    assert action.ravel().tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_a_discrete_action_space_may_start_anywhere():
    class Shifted(Counter):
        def __init__(self):
            super().__init__()
            self.action_space = gym.spaces.Discrete(3, start=-1)

    envs, made = vector(Shifted)
    envs.reset([0, 1])
    envs.step(np.array([0, 2]))
    assert [env.actions for env in made] == [[-1], [1]]


def test_discrete_observations_are_one_hot():
    class Walk(Spaces):
        def __init__(self):
            super().__init__(gym.spaces.Discrete(4, start=10), gym.spaces.Discrete(2))
            self.at = 10

        def reset(self, *, seed=None, options=None):
            return 10, {}

        def step(self, action):
            self.at += 1
            return np.int64(self.at), 0.0, False, False, {}

    envs, _ = vector(Walk)
    assert envs.reset([0, 1]).tolist() == [[1, 0, 0, 0]] * 2
    assert envs.step(ZEROS).observations.tolist() == [[0, 1, 0, 0]] * 2
    assert envs.step(ZEROS).observations.tolist() == [[0, 0, 1, 0]] * 2


def test_observations_of_any_shape_and_type_become_float32_rows():
    space = gym.spaces.Box(0, 255, (2, 3), np.uint8)
    envs, _ = vector(lambda: Spaces(space, gym.spaces.Discrete(2)))
    observations = envs.reset([0, 1])
    assert observations.shape == (2, 6) and observations.dtype == np.float32


@pytest.mark.parametrize("reward", [np.float32(1.5), np.float64(1.5), 1.5])
def test_rewards_of_any_number_type_are_stored_as_float32(reward):
    envs, _ = vector(lambda: Counter(reward=lambda step: reward))
    envs.reset([0, 1])
    assert envs.step(ZEROS).rewards.tolist() == [1.5, 1.5]


@pytest.mark.parametrize(
    ("reward", "stored"),
    [(True, 1.0), (np.bool_(False), 0.0), (np.int64(3), 3.0), (np.array([2.5]), 2.5)],
)
def test_rewards_that_are_bools_ints_or_arrays_of_one_are_accepted(reward, stored):
    envs, _ = vector(lambda: Counter(reward=lambda step: reward))
    envs.reset([0, 1])
    envs.step(ZEROS)
    assert envs.step(ZEROS).rewards.tolist() == [stored, stored]


@pytest.mark.parametrize("reward", ["1.5", np.array([1.0, 2.0]), None])
def test_rewards_that_are_no_number_are_refused(reward):
    envs, _ = vector(lambda: Counter(reward=lambda step: reward))
    envs.reset([0, 1])
    with pytest.raises(EnvError, match=r"a reward is one number, .*environment 0, vector step 1"):
        envs.step(ZEROS)


def at_step(step, value):
    def observe(plain, total_steps):
        return np.full_like(plain, value) if total_steps == step else plain

    return observe


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_observation_that_is_not_finite_is_named_with_environment_and_step(value):
    observers = iter([None, None, at_step(4, value)])
    envs, _ = vector(lambda: Counter(length=99, observe=next(observers)))
    envs.reset([0, 1])
    for _ in range(3):
        envs.step(ZEROS)
    with pytest.raises(
        EnvError,
        match=r"every observation must be finite, got -?(nan|inf)"
        r" from AutoplaceTest/Toy-v0, environment 1, vector step 4",
    ):
        envs.step(ZEROS)


def test_a_final_observation_that_is_not_finite_is_found_though_the_reset_is_fine():
    envs, _ = vector(lambda: Counter(length=3, observe=at_step(3, math.nan)))
    envs.reset([0, 1])
    envs.step(ZEROS)
    envs.step(ZEROS)
    with pytest.raises(EnvError, match="every observation must be finite, got nan"):
        envs.step(ZEROS)


def test_a_reward_that_is_not_finite_is_named():
    envs, _ = vector(lambda: Counter(reward=lambda step: -math.inf if step == 2 else 0.0))
    envs.reset([0, 1])
    envs.step(ZEROS)
    with pytest.raises(EnvError, match=r"every reward must be finite, got -inf .* step 2"):
        envs.step(ZEROS)


def test_0_stands_in_for_what_is_not_finite_where_that_is_asked_for(caplog):
    def observe(plain, total_steps):
        return plain / np.array([1.0, total_steps != 2])

    def pay(total_steps):
        return math.nan if total_steps == 2 else 1.0

    with np.errstate(all="ignore"):
        envs, _ = vector(
            lambda: Counter(length=2, reward=pay, observe=observe),
            name="Replaces",
            replace_non_finite=True,
        )
        envs.reset([0, 1])
        assert envs.step(ZEROS).rewards.tolist() == [1, 1]
        step = envs.step(ZEROS)
    assert step.rewards.tolist() == [0, 0] and step.ended == [0, 1]
    # The end of episode 0 was (0, 2 / 0); episode 1 has begun.
    assert step.final_observations.tolist() == [[0, 0]] * 2
    assert [row[0] for row in step.observations.tolist()] == [1, 1]
    assert np.isfinite(step.observations).all()
    (record,) = caplog.records
    assert "environment 0, vector step 2: 0 stands in for it, and for all" in record.message


def test_huge_but_finite_observations_pass():
    envs, _ = vector(lambda: Counter(length=99, observe=lambda plain, _: plain + 1e30))
    envs.reset([0, 1])
    assert envs.step(ZEROS).observations.max() == np.float32(1e30)


@pytest.mark.parametrize(
    ("observe", "got"),
    [
        (lambda plain, step: np.zeros(0), r"\(0,\)"),
        (lambda plain, step: plain[None], r"\(1, 2\)"),
        (lambda plain, step: np.zeros(1), r"\(1,\)"),
    ],
)
def test_a_first_observation_of_another_shape_is_named(observe, got):
    envs, _ = vector(lambda: Counter(observe=observe))
    message = rf"has the shape \(2,\) of its space, got {got} from .*environment 0, vector step 0"
    with pytest.raises(EnvError, match=message):
        envs.reset([0, 1])


def test_a_shape_that_changes_after_a_reset_is_named():
    def observe(plain, total_steps):
        return plain if total_steps < 3 else np.zeros(5)

    envs, _ = vector(lambda: Counter(length=2, observe=observe))
    envs.reset([0, 1])
    envs.step(ZEROS)
    envs.step(ZEROS)
    message = r"has the shape \(2,\) of its space, got \(5,\) from .*environment 0, vector step 3"
    with pytest.raises(EnvError, match=message):
        envs.step(ZEROS)


def test_an_exception_of_an_environment_keeps_its_own_traceback():
    def boom(step):
        raise ValueError("no wheels")

    envs, _ = vector(lambda: Counter(reward=boom))
    envs.reset([0, 1])
    with pytest.raises(EnvError, match=r"ValueError from .*environment 0.*: no wheels") as e:
        envs.step(ZEROS)
    assert isinstance(e.value.__cause__, ValueError)


def test_an_unknown_backend_is_refused():
    with pytest.raises(UsageError, match="--env-backend is one of sync"):
        make_vector_env(inspect_env(EnvSpec(id="CartPole-v1")), num_envs=1, backend="warp")


@pytest.mark.bench
def test_the_lean_loop_is_faster_than_the_sync_vector_of_gymnasium():
    import time

    description = inspect_env(EnvSpec(id="CartPole-v1"))
    ours = make_vector_env(description, num_envs=8)
    ours.reset(spawn_seeds(0, 8))
    theirs = gym.make_vec(
        "CartPole-v1",
        num_envs=8,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
    )
    theirs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (1000, 8))
    seconds = {}
    for _ in range(3):
        for name, envs in (("ours", ours), ("theirs", theirs)):
            start = time.perf_counter()
            for row in actions:
                envs.step(row)
            seconds[name] = min(seconds.get(name, 1e9), time.perf_counter() - start)
    assert seconds["ours"] < seconds["theirs"]
