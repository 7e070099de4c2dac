"""What a run needs to go on, or to be evaluated: tensors and plain types only."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoplace import store
from autoplace.engines import EAGER
from autoplace.errors import RunError
from autoplace.ppo.network import ActorCritic
from autoplace.train.learner import Learned
from autoplace.workload import Workload

log = logging.getLogger(__name__)

# Schema versions: 1, the first.
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come.

    Attributes:
        iteration: complete iterations.
        env_steps: env steps in them.
        total_steps: what the run is to reach, which the learning-rate schedule is tied to.
        wall_s: seconds spent, over every call.
        seed: of the run.
        recent_episodes: (return, length) of the last episodes that ended.
    """

    iteration: int = 0
    env_steps: int = 0
    total_steps: int
    wall_s: float = 0.0
    seed: int
    recent_episodes: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint as it was read.

    Attributes:
        workload: the environment, the network and the hyperparameters.
        progress: how far the run had come.
        network: weights and observation statistics by name, as ``ActorCritic.state_dict`` has them.
        optimizer: Adam's moments and step count.
        reward_state: of the reward normaliser, ``None`` where there is none.
        previous: the network's buffer before the last update, which samples the next rollout;
            ``None`` where the network itself does.
    """

    workload: Workload
    progress: Progress
    network: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    reward_state: Tensor | None
    previous: Tensor | None = None

    def build_network(self, engine: str = EAGER) -> ActorCritic:
        """The network on the host, with its weights and statistics."""
        hyper = self.workload.hyperparameters
        network = ActorCritic(
            self.workload.network,
            normalize_observations=hyper.normalize_observations,
            engine=engine,
        )
        network.load_state_dict(self.network)
        return network

    def restore(self, learner: Learned) -> None:
        """Give a learner, whose network was built from this one, its optimiser and statistics."""
        if self.optimizer:
            # host -> learner's device, once a resume
            state = {name: value.to(learner.device) for name, value in self.optimizer.items()}
            learner.updater.load_optimizer_state(state)
        if learner.reward_normalizer is not None and self.reward_state is not None:
            learner.reward_normalizer.state.copy_(self.reward_state)
            learner.reward_normalizer.forget_episodes()  # the environments start afresh


def take_checkpoint(workload: Workload, learner: Learned, progress: Progress) -> dict[str, Any]:
    """All of a run whose weights are sound, on the host; later updates leave it as it is."""
    normalizer, previous = learner.reward_normalizer, learner.previous
    # device -> host, once a checkpoint. Clones: the parameters are views, and a view would drag
    # its whole buffer along.
    return {
        "schema_version": SCHEMA_VERSION,
        "workload": workload.to_json(),
        "progress": dataclasses.asdict(progress),
        "network": _on_host(learner.network.state_dict()),
        "optimizer": _on_host(learner.updater.optimizer_state()),
        "reward_state": None if normalizer is None else normalizer.state.cpu().clone(),
        "previous": None if previous is None else previous.cpu().clone(),
    }


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}


def checkpoint_bytes(content: dict[str, Any]) -> bytes:
    """What is written of :func:`take_checkpoint`.

    Made in memory: where a disk is full, torch would fail with an error of its own archive.
    """
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def load_checkpoint(run_dir: Path, name: str = "latest") -> Checkpoint:
    """A checkpoint of a run.

    Args:
        run_dir: the folder of the run.
        name: ``latest`` for the newest that can be read, ``best``, or the env steps of one that was
            kept.

    Raises:
        RunError: there is none, or it cannot be read.
    """
    if name != "latest":
        file = store.kept_checkpoint(run_dir, name)
        loaded = _try_to_read(file, "it is damaged")
        if loaded is None:
            raise RunError(f"{file} cannot be read: take another checkpoint")
        return loaded
    files = store.latest_checkpoint(run_dir)
    for file in files:
        loaded = _try_to_read(file, "trying the one before")
        if loaded is not None:
            return loaded
    if files:
        raise RunError(f"no checkpoint in {run_dir} can be read: train afresh in another --run-dir")
    raise RunError(f"{run_dir} holds no checkpoint: name the folder of a run")


def _try_to_read(file: Path, next_step: str) -> Checkpoint | None:
    try:
        return parse_checkpoint(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # whatever a damaged archive raises
        log.warning("checkpoint %s cannot be read (%s): %s", file, error, next_step)
        return None


def parse_checkpoint(data: dict[str, Any]) -> Checkpoint:
    """The checkpoint in what :func:`take_checkpoint` gave.

    Raises:
        ValueError: it is of another schema version.
    """
    if data["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema version {data['schema_version']}, expected {SCHEMA_VERSION}")
    progress = data["progress"]
    return Checkpoint(
        workload=Workload.from_json(data["workload"]),
        progress=Progress(
            **{
                **progress,
                "recent_episodes": tuple(tuple(row) for row in progress["recent_episodes"]),
            }
        ),
        network=data["network"],
        optimizer=data["optimizer"],
        reward_state=data["reward_state"],
        previous=data.get("previous"),
    )


def refuse_other_run(checkpoint: Checkpoint, workload: Workload, seed: int) -> None:
    """Check that a checkpoint is resumed as the run it belongs to.

    Raises:
        RunError: what may not change silently has changed.
    """
    old, new = checkpoint.workload, workload
    pairs = (
        ("environment", old.env, new.env),
        ("network", old.network, new.network),
        ("--num-envs", old.hyperparameters.num_envs, new.hyperparameters.num_envs),
        ("--rollout-steps", old.hyperparameters.rollout_steps, new.hyperparameters.rollout_steps),
        ("--seed", checkpoint.progress.seed, seed),
    )
    for name, before, now in pairs:
        if before != now:
            raise RunError(
                f"a run resumes with what it began with, but {name} was {before} and is {now}: "
                "give the old value, or train afresh in another --run-dir"
            )
    for name, before in dataclasses.asdict(old.hyperparameters).items():
        now = getattr(new.hyperparameters, name)
        if before != now and name != "minibatch_rows":
            log.warning("resumed with %s %s, the run began with %s", name, now, before)
