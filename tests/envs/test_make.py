import re
import sys

import gymnasium as gym
import numpy as np
import pytest

from autoplace.envs import inspect_env, make_env
from autoplace.envs.make import registered_spec
from autoplace.errors import EnvError
from autoplace.workload import EnvSpec
from tests.envs.toys import Counter, Spaces, register


def test_a_gymnasium_id_is_made_without_wrappers_that_only_check():
    env = make_env(EnvSpec(id="CartPole-v1"))
    assert isinstance(env, gym.wrappers.TimeLimit)
    assert env.env is env.unwrapped
    env.close()


def test_keyword_arguments_reach_the_environment():
    env = make_env(EnvSpec.make("Pendulum-v1", {"g": 3.5}))
    assert env.unwrapped.g == 3.5
    env.close()


def test_a_function_in_a_file_makes_the_environment(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import gymnasium\n"
        "def make_env(size=1):\n"
        "    env = gymnasium.make('CartPole-v1')\n"
        "    env.size = size\n"
        "    return env\n",
        encoding="utf-8",
    )
    env = make_env(EnvSpec.make(f"{file}:make_env", {"size": 4}))
    assert env.size == 4
    env.close()


def test_a_module_before_the_colon_is_imported_first(tmp_path, monkeypatch):
    (tmp_path / "registers_one.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('FromModule-v0', entry_point=CartPoleEnv)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env(EnvSpec(id="registers_one:FromModule-v0"))
    env.close()
    gym.registry.pop("FromModule-v0")


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPol-v1", "there is no environment 'CartPol-v1': did you mean CartPole-v1"),
        ("CartPole-v9", "there is no environment 'CartPole-v9': this Gymnasium has .*CartPole-v1"),
        ("Qqqqqqqq-v0", "there is no environment 'Qqqqqqqq-v0': name a Gymnasium id"),
        ("no_such_module:X-v0", "needs no_such_module, which is not installed: pip install"),
        ("nowhere/mine.py:make_env", "there is no file nowhere/mine.py"),
    ],
)
def test_what_cannot_be_made_is_explained_in_one_line(env_id, message):
    with pytest.raises(EnvError, match=message) as caught:
        make_env(EnvSpec(id=env_id))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("mujoco", "pip install 'gymnasium[mujoco]'"),
        ("ale_py", "pip install 'gymnasium[atari]'"),
        ("Box2D", "pip install 'gymnasium[box2d]'"),
        ("something_else", "pip install 'something_else'"),
    ],
)
def test_a_missing_package_is_named_with_its_pip_command(missing, command):
    def factory():
        try:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        except ModuleNotFoundError as error:
            raise gym.error.DependencyNotInstalled("see the documentation") from error

    with pytest.raises(EnvError, match=re.escape(command)):
        make_env(EnvSpec(id=register("Missing", factory)))


def test_a_function_that_is_not_there_or_gives_no_environment_is_named(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def gives_a_number():\n    return 3\n", encoding="utf-8")
    with pytest.raises(EnvError, match="has no function 'make_env'"):
        make_env(EnvSpec(id=f"{file}:make_env"))
    with pytest.raises(EnvError, match=r"must give a gymnasium\.Env, got int"):
        make_env(EnvSpec(id=f"{file}:gives_a_number"))


def test_a_wrong_keyword_argument_is_one_line():
    with pytest.raises(EnvError, match=r"cannot be made: TypeError: .*colour"):
        make_env(EnvSpec.make("CartPole-v1", {"colour": 1}))


def box(*shape, dtype=np.float32):
    return gym.spaces.Box(-1, 1, shape, dtype)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "sizes"),
    [
        (box(4), gym.spaces.Discrete(3), (4, 3, False, 8)),
        (box(2, 5), gym.spaces.Discrete(2, start=-1), (10, 2, False, 8)),
        (gym.spaces.Box(0, 255, (4, 4), np.uint8), box(2), (16, 2, True, 8)),
        (gym.spaces.Discrete(6), box(2, 2), (6, 4, True, 16)),
        (box(), box(1), (1, 1, True, 4)),
    ],
)
def test_supported_spaces_have_the_sizes_that_the_network_sees(
    observation_space, action_space, sizes
):
    env_id = register("Sizes", lambda: Spaces(observation_space, action_space))
    found = inspect_env(EnvSpec(id=env_id))
    assert sizes == (
        found.observation_size,
        found.action_size,
        found.continuous,
        found.action_bytes,
    )


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (
            gym.spaces.Text(8),
            gym.spaces.Discrete(2),
            "observes a Text space, but an observation is made of",
        ),
        (
            gym.spaces.Dict(hand=box(6), mission=gym.spaces.Text(8)),
            gym.spaces.Discrete(2),
            "observes a Text space at 'mission', but",
        ),
        (gym.spaces.Dict(hand=box(0)), gym.spaces.Discrete(2), "at 'hand', which holds no number"),
        (gym.spaces.Dict({}), gym.spaces.Discrete(2), "holds no number"),
        (box(3), gym.spaces.Tuple((gym.spaces.Discrete(2), box(1))), "acts in Tuple"),
        (box(3), gym.spaces.Dict(grip=gym.spaces.Discrete(2)), "acts in Dict"),
        (box(3), gym.spaces.Box(0, 5, (2,), np.int32), "acts in Box"),
        (box(0), gym.spaces.Discrete(2), "holds no number"),
        (box(3), box(0), "holds no number"),
    ],
)
def test_other_spaces_are_refused_by_name_before_anything_runs(
    observation_space, action_space, message
):
    env_id = register("Refused", lambda: Spaces(observation_space, action_space))
    with pytest.raises(EnvError, match=message):
        inspect_env(EnvSpec(id=env_id))


def test_the_episode_limit_is_found():
    assert inspect_env(EnvSpec(id="CartPole-v1")).episode_limit == 500
    assert inspect_env(EnvSpec(id="Pendulum-v1")).episode_limit == 200


def test_a_workload_carries_the_sizes():
    from autoplace.workload import Hyperparameters

    workload = inspect_env(EnvSpec(id="Pendulum-v1")).workload(Hyperparameters(hidden_sizes=(5,)))
    assert workload.network.layers == ((3, 5), (5, 1), (3, 5), (5, 1))
    assert workload.network.continuous and workload.action_bytes == 4


def test_an_environment_of_the_main_script_goes_to_other_processes_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "OfTheScript", Counter, raising=False)
    gym.register("AutoplaceTest/Script-v0", entry_point="__main__:OfTheScript")
    try:
        found = registered_spec(EnvSpec.make("AutoplaceTest/Script-v0"))
        assert found is not None and found.entry_point is Counter
        assert gym.spec("AutoplaceTest/Script-v0").entry_point == "__main__:OfTheScript"
    finally:
        gym.registry.pop("AutoplaceTest/Script-v0")
