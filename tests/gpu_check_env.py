"""A game on 84 x 84 images that needs no game files: Catch, enlarged and stacked as Atari is."""

import gymnasium as gym
import numpy as np

from tests.envs.catch import SIDE, Catch

_SCALE = 84 // SIDE
_STACKED = 4


def make_env():
    """Observations ``(4, 84, 84)`` uint8, as of the usual Atari wrappers."""
    env = gym.wrappers.TransformObservation(
        Catch(), _enlarge, gym.spaces.Box(0, 255, (84, 84), np.uint8)
    )
    return gym.wrappers.FrameStackObservation(env, _STACKED)


def _enlarge(image):
    """Ball and paddle on one grey plane of 84 x 84 pixels."""
    plane = 255 * image.max(-1)
    side = SIDE * _SCALE
    large = np.zeros((84, 84), np.uint8)
    large[:side, :side] = np.kron(plane, np.ones((_SCALE, _SCALE), np.uint8))
    return large
