"""``autoplace compare``: candidates run here and now, beside their predictions."""

from __future__ import annotations

from typing import Any

import click

from autoplace.cli_options import (
    env_options,
    hyperparameter_options,
    json_option,
    placement_options,
)
from autoplace.cli_output import note, print_json, race_progress
from autoplace.cli_planning import planned


@click.command()
@env_options
@placement_options
@hyperparameter_options
@click.option(
    "--schemes",
    metavar="NAME,...",
    default="",
    help="Run the best of these schemes; of every scheme if not given. The choice always runs.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    help="Of measuring each candidate; slow iterations take longer.",
)
@json_option
def compare(
    env: str,
    env_kwargs: str | None,
    schemes: str,
    seconds: float,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Run candidates in turns, and show predicted | measured of each and what the choice loses."""
    import torch

    from autoplace import report
    from autoplace.race import best_of_schemes, fixed_rules, race, without_repeats

    made = planned(env, env_kwargs, options, total_steps=None)
    names = tuple(name.strip() for name in schemes.split(",") if name.strip())
    candidates = without_repeats(
        best_of_schemes(made.plan, names)
        + fixed_rules(made.plan, made.calibration, made.model, torch.get_num_threads())
    )
    note(f"running {', '.join(name for name, _ in candidates)} in turns")
    with race_progress() as progress:
        result = race(made.plan, candidates, seconds=seconds, progress=progress)
    if as_json:
        print_json(result.to_json())
        return
    click.echo(report.describe_comparison(result))
