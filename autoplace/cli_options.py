"""Options that several commands share: environment, placement, hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from autoplace.engines import ENGINES, PRECISIONS
from autoplace.workload import IMAGE_READINGS

Function = TypeVar("Function", bound=Callable[..., Any])


def _hidden_sizes(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """``64,64`` as a tuple."""
    if value is None:
        return None
    try:
        sizes = tuple(int(part) for part in value.split(",") if part.strip())
    except ValueError:
        sizes = ()
    if not sizes or any(size < 1 for size in sizes):
        raise click.BadParameter(
            f"hidden layers are whole numbers from 1 with commas between, got {value!r}: "
            "use for example 64,64",
            ctx=ctx,
            param=param,
        )
    return sizes


def _whole_or_auto(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A whole number, or ``None`` for ``auto``."""
    if value is None or value == "auto":
        return None
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a whole number nor auto: give one of them", ctx=ctx, param=param
        ) from None


FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


def _apply(options: Sequence[Callable[[Function], Function]], function: Function) -> Function:
    for option in reversed(options):
        function = option(function)
    return function


DEFAULT_TOTAL_STEPS = 100_000


def total_steps_option(what: str) -> Callable[[Function], Function]:
    """--total-steps."""
    return click.option(
        "--total-steps",
        type=click.IntRange(min=1),
        help=f"{what} (default {DEFAULT_TOTAL_STEPS:,}).",
    )


def env_options(function: Function) -> Function:
    """ENV and where its step time comes from."""
    return _apply(
        [
            click.argument("env"),
            click.option(
                "--env-kwargs", metavar="JSON", help="Keyword arguments the environment gets."
            ),
            click.option(
                "--wrappers/--no-wrappers",
                default=True,
                show_default=True,
                help="Atari games as usual: 84 x 84 grey, 4 frames skipped and stacked.",
            ),
            click.option(
                "--images",
                type=click.Choice(IMAGE_READINGS),
                default="auto",
                show_default=True,
                help="Images have channels last or first, or are plain numbers.",
            ),
            click.option(
                "--replace-non-finite",
                is_flag=True,
                help="Take 0 for observations and rewards that are NaN or infinite; do not stop.",
            ),
            click.option(
                "--calibration",
                type=FILE,
                help="Plan with this calibration, perhaps of another machine, not the stored one.",
            ),
        ],
        function,
    )


def placement_options(function: Function) -> Function:
    """What a placement may be told; ``auto`` leaves it to the planner."""
    return _apply(
        [
            click.option("--scheme", default="auto", show_default=True, help="How to lay it out."),
            click.option("--device", help="Accelerator to use, or cpu; auto if not given."),
            click.option(
                "--transfer-interval",
                metavar="N|auto",
                callback=_whole_or_auto,
                help="Vector steps per rollout chunk copied to the learner.",
            ),
            click.option("--env-backend", help="How environments are stepped together."),
            click.option(
                "--num-workers",
                metavar="N|auto",
                callback=_whole_or_auto,
                help="Processes that step environments, 0 for none.",
            ),
            click.option(
                "--num-groups",
                metavar="1|2|auto",
                callback=_whole_or_auto,
                help="2: half of a worker's environments steps while the other half's actions "
                "are computed.",
            ),
            click.option(
                "--sample-threads",
                metavar="N|auto",
                callback=_whole_or_auto,
                help="CPU threads while sampling.",
            ),
            click.option(
                "--learn-threads",
                metavar="N|auto",
                callback=_whole_or_auto,
                help="CPU threads while learning.",
            ),
            click.option(
                "--engine",
                type=click.Choice(("auto", *ENGINES)),
                default="auto",
                show_default=True,
                help="How steps are executed: eager torch, numpy for perceptrons on the CPU, "
                "compile by torch.compile (timed when named), graph on accelerators.",
            ),
            click.option(
                "--precision",
                type=click.Choice(tuple(PRECISIONS)),
                help="Of gradient steps; fp32 if not given, since others change what is learned.",
            ),
            click.option(
                "--accumulation-steps",
                type=click.IntRange(min=1),
                metavar="N",
                help="Backward passes that make one gradient step, to need less memory.",
            ),
            click.option(
                "--max-policy-lag",
                type=click.IntRange(min=0),
                default=1,
                show_default=True,
                help="Iterations that the sampling policy may be old; 0 forbids overlap.",
            ),
            click.option(
                "--scheme-settings",
                is_flag=True,
                help="Learn with the settings that are said to go with the scheme: under a policy "
                "lag 0.8 x the entropy bonus and 0.75 x the clip range, larger minibatches.",
            ),
        ],
        function,
    )


