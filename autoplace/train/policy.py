"""A trained policy as a callable: NumPy observations in, the environment's actions out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoplace.envs.description import EnvDescription, inspect_env
from autoplace.ppo.distribution import draw_noise, most_probable
from autoplace.ppo.network import ActorCritic
from autoplace.train.checkpoint import load_checkpoint


class Policy:
    """A policy whose observation statistics are frozen.

    Attributes:
        env_steps: env steps that it was trained for.
        description: the sizes of its environment.
    """

    def __init__(
        self, network: ActorCritic, description: EnvDescription, *, env_steps: int, seed: int = 0
    ) -> None:
        self.network = network
        self.description = description
        self.env_steps = env_steps
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, observations: Any, *, deterministic: bool = True) -> Any:  # noqa: ANN401
        """Actions that the environment takes, for one observation or for a stack of them.

        Args:
            observations: as the environment returns them, ``[*shape]`` or ``[B, *shape]`` (of a
                Dict or Tuple, every part of it).
            deterministic: the most probable action instead of a sampled one.

        Returns:
            One action or a stack: ints, or arrays clipped to the action space.
        """
        codec, actions = self.description.observations, self.description.actions
        single = codec.is_single(observations)
        rows = codec.encode_one(observations) if single else codec.encode(observations)
        raw = self.act(rows, deterministic=deterministic)
        decoded = actions.decode(raw)
        if single:
            return decoded[0]
        return np.asarray(decoded)

    @torch.inference_mode()
    def act(self, rows: np.ndarray, *, deterministic: bool = True) -> np.ndarray:
        """The policy's own actions (not yet the environment's) for rows ``[B, D]``."""
        network, spec = self.network, self.network.spec
        outputs = network.policy(network.normalize(torch.from_numpy(rows)))
        if not deterministic:
            noise = draw_noise(
                (len(rows), spec.action_size),
                continuous=spec.continuous,
                generator=self._generator,
            )
            scale = 1.0 if network.log_std is None else network.log_std.exp()
            outputs = outputs + noise * scale
        if spec.continuous:
            return outputs.numpy()
        return most_probable(outputs, spec.action_heads).numpy()


def load_policy(run_dir: Path | str, *, checkpoint: str = "latest", seed: int = 0) -> Policy:
    """The policy of a run.

    Args:
        run_dir: the folder of the run.
        checkpoint: ``latest`` (the newest that can be read), ``best``, or the env steps after which
            one was kept.
        seed: of the actions that it samples when asked to.

    Raises:
        RunError: there is no such checkpoint that can be read.
        EnvError: its environment cannot be made here.
    """
    loaded = load_checkpoint(Path(run_dir), checkpoint)
    return Policy(
        loaded.build_network(),
        inspect_env(loaded.workload.env),
        env_steps=loaded.progress.env_steps,
        seed=seed,
    )
