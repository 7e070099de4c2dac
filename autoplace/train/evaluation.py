"""How good a trained policy is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoplace import device as devices
from autoplace.envs import SyncVectorEnv, spawn_seeds
from autoplace.envs.video import make_recorded_env
from autoplace.errors import EnvError, UsageError
from autoplace.train.policy import Policy, load_policy

_MAX_ENVS = 16
_STREAM = 2**32 - 1  # evaluation never repeats the seeds of training
_ENDLESS_STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Returns of whole episodes under a frozen policy.

    Attributes:
        returns: undiscounted, of each episode.
        lengths: steps of each episode.
        deterministic: whether the most probable actions were taken.
        env_steps: env steps that the policy was trained for.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    deterministic: bool
    env_steps: int

    @property
    def episodes(self) -> int:
        """How many."""
        return len(self.returns)

    @property
    def mean_return(self) -> float:
        """Over the episodes."""
        return float(np.mean(self.returns))

    @property
    def std_return(self) -> float:
        """Standard deviation over the episodes."""
        return float(np.std(self.returns))

    def to_json(self) -> dict[str, Any]:
        """As ``autoplace evaluate --json`` prints it."""
        return {
            "mean_return": self.mean_return,
            "std_return": self.std_return,
            "episodes": self.episodes,
            "deterministic": self.deterministic,
            "env_steps": self.env_steps,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
        }


def evaluate(
    policy: Policy | Path | str,
    *,
    episodes: int = 20,
    deterministic: bool = True,
    checkpoint: str = "latest",
    seed: int = 0,
    video_dir: Path | str | None = None,
) -> EvaluationResult:
    """Run whole episodes.

    Every environment runs its own share of the episodes: taking whichever end first would favour
    short ones.

    Args:
        policy: a policy, or the folder of a run.
        episodes: how many.
        deterministic: take the most probable action instead of sampling.
        checkpoint: of a run folder: ``latest``, ``best``, or the env steps of one that was kept.
        seed: of the environments; never the same as in training.
        video_dir: where the first of every 16 episodes leave a video each; the returns are the
            same with and without.

    Raises:
        UsageError: fewer than one episode is asked for, or no video can be written.
        EnvError: an episode does not end, or the environment shows no images.
    """
    if episodes < 1:
        raise UsageError(f"--episodes must be at least 1, got {episodes}: raise it")
    if not isinstance(policy, Policy):
        policy = load_policy(policy, checkpoint=checkpoint, seed=seed)
    with devices.torch_threads(
        1
    ):  # a few rows at a time: more threads only get in each other's way
        returns, lengths = _run_episodes(
            policy, episodes, deterministic, seed, None if video_dir is None else Path(video_dir)
        )
    return EvaluationResult(
        returns=tuple(returns),
        lengths=tuple(lengths),
        deterministic=deterministic,
        env_steps=policy.env_steps,
    )


def _run_episodes(
    policy: Policy, episodes: int, deterministic: bool, seed: int, video_dir: Path | None
) -> tuple[list[float], list[int]]:
    num_envs = min(episodes, _MAX_ENVS)
    left = np.full(num_envs, episodes // num_envs) + (np.arange(num_envs) < episodes % num_envs)
    recorded = None
    if video_dir is not None:
        recorded = make_recorded_env(policy.description.env, video_dir, episodes=int(left[0]))
    envs = SyncVectorEnv(policy.description, num_envs, first_env=recorded)
    returns: list[float] = []
    lengths: list[int] = []
    running_return, running_length = np.zeros(num_envs), np.zeros(num_envs, np.int64)
    try:
        observations = envs.reset(spawn_seeds(seed, num_envs, stream=_STREAM))
        while left.any():
            step = envs.step(policy.act(observations, deterministic=deterministic))
            running_return += step.rewards
            running_length += 1
            for index in step.ended:
                if left[index]:
                    left[index] -= 1
                    returns.append(float(running_return[index]))
                    lengths.append(int(running_length[index]))
                running_return[index] = running_length[index] = 0
            if running_length.max() >= _ENDLESS_STEPS:
                raise EnvError(
                    f"{policy.description.env.id} has run one episode for {_ENDLESS_STEPS} steps: "
                    "give it a time limit to evaluate it"
                )
    finally:
        envs.close()
    return returns, lengths