# (field of Hyperparameters, click's settings, help); the defaults are those of the field. "flag"
# among the settings is the option's name where the field's is not.
_INT: dict[str, Any] = {"type": int}
_FLOAT: dict[str, Any] = {"type": float}
HYPERPARAMETERS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("num_envs", _INT, "Environments stepped together."),
    ("rollout_steps", _INT, "Vector steps in one rollout."),
    (
        "minibatch_rows",
        {"metavar": "N|auto", "callback": _whole_or_auto},
        "Rows of one gradient step; auto lets the planner choose.",
    ),
    ("epochs", _INT, "Passes over each rollout."),
    (
        "hidden_sizes",
        {"metavar": "W,W,...", "callback": _hidden_sizes},
        "Widths of the hidden layers.",
    ),
    ("learning_rate", _FLOAT, "Adam's step size at the start."),
    ("gamma", _FLOAT, "Discount per step."),
    ("gae_lambda", _FLOAT, "Decay of the advantage estimate."),
    ("clip_range", _FLOAT, "Allowed change of the probability ratio."),
    ("entropy_coef", _FLOAT, "Weight of the entropy bonus."),
    ("value_coef", _FLOAT, "Weight of the value loss."),
    ("max_grad_norm", _FLOAT, "Gradients are scaled down to this norm."),
    ("value_clip", _FLOAT, "Allowed change of a value; no clipping if not given."),
    ("target_kl", _FLOAT, "End an update after the epoch whose mean KL divergence exceeds this."),
    (
        "network_factory",
        {"metavar": "FILE.py:FUNCTION", "flag": "--network"},
        "Your own torch.nn.Module: observations -> (policy outputs, values).",
    ),
)
SWITCHES: tuple[tuple[str, str], ...] = (
    ("anneal_learning_rate", "Let the step size fall linearly over the run."),
    ("normalize_observations", "Standardise observations by running statistics."),
    ("normalize_rewards", "Divide rewards by the spread of the return."),
    ("clip_rewards", "Learn from the sign of a reward only (the default for wrapped Atari games)."),
    ("normalize_advantages", "Standardise the advantages of each minibatch."),
)


def hyperparameter_options(function: Function) -> Function:
    """A preset, and single hyperparameters on top of it."""
    options: list[Callable[[Function], Function]] = [
        click.option(
            "--preset",
            metavar="NAME|auto",
            help="Tuned hyperparameters of a known environment; auto takes ENV's own.",
        )
    ]
    options += [
        click.option(
            settings.get("flag", _flag(name)),
            name,
            help=text,
            **{key: value for key, value in settings.items() if key != "flag"},
        )
        for name, settings, text in HYPERPARAMETERS
    ]
    options += [
        click.option(f"{_flag(name)}/--no-{_flag(name)[2:]}", name, default=None, help=text)
        for name, text in SWITCHES
    ]
    return _apply(options, function)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def plot_option(what: str) -> Callable[[Function], Function]:
    """``--plot FILE``; a name that cannot be drawn to is refused before anything is measured."""

    def check(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
        if value is not None:
            from autoplace.plots import picture_format

            picture_format(value)
        return value

    return click.option("--plot", "plot_file", type=FILE, callback=check, help=f"Draw {what}.")
