"""A small game on images, of the size of MinAtar's."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

SIDE = 10


class Catch(gym.Env):
    """A ball falls down a 10 x 10 board; a paddle of three cells at the bottom has to be under it.

    Two channels: the ball, the paddle. Pays 1 for a catch and -1 for a miss, which ends an episode.
    Each cell is ``scale`` pixels wide and high.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, channels_first=False, scale=1):
        self.channels_first, self.scale = channels_first, scale
        side = SIDE * scale
        shape = (2, side, side) if channels_first else (side, side, 2)
        self.observation_space = gym.spaces.Box(0, 1, shape, np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row, self.column = 0, int(self.np_random.integers(SIDE))
        self.paddle = int(self.np_random.integers(1, SIDE - 1))
        return self._image(), {}

    def step(self, action):
        self.paddle = min(max(self.paddle + action - 1, 1), SIDE - 2)
        self.row += 1
        over = self.row == SIDE - 1
        caught = abs(self.column - self.paddle) <= 1
        return self._image(), (1.0 if caught else -1.0) if over else 0.0, over, False, {}

    def _image(self):
        image = np.zeros((SIDE, SIDE, 2), np.uint8)
        image[self.row, self.column, 0] = 1
        image[-1, self.paddle - 1 : self.paddle + 2, 1] = 1
        image = image.repeat(self.scale, 0).repeat(self.scale, 1)
        return np.moveaxis(image, -1, 0) if self.channels_first else image
