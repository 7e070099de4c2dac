"""Atari games in their usual wrappers, without any game: a stand-in with the same interface."""

import sys
import types

import gymnasium as gym
import numpy as np
import pytest

from autoplace.envs import describe, inspect_env, make_env
from autoplace.envs.make import is_wrapped_atari
from autoplace.train import evaluate, train
from autoplace.workload import EnvSpec
from tests.train.plans import Listener, make_plan

pytest.importorskip("cv2")

ID = "ALE/StandIn-v5"


class StandIn(gym.Env):
    """Frames that are the number of the step; pays 5 a frame; an episode is 40 frames."""

    def __init__(self, frameskip=4):
        self.observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(3)
        self._frameskip = frameskip
        self.ale = self
        self.frame = 0

    def get_action_meanings(self):
        return ["NOOP", "FIRE", "UP"]

    def lives(self):
        return 3

    def getScreenGrayscale(self, buffer):  # noqa: N802 - ALE's own name
        buffer[...] = self.frame

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.frame = 0
        return np.zeros((210, 160, 3), np.uint8), {}

    def step(self, action):
        self.frame += 1
        return np.zeros((210, 160, 3), np.uint8), 5.0, self.frame >= 40, False, {}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", types.ModuleType("ale_py"))
    gym.register(ID, entry_point=StandIn)
    yield
    gym.registry.pop(ID)


def test_a_game_is_four_stacked_grey_frames_of_84_pixels():
    env = make_env(EnvSpec(id=ID))
    assert is_wrapped_atari(env)
    assert env.observation_space.shape == (4, 84, 84)
    env.reset(seed=0)
    observation, reward, *_ = env.step(0)
    assert reward == 20.0  # four frames
    first, last = env.unwrapped.frame - 4, env.unwrapped.frame
    assert (observation[-1] == last).all() and (observation[-2] == first).all()


def test_without_wrappers_a_game_is_as_it_was_made():
    env = make_env(EnvSpec(id=ID, wrappers=False))
    assert not is_wrapped_atari(env)
    assert env.observation_space.shape == (210, 160, 3)
    assert env.unwrapped._frameskip == 4


def test_a_wrapped_game_learns_from_clipped_rewards_unless_told_otherwise():
    assert describe(EnvSpec(id=ID)).hyperparameters.clip_rewards is True
    assert describe(EnvSpec(id=ID), clip_rewards=False).hyperparameters.clip_rewards is False
    assert describe(EnvSpec(id=ID, wrappers=False)).hyperparameters.clip_rewards is None
    assert describe("CartPole-v1").hyperparameters.clip_rewards is None


def test_a_wrapped_game_is_read_by_the_nature_network():
    (image,) = inspect_env(EnvSpec(id=ID)).observations.images
    assert (image.channels, image.channels_first, image.encoder) == (4, True, "NatureCNN")


def test_returns_that_are_reported_are_those_of_the_game(tmp_path):
    listener = Listener()
    plan = make_plan(ID, rollout_steps=12, rows=8, epochs=1)
    train(plan, total_steps=24, run_dir=tmp_path, callbacks=[listener])
    # At most 30 of the 40 frames are spent on the random start; 5 are paid for each that is left.
    assert listener.reports[-1].mean_return > 20.0
    assert evaluate(tmp_path, episodes=2).mean_return > 20.0
