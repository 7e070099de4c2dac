"""A plan as the command lines of CleanRL and Sample Factory."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autoplace.envs.description import EnvDescription, inspect_env
from autoplace.errors import UsageError
from autoplace.planner.handover.choice import (
    best,
    is_plain_step,
    is_single_loop,
    other_placement,
    threads_differ,
    with_remarks,
)
from autoplace.planner.plan import Candidate, Placement, Plan

_CLEANRL_HIDDEN = (64, 64)
_NATURE_FEATURES = 512  # what a NatureCNN ends with
_NO_VALUE_CLIP = 1e9
_TOTAL_STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandArguments:
    """What to give a trainer that is run from the command line.

    Attributes:
        trainer: ``cleanrl`` or ``sample-factory``.
        candidate: the costed placement behind it.
        program: what is run.
        arguments: option names without dashes, and their values.
        environment: variables to set, for what is no option.
        differences: what the trainer cannot express or does differently.
    """

    trainer: str
    candidate: Candidate
    program: str
    arguments: dict[str, Any]
    environment: dict[str, str]
    differences: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return {
            "trainer": self.trainer,
            "candidate": self.candidate.to_json(),
            "program": self.program,
            "arguments": self.arguments,
            "environment": self.environment,
            "differences": list(self.differences),
        }

    def to_text(self) -> str:
        """A command to paste into a shell."""
        words = [f"{key}={value}" for key, value in self.environment.items()]
        words.append(self.program)
        for key, value in self.arguments.items():
            if self.trainer == "cleanrl" and isinstance(value, bool):  # a switch
                words.append(f"--{key}" if value else f"--no-{key}")
            elif isinstance(value, tuple):
                words.append(" ".join([f"--{key}", *map(str, value)]))
            else:
                words.append(f"--{key}={shlex.quote(str(value))}")
        return with_remarks(" \\\n  ".join(words), self.candidate, self.differences)


# --------------------------------------------------------------------------------------------------
# CleanRL


def for_cleanrl(plan: Plan) -> CommandArguments:
    """The best placement that CleanRL's single-file PPO can run, as its own arguments.

    Raises:
        EnvError: the environment cannot be made here.
        UsageError: none of CleanRL's scripts can run the environment.
    """
    description = inspect_env(plan.workload.env)
    hyper, env = plan.workload.hyperparameters, plan.workload.env
    found = best(plan, lambda c: is_single_loop(c) and c.placement.num_workers == 0)
    chosen = found or plan.chosen
    placement = chosen.placement
    script = _cleanrl_script(description)
    num_minibatches = math.ceil(hyper.rollout_rows / placement.minibatch_rows)
    arguments: dict[str, Any] = {
        "env-id": env.id,
        "total-timesteps": _TOTAL_STEPS,
        "num-envs": placement.num_envs,
        "num-steps": hyper.rollout_steps,
        "num-minibatches": num_minibatches,
        "update-epochs": hyper.epochs,
        "learning-rate": hyper.learning_rate,
        "anneal-lr": hyper.anneal_learning_rate,
        "gamma": hyper.gamma,
        "gae-lambda": hyper.gae_lambda,
        "norm-adv": hyper.normalize_advantages,
        "clip-coef": hyper.clip_range,
        "clip-vloss": hyper.value_clip is not None,
        "ent-coef": hyper.entropy_coef,
        "vf-coef": 2 * hyper.value_coef,  # it halves the squared error
        "max-grad-norm": hyper.max_grad_norm,
        "cuda": placement.learn_device != "cpu",
    }
    if hyper.target_kl is not None:
        arguments["target-kl"] = hyper.target_kl
    return CommandArguments(
        trainer="cleanrl",
        candidate=chosen,
        program=f"python cleanrl/{script}",
        arguments=arguments,
        environment={
            "OMP_NUM_THREADS": str(max(placement.sample_threads, placement.learn_threads))
        },
        differences=(
            *other_placement(plan, found, "CleanRL"),
            *threads_differ(placement),
            *_cleanrl_differences(plan, description, script, placement),
        ),
    )


def _cleanrl_script(description: EnvDescription) -> str:
    codec, actions = description.observations, description.actions
    discrete = not actions.continuous and not actions.heads and not actions.first
    if ".py:" not in description.env.id:
        if description.is_wrapped_atari and discrete:
            return "ppo_atari.py"
        if discrete and codec.box_shape is not None and not codec.images:
            return "ppo.py"
        if actions.continuous and not codec.images:
            return "ppo_continuous_action.py"
    raise UsageError(
        "CleanRL's PPO scripts take registered environments with Box observations and Discrete or "
        f"Box actions, or Atari games, which {description.env.id} is not: write its make_env() "
        "into a copy of one"
    )


def _cleanrl_differences(
    plan: Plan, description: EnvDescription, script: str, placement: Placement
) -> Iterable[str]:
    hyper, env = plan.workload.hyperparameters, plan.workload.env
    hidden = () if script == "ppo_atari.py" else _CLEANRL_HIDDEN
    if plan.workload.network.factory or hyper.hidden_sizes != hidden:
        layers = ", ".join(map(str, hidden)) or "none behind the encoder"
        yield f"its hidden layers are {layers}: change its Agent"
    if hyper.rollout_rows % placement.minibatch_rows:
        yield f"its minibatches are equal, so not of {placement.minibatch_rows} rows"
    if env.kwargs:
        yield f"it passes no keyword arguments to the environment: write {env.kwargs} into make_env"
    if script == "ppo_continuous_action.py":
        if not (hyper.normalize_observations and hyper.normalize_rewards):
            yield "it normalises observations and rewards: take the wrappers out of make_env"
        else:
            yield "every environment has normalisation statistics of its own"
    elif hyper.normalize_rewards or (
        hyper.normalize_observations and not description.observations.images
    ):
        yield "it normalises neither observations nor rewards"
    if script == "ppo_atari.py":
        yield "a lost life ends an episode there, and its frames are made by other wrappers"
    if hyper.value_clip not in (None, hyper.clip_range):
        yield "it clips values by clip-coef"
    if hyper.target_kl is not None:
        yield "it looks at the KL divergence of an epoch's last minibatch only"
    yield "a truncated episode is not bootstrapped from its last observation"
    if placement.learn_device not in ("cpu", "cuda:0"):
        yield f"it knows no device {placement.learn_device}"


# --------------------------------------------------------------------------------------------------
# Sample Factory


def for_sample_factory(plan: Plan) -> CommandArguments:
    """The best placement that Sample Factory 2 can run, as its own arguments."""
    hyper, spec = plan.workload.hyperparameters, plan.workload.network
    found = best(plan, _fits_sample_factory)
    chosen = found or plan.chosen
    placement = chosen.placement
    workers = max(1, placement.num_workers)
    overlaps = chosen.scheme in ("double-buffer", "async")
    rows = placement.minibatch_rows
    rollout = math.gcd(hyper.rollout_steps, rows)
    arguments: dict[str, Any] = {
        "algo": "APPO",
        "env": plan.workload.env.id,
        "device": "cpu" if placement.learn_device == "cpu" else "gpu",
        "train_for_env_steps": _TOTAL_STEPS,
        "async_rl": overlaps,
        "serial_mode": placement.num_workers == 0 and not overlaps,
        "num_workers": workers,
        "num_envs_per_worker": math.ceil(placement.num_envs / workers),
        "worker_num_splits": placement.num_groups,
        "rollout": rollout,
        "recurrence": 1,
        "use_rnn": False,
        "batch_size": rows,
        "num_batches_per_epoch": max(1, hyper.rollout_rows // rows),
        "num_epochs": hyper.epochs,
        "shuffle_minibatches": True,
        "learning_rate": hyper.learning_rate,
        "lr_schedule": "linear_decay" if hyper.anneal_learning_rate else "constant",
        "adam_eps": 1e-5,
        "gamma": hyper.gamma,
        "gae_lambda": hyper.gae_lambda,
        "ppo_clip_ratio": hyper.clip_range,
        "ppo_clip_value": _NO_VALUE_CLIP if hyper.value_clip is None else hyper.value_clip,
        "exploration_loss_coeff": hyper.entropy_coef,
        "value_loss_coeff": hyper.value_coef,
        "max_grad_norm": hyper.max_grad_norm,
        "with_vtrace": False,
        "value_bootstrap": True,
        "reward_scale": 1.0,
        "reward_clip": 1.0 if hyper.clip_rewards else 1000.0,
        "normalize_input": hyper.normalize_observations,
        "normalize_returns": hyper.normalize_rewards,
        "nonlinearity": "relu" if spec.images else "tanh",
        "policy_initialization": "orthogonal",
        "actor_critic_share_weights": bool(spec.images),
        "adaptive_stddev": False,
    }
    if spec.images:
        arguments["encoder_conv_architecture"] = "convnet_atari"
        arguments["encoder_conv_mlp_layers"] = (_NATURE_FEATURES,)
        arguments["decoder_mlp_layers"] = hyper.hidden_sizes
        arguments["obs_scale"] = float(spec.images[0].high)
    else:
        arguments["encoder_mlp_layers"] = hyper.hidden_sizes
    return CommandArguments(
        trainer="sample-factory",
        candidate=chosen,
        program="python -m YOUR_TRAIN_SCRIPT",
        arguments=arguments,
        environment={},
        differences=(
            *other_placement(plan, found, "Sample Factory"),
            *_sample_factory_differences(plan, placement, rollout),
        ),
    )


def _fits_sample_factory(candidate: Candidate) -> bool:
    placement = candidate.placement
    return (
        candidate.scheme != "hybrid"
        and placement.env_backend in ("sync", "process")
        and placement.num_envs % max(1, placement.num_workers) == 0
        and is_plain_step(placement)
    )


def _sample_factory_differences(plan: Plan, placement: Placement, rollout: int) -> Iterable[str]:
    hyper, spec = plan.workload.hyperparameters, plan.workload.network
    yield (
        f"YOUR_TRAIN_SCRIPT has to register {plan.workload.env.id} "
        "(sample_factory.envs.env_utils.register_env)"
    )
    if spec.factory or spec.images:
        yield "its encoder has its own layers: see --encoder_conv_architecture"
    if spec.images and hyper.hidden_sizes:
        yield "one activation function, ReLU, is used in all layers"
    if rollout < hyper.rollout_steps:
        yield f"its rollouts are {rollout} steps long, of which minibatches are made whole"
    yield "the ratio is clipped between 1 / (1 + clip) and 1 + clip"
    if hyper.normalize_rewards:
        yield "returns are standardised, instead of rewards scaled"
    if not hyper.normalize_advantages:
        yield "it always standardises advantages"
    if hyper.target_kl is not None:
        yield "it has no target KL divergence"
    yield "it decides on the threads of its processes itself"
    if placement.num_groups == 1:
        yield "envs of a worker are not stepped in halves (--worker_num_splits 2 would)"
