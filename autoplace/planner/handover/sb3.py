"""A plan as the arguments of Stable-Baselines3."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from autoplace.envs.description import EnvDescription, inspect_env
from autoplace.envs.make import make_env
from autoplace.errors import UsageError
from autoplace.planner.handover.choice import (
    best,
    is_single_loop,
    other_placement,
    threads_differ,
    with_remarks,
)
from autoplace.planner.plan import Candidate, Plan
from autoplace.workload import EnvSpec, Hyperparameters, ImageSpec, NetworkSpec

# SubprocVecEnv runs one process per environment and pickles every observation, which costs more
# than workers over shared memory do: it is handed over only where those win by this much.
SUBPROC_GAIN = 1.25
_OBSERVATION_CLAMP = _REWARD_CLAMP = 10.0  # as in autoplace's own normalisation
_NATURE_FEATURES = 512  # what a NatureCNN ends with
_TOTAL_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class LinearFall:
    """A learning rate in proportion to what is left of the run, as SB3 asks for it."""

    start: float

    def __call__(self, progress_remaining: float) -> float:
        """The learning rate where ``progress_remaining`` of the run is left (1 at the start)."""
        return self.start * progress_remaining


@dataclass(frozen=True, slots=True)
class MakeEnv:
    """An environment as autoplace makes it, for those that ``gymnasium.make`` alone does not give.

    Attributes:
        spec: which one, with its wrappers.
        flatten: make observations one vector, choices one-hot.
    """

    spec: EnvSpec
    flatten: bool = False

    def __call__(self) -> gym.Env[Any, Any]:
        """A new one."""
        env = make_env(self.spec)
        return gym.wrappers.FlattenObservation(env) if self.flatten else env


def clip_rewards(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Pay the sign of each reward only."""
    return gym.wrappers.TransformReward(env, lambda reward: float(np.sign(float(reward))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sb3Arguments:
    """What to give Stable-Baselines3.

        torch.set_num_threads(a.torch_threads)
        env = make_vec_env(a.env, **a.vec_env, vec_env_cls=...)  # the class of a.vec_env_class
        env = VecNormalize(env, **a.vec_normalize)  # unless that is None
        model = PPO(env=env, **a.ppo)

    Attributes:
        candidate: the costed placement behind it.
        env: a Gymnasium id, or a callable.
        vec_env: keyword arguments of ``make_vec_env``.
        vec_env_class: ``DummyVecEnv`` or ``SubprocVecEnv``.
        vec_normalize: keyword arguments of ``VecNormalize``, ``None`` where nothing is normalised.
        ppo: keyword arguments of ``PPO``.
        torch_threads: for ``torch.set_num_threads``.
        differences: what SB3 cannot express or does differently.
    """

    candidate: Candidate
    env: str | MakeEnv
    vec_env: dict[str, Any]
    vec_env_class: str
    vec_normalize: dict[str, Any] | None
    ppo: dict[str, Any]
    torch_threads: int
    differences: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object; what is code is written as such."""
        return {
            "trainer": "sb3",
            "candidate": self.candidate.to_json(),
            "env": self.env if isinstance(self.env, str) else repr(self.env),
            "vec_env": {key: _as_json(value) for key, value in self.vec_env.items()},
            "vec_env_class": self.vec_env_class,
            "vec_normalize": self.vec_normalize,
            "ppo": {key: _as_json(value) for key, value in self.ppo.items()},
            "torch_threads": self.torch_threads,
            "differences": list(self.differences),
        }

    def to_text(self) -> str:
        """A script that trains so."""
        own = ["MakeEnv"] * isinstance(self.env, MakeEnv)
        own += ["clip_rewards"] * ("wrapper_class" in self.vec_env)
        classes = ", ".join([self.vec_env_class] + ["VecNormalize"] * bool(self.vec_normalize))
        lines = [
            "import torch",
            "from stable_baselines3 import PPO",
            "from stable_baselines3.common.env_util import make_vec_env",
            f"from stable_baselines3.common.vec_env import {classes}",
        ]
        if own:
            lines += ["", f"from autoplace.planner.handover import {', '.join(own)}"]
        if isinstance(self.env, MakeEnv):
            lines.append("from autoplace.workload import EnvSpec")
        vec_env = {"n_envs": self.vec_env["n_envs"], "vec_env_cls": _Name(self.vec_env_class)}
        lines += [
            "",
            "",
            "def main():",
            f"    torch.set_num_threads({self.torch_threads})",
            f"    env = make_vec_env({_arguments([self.env], {**vec_env, **self.vec_env})})",
        ]
        if self.vec_normalize:
            lines.append(
                f"    env = VecNormalize({_arguments([_Name('env')], self.vec_normalize)})"
            )
        lines += ["    model = PPO(", f"        {self.ppo['policy']!r},", "        env,"]
        lines += [
            f"        {key}={_as_code(value)},"
            for key, value in self.ppo.items()
            if key != "policy"
        ]
        lines += [
            "    )",
            f"    model.learn(total_timesteps={_TOTAL_STEPS:_})",
            "",
            "",
            'if __name__ == "__main__":  # worker processes import this file',
            "    main()",
        ]
        return with_remarks("\n".join(lines), self.candidate, self.differences)


# --------------------------------------------------------------------------------------------------
# From a plan


def for_sb3(plan: Plan) -> Sb3Arguments:
    """The best placement that SB3 can run, as its own arguments.

    Raises:
        EnvError: the environment cannot be made here.
        UsageError: SB3 cannot run the environment at all.
    """
    description = inspect_env(plan.workload.env)
    hyper, spec = plan.workload.hyperparameters, plan.workload.network
    plain = best(plan, lambda c: is_single_loop(c) and c.placement.num_workers == 0)
    workers = best(plan, lambda c: is_single_loop(c) and c.placement.num_workers > 0)
    is_subproc = workers is not None and (
        plain is None or workers.score > SUBPROC_GAIN * plain.score
    )
    found = workers if is_subproc else plain
    chosen = found or plan.chosen
    placement = chosen.placement
    policy, policy_kwargs = _sb3_policy(description, hyper, spec)
    env, env_kwargs = _sb3_env(plan.workload.env, description)
    vec_env: dict[str, Any] = {"n_envs": placement.num_envs}
    if env_kwargs:
        vec_env["env_kwargs"] = env_kwargs
    if hyper.clip_rewards:
        vec_env["wrapper_class"] = clip_rewards
    differences = [
        *other_placement(plan, found, "Stable-Baselines3"),
        *threads_differ(placement),
        *_sb3_differences(hyper, spec, description),
    ]
    if is_subproc:
        differences.append("SubprocVecEnv runs one process for each environment")
    ppo: dict[str, Any] = {
        "policy": policy,
        "learning_rate": (
            LinearFall(hyper.learning_rate) if hyper.anneal_learning_rate else hyper.learning_rate
        ),
        "n_steps": hyper.rollout_steps,
        "batch_size": placement.minibatch_rows,
        "n_epochs": hyper.epochs,
        "gamma": hyper.gamma,
        "gae_lambda": hyper.gae_lambda,
        "clip_range": hyper.clip_range,
        "clip_range_vf": hyper.value_clip,
        "normalize_advantage": hyper.normalize_advantages,
        "ent_coef": hyper.entropy_coef,
        "vf_coef": hyper.value_coef,
        "max_grad_norm": hyper.max_grad_norm,
        "target_kl": None if hyper.target_kl is None else hyper.target_kl / 1.5,
        "policy_kwargs": policy_kwargs,
        "device": placement.learn_device,
    }
    return Sb3Arguments(
        candidate=chosen,
        env=env,
        vec_env=vec_env,
        vec_env_class="SubprocVecEnv" if is_subproc else "DummyVecEnv",
        vec_normalize=_vec_normalize(hyper, description),
        ppo={name: value for name, value in ppo.items() if value is not None},
        torch_threads=max(placement.sample_threads, placement.learn_threads),
        differences=tuple(differences),
    )


def _sb3_env(spec: EnvSpec, description: EnvDescription) -> tuple[str | MakeEnv, dict[str, Any]]:
    codec = description.observations
    flatten = not codec.images and codec.box_shape is None
    if flatten or description.is_wrapped_atari or ".py:" in spec.id:
        return MakeEnv(spec, flatten), {}
    return spec.id, spec.kwargs


def _sb3_policy(
    description: EnvDescription, hyper: Hyperparameters, spec: NetworkSpec
) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the policy: SB3's own activation and initial weights are the same."""
    hidden = list(hyper.hidden_sizes)
    kwargs: dict[str, Any] = {"net_arch": {"pi": hidden, "vf": hidden}}
    if not spec.images:
        return "MlpPolicy", kwargs
    codec = description.observations
    for leaf in codec.leaves:
        if len(leaf.path) > 1 or isinstance((*leaf.path, "")[0], int):
            raise UsageError(
                f"Stable-Baselines3 takes a Dict of images and vectors, but {description.env.id} "
                f"observes {leaf.key!r} inside of another space: wrap the environment"
            )
        if leaf.image is not None and not _is_sb3_image(leaf.image, len(leaf.shape)):
            raise UsageError(
                "Stable-Baselines3 reads images of three axes, 36 pixels and more and values up "
                f"to 255, but {description.env.id} observes {leaf.shape} up to {leaf.image.high}: "
                "wrap the environment"
            )
    if codec.box_shape is not None:
        return "CnnPolicy", kwargs
    kwargs["features_extractor_kwargs"] = {"cnn_output_dim": _NATURE_FEATURES}
    return "MultiInputPolicy", kwargs


def _is_sb3_image(image: ImageSpec, num_axes: int) -> bool:
    return num_axes == 3 and image.encoder == "NatureCNN" and image.high == 255


def _vec_normalize(hyper: Hyperparameters, description: EnvDescription) -> dict[str, Any] | None:
    codec = description.observations
    keys = [leaf.key for leaf in codec.leaves if leaf.image is None and not leaf.counts]
    observations = hyper.normalize_observations and (bool(keys) or not codec.images)
    if not observations and not hyper.normalize_rewards:
        return None
    found: dict[str, Any] = {
        "norm_obs": observations,
        "norm_reward": hyper.normalize_rewards,
        "clip_obs": _OBSERVATION_CLAMP,
        "clip_reward": _REWARD_CLAMP,
        "gamma": hyper.gamma,
    }
    if observations and codec.images:
        found["norm_obs_keys"] = keys
    return found


def _sb3_differences(
    hyper: Hyperparameters, spec: NetworkSpec, description: EnvDescription
) -> Iterable[str]:
    if spec.factory:
        yield f"the network {spec.factory} is not SB3's: write it as a policy of SB3's own"
    if hyper.anneal_learning_rate:
        yield "its learning rate is one iteration ahead: the last update has step size 0"
    if hyper.normalize_observations or hyper.normalize_rewards:
        yield "its running statistics change with every step, not once an iteration"
    if hyper.value_clip is not None:
        yield "it clips values without taking the larger of both losses"
    if hyper.target_kl is not None:
        yield "it looks at the KL divergence (against 1.5 target_kl) after every minibatch"
    if description.actions.first or description.actions.firsts is not None:
        yield "it counts actions from 0, the environment does not: wrap the environment"
    if description.observations.images and description.observations.box_shape is None:
        yield "choices beside images are not standardised"


# --------------------------------------------------------------------------------------------------
# Values as code


class _Name(str):
    """Code, not text."""

    def __repr__(self) -> str:
        return str(self)


def _arguments(positional: list[Any], named: dict[str, Any]) -> str:
    words = [*map(_as_code, positional), *(f"{k}={_as_code(v)}" for k, v in named.items())]
    return ", ".join(words)


def _as_code(value: object) -> str:
    if isinstance(value, LinearFall):
        return f"lambda progress_remaining: {value.start!r} * progress_remaining"
    return getattr(value, "__name__", None) or repr(value)


def _as_json(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return repr(value)
    return getattr(value, "__name__", value)
