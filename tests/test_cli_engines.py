"""Engines as a user names them: timed then, dropped with a line where they fail or do not pay."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from autoplace.engines import EAGER
from autoplace.errors import EngineError
from autoplace.measure import named_engine
from autoplace.measurement import Measurement, Task
from tests.synthetic import Truth
from tests.test_cli import calibrated, home, run, run_json

__all__ = ["calibrated", "home"]  # fixtures
PLAN = ("plan", "CartPole-v1", "--engine", "compile", "--max-policy-lag", "0")
ONCE_S = 100.0


def halved(tasks: Sequence[Task]) -> list[Measurement]:
    """Half of what eager steps take, after ``ONCE_S``."""
    eager = [dataclasses.replace(task, engine=EAGER) for task in tasks]
    found = [
        Measurement(task=task, times_s=(Truth().seconds(same) / 2,) * 5)
        for task, same in zip(tasks, eager, strict=True)
    ]
    ready = [dataclasses.replace(task, op="engine_setup") for task in tasks if task.op == "update"]
    return found + [Measurement(task=task, times_s=(ONCE_S,)) for task in ready]


def test_an_engine_is_timed_with_the_network_of_an_environment(home: Path) -> None:
    result = run("calibrate", "--engine", "compile")
    assert result.exit_code == 2
    assert "is timed with the network of an environment: name one by --env" in result.output
    assert not home.exists()


def test_an_engine_that_fails_is_dropped_in_one_line(
    calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tasks: Sequence[Task]) -> list[Measurement]:
        raise EngineError("engine compile does not work on cpu (RuntimeError: no compiler)")

    monkeypatch.setattr(named_engine, "measure_engine", fail)
    result = run(*PLAN)
    assert result.exit_code == 0
    lines = [line for line in result.stderr.splitlines() if "no compiler" in line]
    assert lines == [
        "autoplace: engine compile does not work on cpu (RuntimeError: no compiler): it is dropped"
    ]
    assert "eager engine" in result.stdout


def test_an_engine_is_timed_once_and_runs_where_the_run_is_long_enough(
    calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def measure(tasks: Sequence[Task]) -> list[Measurement]:
        timed.append(tasks)
        return halved(tasks)

    monkeypatch.setattr(named_engine, "measure_engine", measure)
    long = run_json(*PLAN, "--total-steps", "1000000000")
    assert (long["placement"]["engine"], len(timed)) == ("compile", 1)
    assert long["candidates"][0]["one_off_s"] == ONCE_S
    short = run(*PLAN, "--total-steps", "1000")
    assert "eager engine" in short.stdout and len(timed) == 1
    (line,) = [line for line in short.stderr.splitlines() if "is dropped" in line]
    assert "the eager engine runs instead: it takes 100 s once and saves" in line
    shown = run(*PLAN, "--total-steps", "50000000").stdout
    assert "Making cpu with the compile engine ready takes 100 s: a run of 50,000,000" in shown
