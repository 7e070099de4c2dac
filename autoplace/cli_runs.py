"""``autoplace train`` and ``autoplace evaluate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoplace.cli_options import (
    DEFAULT_TOTAL_STEPS,
    FILE,
    FOLDER,
    env_options,
    hyperparameter_options,
    json_option,
    placement_options,
    total_steps_option,
)
from autoplace.cli_output import json_events, print_json
from autoplace.cli_planning import calibration_of, plan_to_resume, planned, replanner, settled
from autoplace.errors import UsageError

if TYPE_CHECKING:
    from autoplace.measurement import Calibration
    from autoplace.planner.observed import Replan
    from autoplace.planner.plan import Plan
    from autoplace.results import RunResult
    from autoplace.store import RunDir
    from autoplace.train import Callback

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run that is about to begin or to go on.

    Attributes:
        plan: that it follows.
        total_steps: what it is to reach.
        seed: of the run.
        run_dir: its folder, ``None`` for a new one.
        resume: whether it goes on.
        checkpoint_every: as given.
        calibration: that the plan was made from, where it is at hand.
        replan: plans again, ``None`` where that is not wanted.
        worker_deadline_s: as given.
        restart_workers: as given.
    """

    plan: Plan
    total_steps: int
    seed: int
    run_dir: Path | None
    resume: bool
    checkpoint_every: int | None
    calibration: Calibration | None
    replan: Replan | None
    worker_deadline_s: float | None
    restart_workers: bool

    def open_folder(self) -> RunDir:
        from autoplace import store

        if self.resume:
            assert self.run_dir is not None
            return store.resume_run_dir(self.run_dir)
        return store.create_run_dir(self.run_dir, env_id=self.plan.workload.env.id, seed=self.seed)

    def start(self, watch: Callback) -> RunResult:
        from autoplace.train import train as run_training

        with self.open_folder() as folder:
            return run_training(
                self.plan,
                total_steps=self.total_steps,
                seed=self.seed,
                run_dir=folder,
                resume=self.resume,
                checkpoint_every=self.checkpoint_every,
                worker_deadline_s=self.worker_deadline_s,
                restart_workers=self.restart_workers,
                callbacks=(watch,),
                calibration=self.calibration,
                replan=self.replan,
            )


