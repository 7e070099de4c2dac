"""The modelled machines of `calibration/`: rebuilt, traced to their figures, and fitted."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from autoplace import store
from autoplace.cli import main
from autoplace.cost_model import fit_cost_model
from autoplace.measure.grid import calibration_tasks
from calibration import modelled
from tests.synthetic import random_tasks

NAMES = tuple(modelled.MACHINES)
T4 = modelled.path_of("t4-2-cores")


def figures() -> dict[str, dict[str, str]]:
    with (modelled.FOLDER / "figures.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_what_the_script_makes_of_the_figures(name: str) -> None:
    stored, made = store.read_calibration(modelled.path_of(name)), modelled.calibration(name)
    remedy = "run python -m calibration.modelled"
    assert list(stored.by_task) == list(made.by_task), remedy
    for task, measurement in made.by_task.items():
        assert stored.by_task[task].median_s == pytest.approx(measurement.median_s, 1e-6), remedy
    assert (stored.machine, stored.sources) == (made.machine, made.sources), remedy


def test_every_modelled_file_comes_from_the_script() -> None:
    files = {path.name for path in modelled.FOLDER.glob("*.json")}
    assert {f for f in files if f.startswith("modelled-")} == {
        modelled.path_of(name).name for name in NAMES
    }
    for file in files:
        is_modelled = store.read_calibration(modelled.FOLDER / file).origin == "modelled"
        assert is_modelled == file.startswith("modelled-")


def test_every_figure_has_a_source_and_is_used() -> None:
    rows = figures()
    assert all(row["source"] and row["device"] and row["value"] for row in rows.values())
    used = {line.partition(":")[0] for name in NAMES for line in modelled.calibration(name).sources}
    assert used == set(rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_modelled_machine_has_the_times_that_calibrate_would_take_there(name: str) -> None:
    found = modelled.calibration(name)
    wanted = [
        task
        for task in calibration_tasks(found.devices, found.machine.usable_cpus)
        if task.op not in ("interpreter", "crowd") and not task.beside
    ]
    on_accelerators = {"obs_to_device", "action_to_host"} if len(found.devices) > 1 else set()
    assert {t.op for t in found.by_task} == {t.op for t in wanted} | on_accelerators
    assert {t for t in wanted if t.op != "policy_step"} <= set(found.by_task)
    assert found.origin == "modelled"
    assert all(card.uuid == "" for card in found.machine.accelerators)


def test_the_cost_model_recovers_a_modelled_machine_at_sizes_left_out() -> None:
    figure = modelled.Figures()
    host, card = modelled.MACHINES["t4-2-cores"](figure)
    rates = modelled._Rates(host, card, modelled.trainer(figure))
    model = fit_cost_model(store.read_calibration(T4))
    rng = np.random.default_rng(0)
    for device in ("cpu", "cuda:0"):
        tasks = [t for t in random_tasks(rng, device, 60, 1) if t.op == "update"]
        found = model.predict(tasks)
        errors = [abs(found[t].seconds / modelled.task_seconds(rates, t) - 1) for t in tasks]
        assert np.median(errors) < 0.05


def test_the_plan_for_a_modelled_machine_says_that_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPLACE_HOME", str(tmp_path))
    command = ["plan", "CartPole-v1", "--calibration", str(T4), "--env-step-time", "1e-5",
               "--scheme", "gpu", "--json"]  # fmt: skip
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert f"{T4} is modelled from" in result.stderr
    assert "nothing was timed on" in result.stderr and "Tesla T4" in result.stderr
    plan = json.loads(result.stdout)
    assert plan["origin"] == "modelled"
    sources = {stage["name"]: stage["source"] for stage in plan["stages"]}
    assert sources["env_step"] == "given"
    assert "measured" not in sources.values()
