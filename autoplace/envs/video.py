"""An environment whose episodes are recorded, by Gymnasium's own recorder."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
from gymnasium.wrappers import RecordVideo

from autoplace.envs.make import Env, make_env
from autoplace.errors import EnvError, UsageError
from autoplace.workload import EnvSpec


def make_recorded_env(spec: EnvSpec, folder: Path, *, episodes: int) -> Env:
    """An environment that leaves a video of each of its first episodes in ``folder``.

    Args:
        spec: of the environment.
        folder: where the videos go.
        episodes: how many are recorded.

    Raises:
        UsageError: what writes videos is not installed.
        EnvError: the environment cannot be made, or shows no images.
    """
    env = make_env(spec, render_mode="rgb_array")
    try:
        return RecordVideo(
            env, str(folder), episode_trigger=lambda index: index < episodes, name_prefix="policy"
        )
    except gym.error.DependencyNotInstalled as error:
        raise UsageError(
            "--video needs moviepy, which is not installed: pip install 'autoplace[video]'"
        ) from error
    except ValueError as error:
        raise EnvError(
            f"{spec.id} cannot be recorded, its render_mode is {env.render_mode!r}: "
            "leave out --video, or let it take render_mode='rgb_array'"
        ) from error
    except OSError as error:
        raise UsageError(
            f"--video cannot use {folder}: {error.strerror or error}: name another folder"
        ) from error