@click.command()
@env_options
@placement_options
@hyperparameter_options
@total_steps_option("Env steps of the whole run, those before a resume included")
@click.option("--seed", type=click.IntRange(min=0), help="Same seed, same run (default 0).")
@click.option("--run-dir", type=FOLDER, help="Where the run is kept; a new folder if not given.")
@click.option("--resume", is_flag=True, help="Go on with the run in --run-dir.")
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep a checkpoint every N env steps, beside the latest and the best.",
)
@click.option(
    "--restart-workers",
    is_flag=True,
    help="Start a process that steps environments anew when it died, hangs or leaks.",
)
@click.option(
    "--worker-deadline",
    "worker_deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="When a silent process of the run counts as hung (default: 120 in a vector step, "
    "600 in an update).",
)
@click.option("--plan", "plan_file", type=FILE, help="Run this plan (from plan --json).")
@click.option("--no-race", is_flag=True, help="Trust the prediction where it is a tie.")
@click.option(
    "--replan",
    is_flag=True,
    help="Plan again, and go on under the new plan, where stages are off their predictions and "
    "that pays.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and what would be done, and stop.")
@json_option
def train(
    env: str,
    env_kwargs: str | None,
    total_steps: int | None,
    seed: int | None,
    run_dir: Path | None,
    resume: bool,
    checkpoint_every: int | None,
    restart_workers: bool,
    worker_deadline_s: float | None,
    plan_file: Path | None,
    no_race: bool,
    replan: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Train PPO on ENV where it is fastest here."""
    from autoplace.cli_live import training_view
    from autoplace.close_calls import pays
    from autoplace.planner.explain import explain_plan

    settings = _settings(run_dir, resume)
    total_steps = total_steps or int(settings.get("total_steps", DEFAULT_TOTAL_STEPS))
    resumed = run_dir if resume else None
    chosen = _plan_to_run(env, env_kwargs, total_steps, plan_file, resumed, options)
    if not (no_race or resume or plan_file):
        chosen = settled(chosen, lambda: not dry_run and pays(chosen, total_steps))
    calibration = calibration_of(chosen, options)
    run = _Run(
        plan=chosen,
        total_steps=total_steps,
        seed=seed if seed is not None else settings.get("seed", 0),
        run_dir=run_dir,
        resume=resume,
        checkpoint_every=checkpoint_every,
        calibration=calibration,
        replan=replanner(calibration, options) if replan else None,
        worker_deadline_s=worker_deadline_s,
        restart_workers=restart_workers,
    )
    if dry_run:
        _show_what_would_be_done(run, as_json)
        return
    if as_json:
        result = run.start(json_events())
    else:
        click.echo(explain_plan(chosen, brief=True))
        with training_view() as watch:
            result = run.start(watch)
        click.echo(_outcome(result))
    if result.interrupted:
        raise SystemExit(INTERRUPTED)


def _settings(run_dir: Path | None, resume: bool) -> dict[str, Any]:
    """The settings of a run to go on with; none of a new one."""
    from autoplace import store

    if not resume:
        return {}
    if run_dir is None:
        raise UsageError("--resume goes on with the run in a folder: name it by --run-dir")
    return store.read_run_config(run_dir)


def _plan_to_run(
    env: str,
    env_kwargs: str | None,
    total_steps: int,
    plan_file: Path | None,
    resumed: Path | None,
    options: Mapping[str, Any],
) -> Plan:
    """The plan in a file, that of a run to go on with, or a new one."""
    from autoplace import store
    from autoplace.planner.plan import Plan

    if plan_file is not None:
        chosen = Plan.read(store.read_plan(plan_file), str(plan_file))
        if chosen.workload.env.id != env:
            raise UsageError(
                f"{plan_file} is for {chosen.workload.env.id}, got {env}: name the same environment"
            )
        return chosen
    if resumed is not None:
        saved = Plan.read(store.read_run_plan(resumed), str(resumed))
        if _is_default("max_policy_lag"):
            options = {**options, "max_policy_lag": None}
        return plan_to_resume(
            saved, env, env_kwargs, options, lambda: total_steps - _steps_done(resumed)
        )
    return planned(env, env_kwargs, options, total_steps).plan


def _steps_done(run_dir: Path) -> int:
    from autoplace.train.checkpoint import load_checkpoint

    return load_checkpoint(run_dir).progress.env_steps


def _is_default(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is click.core.ParameterSource.DEFAULT


def _show_what_would_be_done(run: _Run, as_json: bool) -> None:
    from autoplace import report, store
    from autoplace.planner.explain import explain_plan
    from autoplace.results import Forecast
    from autoplace.train.checkpoint import load_checkpoint
    from autoplace.train.loop import count_iterations

    done = 0
    if run.resume:
        assert run.run_dir is not None
        done = load_checkpoint(run.run_dir).progress.iteration
    hyper = run.plan.workload.hyperparameters
    forecast = Forecast(
        run_dir=str(run.run_dir or f"a new folder in {store.runs_dir()}"),
        seed=run.seed,
        total_steps=run.total_steps,
        first_iteration=done,
        num_iterations=count_iterations(hyper, run.total_steps),
        iteration_rows=hyper.rollout_rows,
        iteration_s=run.plan.chosen.iteration_s,
    )
    if as_json:
        print_json({**run.plan.to_json(), "dry_run": forecast.to_json()})
        return
    click.echo(explain_plan(run.plan))
    click.echo("\n" + report.describe_forecast(forecast))


def _outcome(result: RunResult) -> str:
    """What came of a run: prediction beside measurement, and where it is kept."""
    from autoplace import report
    from autoplace.results import compare_stages

    chosen = result.plan
    assert chosen is not None
    state = "interrupted" if result.interrupted else "done"
    lines = [
        f"{state}: {result.env_steps:,} env steps, mean return "
        f"{report.describe_return(result.mean_return)}, saved in {result.run_dir}"
    ]
    if result.worker_restarts:
        lines.append(report.describe_restarts(result.worker_restarts))
    if result.max_policy_lag:
        lines.append(report.describe_lag(result.policy_lag, result.max_policy_lag))
    if result.iterations > 1:
        lines += [
            "",
            report.describe_stages(compare_stages(chosen, result)),
            "",
            report.describe_throughput(
                chosen.chosen.env_steps_per_s,
                chosen.workload.hyperparameters.rollout_rows / result.iteration_s,
            ),
        ]
    lines.append("")
    if result.interrupted:
        env = chosen.workload.env.id
        lines.append(f"autoplace train {env} --run-dir {result.run_dir} --resume")
    lines.append(f"autoplace evaluate {result.run_dir}")
    return "\n".join(lines)


@click.command()
@click.argument("run_dir", type=FOLDER)
@click.option("--episodes", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--stochastic", is_flag=True, help="Sample actions instead of taking the best.")
@click.option(
    "--checkpoint",
    default="latest",
    show_default=True,
    metavar="NAME",
    help="latest, best, or the env steps of one that was kept.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--video",
    "video_dir",
    type=FOLDER,
    metavar="DIR",
    help="Leave a video of the first of every 16 episodes in this folder.",
)
@json_option
def evaluate(
    run_dir: Path,
    episodes: int,
    stochastic: bool,
    checkpoint: str,
    seed: int,
    video_dir: Path | None,
    as_json: bool,
) -> None:
    """Play episodes with the policy of a run, its statistics frozen."""
    from autoplace import report
    from autoplace.train import evaluate as run_evaluation

    result = run_evaluation(
        run_dir,
        episodes=episodes,
        deterministic=not stochastic,
        checkpoint=checkpoint,
        seed=seed,
        video_dir=video_dir,
    )
    if as_json:
        print_json(result.to_json())
        return
    click.echo(report.describe_evaluation(result))
