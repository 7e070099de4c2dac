"""What speeds are compared on: rollouts, networks and hyperparameters."""

from __future__ import annotations

from typing import Any

# What most PPO implementations share; no normalisation of observations or rewards.
COMMON: dict[str, Any] = {
    "learning_rate": 3e-4,
    "anneal_learning_rate": False,
    "normalize_observations": False,
    "normalize_rewards": False,
    "entropy_coef": 0.0,
    "num_envs": 8,
}
WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "W1": ("CartPole-v1", {"rollout_steps": 128, "epochs": 4, "minibatch_rows": 256}),
    "W2": ("Hopper-v5", {"rollout_steps": 256, "epochs": 10, "minibatch_rows": 64}),
    "W3": (
        "HalfCheetah-v5",
        {"rollout_steps": 256, "epochs": 10, "minibatch_rows": 512, "hidden_sizes": (256, 256)},
    ),
    "W4": (
        "ALE/Pong-v5",
        {"rollout_steps": 128, "epochs": 4, "minibatch_rows": 256, "hidden_sizes": (512,)},
    ),
}
