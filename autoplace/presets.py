"""Hyperparameters that are known to work, by environment.

Each entry says where its values come from. What a preset does not name keeps its default; the
placement stays the planner's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from autoplace.errors import UsageError

# https://github.com/DLR-RM/rl-baselines3-zoo, hyperparams/ppo.yml
_RL_ZOO = "RL Baselines3 Zoo, hyperparams/ppo.yml"

# Schulman et al. 2017, table 3: 2,048 steps a rollout, 10 epochs, minibatches of 64, Adam 3e-4,
# gamma 0.99, lambda 0.95, clip range 0.2. Here 8 environments share the 2,048 steps, observations
# and rewards are normalised and the step size falls to 0 (Engstrom et al. 2020, section 3).
_MUJOCO = {"num_envs": 8, "rollout_steps": 256, "minibatch_rows": 64}
_PAPER = "Schulman et al. 2017, table 3, with 8 environments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Tuned hyperparameters.

    Attributes:
        env: the Gymnasium id that they were tuned for, without its version.
        values: fields of :class:`autoplace.workload.Hyperparameters`.
        total_steps: env steps that they were tuned for.
        source: where the values come from, and what differs from there.
    """

    env: str
    values: dict[str, Any]
    total_steps: int
    source: str

    @property
    def name(self) -> str:
        """As ``--preset`` takes it."""
        return self.env.lower()


def _mujoco(env: str, returned: str | None, **values: Any) -> Preset:  # noqa: ANN401
    """The paper's values; ``returned`` is what the deterministic policy of -v5 came to."""
    shown = "not tried here" if returned is None else f"returned {returned}"
    changed = "".join(f", {name} {value} as in {_RL_ZOO}" for name, value in values.items())
    return Preset(
        env=env,
        values={**_MUJOCO, **values},
        total_steps=1_000_000,
        source=f"{_PAPER}{changed}; {shown}",
    )


PRESETS: tuple[Preset, ...] = (
    Preset(
        env="CartPole",
        values={
            "num_envs": 8,
            "rollout_steps": 32,
            "minibatch_rows": 256,
            "epochs": 20,
            "learning_rate": 1e-3,
            "gamma": 0.98,
            "gae_lambda": 0.8,
            "normalize_observations": False,
            "normalize_rewards": False,
        },
        total_steps=100_000,
        source=f"{_RL_ZOO}; the clip range stays constant",
    ),
    Preset(
        env="Pendulum",
        values={"minibatch_rows": 64, "learning_rate": 1e-3, "gamma": 0.9},
        total_steps=200_000,
        source=f"step size and discount of {_RL_ZOO}; the rest are our defaults, which with them "
        "reached -195 or better on 8 of 8 seeds",
    ),
    Preset(
        env="Acrobot",
        values={
            "num_envs": 16,
            "rollout_steps": 256,
            "epochs": 4,
            "gae_lambda": 0.94,
        },
        total_steps=1_000_000,
        source=_RL_ZOO,
    ),
    Preset(
        env="MountainCar",
        values={
            "num_envs": 16,
            "rollout_steps": 16,
            "epochs": 4,
            "gae_lambda": 0.98,
        },
        total_steps=1_000_000,
        source=_RL_ZOO,
    ),
    Preset(
        env="LunarLander",
        values={
            "num_envs": 16,
            "rollout_steps": 1024,
            "minibatch_rows": 64,
            "epochs": 4,
            "gamma": 0.999,
            "gae_lambda": 0.98,
            "entropy_coef": 0.01,
            "normalize_observations": False,
            "normalize_rewards": False,
            "anneal_learning_rate": False,
        },
        total_steps=1_000_000,
        source=f"{_RL_ZOO}; not tried here",
    ),
    Preset(
        env="BipedalWalker",
        values={
            "num_envs": 32,
            "rollout_steps": 2048,
            "minibatch_rows": 64,
            "gamma": 0.999,
            "clip_range": 0.18,
            "anneal_learning_rate": False,
        },
        total_steps=5_000_000,
        source=f"{_RL_ZOO}; not tried here",
    ),
    _mujoco("Hopper", "3,414, 3,437 and 3,454 after 1M steps, seeds 0 to 2"),
    _mujoco("HalfCheetah", "2,574, 1,706 and 1,821 after 1M steps, seeds 0 to 2"),
    _mujoco("Walker2d", "4,611 after 1M steps, seed 0"),
    _mujoco("Ant", "570 after 1M steps, seed 0"),
    _mujoco("Swimmer", "153 after 1M steps, seed 0", gamma=0.9999),
    _mujoco("Reacher", None),
    _mujoco("InvertedPendulum", None),
    _mujoco("InvertedDoublePendulum", None),
    _mujoco("Humanoid", None),
)


def preset_hyperparameters(name: str, env_id: str) -> dict[str, Any]:
    """The values of a preset by name, or of the environment's own where ``name`` is ``auto``.

    Raises:
        UsageError: there is no such preset, or none for the environment.
    """
    wanted = _base(env_id) if name == "auto" else name.lower()
    for preset in PRESETS:
        if preset.name == wanted:
            return dict(preset.values)
    names = ", ".join(preset.name for preset in PRESETS)
    if name == "auto":
        raise UsageError(f"there is no preset for {env_id}, only {names}: leave --preset out")
    raise UsageError(f"--preset is auto or one of {names}, got {name!r}: name one of them")


def _base(env_id: str) -> str:
    return re.sub(r"-v\d+$", "", env_id.rpartition(":")[2]).lower()
