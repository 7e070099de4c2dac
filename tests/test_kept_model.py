"""A fitted cost model that is kept beside the calibration, and when it holds no more."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autoplace import kept_model, store
from autoplace.cost_model import CostModel, fit_cost_model
from autoplace.errors import RunError
from autoplace.kept_model import cost_model_of
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.planner.search import make_plan
from tests.planner.test_search import ENV, workload
from tests.synthetic import Truth, env_measurements, make_calibration
from tests.test_imports import FILES, imports_of, name_of


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return make_calibration(Truth(), env=ENV, env_step_s=1e-4)


@pytest.fixture(scope="module")
def model(calibration: Calibration) -> CostModel:
    return fit_cost_model(calibration)


@pytest.fixture
def kept(calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the model of a stored calibration, not yet written."""
    monkeypatch.setenv("AUTOPLACE_HOME", str(tmp_path))
    return store.save_calibration(calibration).with_suffix(".model.json")


@pytest.fixture
def fits(
    calibration: Calibration, model: CostModel, monkeypatch: pytest.MonkeyPatch
) -> list[Calibration]:
    """What was asked to be fitted, in order; what is known is not fitted again."""
    known, fitted = calibration, list[Calibration]()

    def fit(calibration: Calibration) -> CostModel:
        fitted.append(calibration)
        return model if calibration == known else fit_cost_model(calibration)

    monkeypatch.setattr(kept_model, "fit_cost_model", fit)
    return fitted


def plan_text(calibration: Calibration, model: CostModel) -> str:
    return json.dumps(make_plan(calibration, workload(), model=model).to_json())


def test_a_plan_is_the_same_to_the_byte_with_a_fitted_model_and_with_the_kept_one(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = make_calibration(Truth(gpu=True), env=ENV, env_step_s=1e-4)
    store.save_calibration(calibration)
    stored = store.read_calibration(store.calibration_path(calibration.machine))
    fitted = plan_text(stored, cost_model_of(stored))
    monkeypatch.delattr(kept_model, "fit_cost_model")
    assert plan_text(stored, cost_model_of(stored)) == fitted


def altered(text: str) -> str:
    data = json.loads(text)
    data["parameters"]["corrections"][0]["stretch"] *= 2
    return json.dumps(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: text.replace('"key": "', '"key": "0'),
        lambda text: json.dumps({"key": json.loads(text)["key"]}),
        altered,
    ],
    ids=["empty", "cut off", "another object", "another key", "only the key", "altered"],
)
def test_a_damaged_or_foreign_file_is_fitted_again_and_replaced(
    calibration: Calibration,
    kept: Path,
    fits: list[Calibration],
    damage: Callable[[str], str],
) -> None:
    cost_model_of(calibration)
    whole = kept.read_text()
    kept.write_text(damage(whole))
    assert kept.read_text() != whole
    cost_model_of(calibration)
    assert len(fits) == 2
    assert kept.read_text() == whole
    cost_model_of(calibration)
    assert len(fits) == 2


OTHER_ENV = dataclasses.replace(ENV, id="Other-v0")


@pytest.mark.parametrize(
    "more",
    [
        env_measurements(OTHER_ENV, 1e-5),
        [Measurement(task=Task(op="policy_step", engine="compile", rows=1), times_s=(1e-5,))],
        [Measurement(task=Task(op="dispatch"), times_s=(3.1e-6,))],
    ],
    ids=["another environment", "another engine", "another time"],
)
def test_other_timings_are_fitted_anew(
    calibration: Calibration, kept: Path, fits: list[Calibration], more: list[Measurement]
) -> None:
    cost_model_of(calibration)
    if more[0].task.engine == "compile":  # needs a network
        like = next(m.task for m in calibration.measurements if m.task.op == "policy_step")
        more = [dataclasses.replace(more[0], task=dataclasses.replace(like, engine="compile"))]
    changed = calibration.with_measurements(more)
    cost_model_of(changed)
    assert fits == [calibration, changed]


def test_other_code_and_other_libraries_fit_anew(
    calibration: Calibration,
    kept: Path,
    fits: list[Calibration],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost_model_of(calibration)
    with monkeypatch.context() as other:
        other.setattr(kept_model, "_CODE", kept_model._CODE[1:])
        cost_model_of(calibration)
    with monkeypatch.context() as other:
        other.setattr(kept_model.metadata, "version", lambda name: "0")
        cost_model_of(calibration)
    assert len(fits) == 3


def test_all_code_that_fits_counts() -> None:
    graph = {name_of(path).removesuffix(".__init__"): imports_of(path) for path in FILES}
    # What describes machines and says what is wrong has no part in what is fitted.
    without = {
        "autoplace.machine",
        "autoplace.device",
        "autoplace.device_names",
        "autoplace.errors",
    }
    reached, pending = set(), {"autoplace.fitting"}
    while pending:
        module = pending.pop()
        reached.add(module)
        pending |= graph[module] - reached - without
    assert {module.removeprefix("autoplace.") for module in reached} == set(kept_model._CODE)


def test_a_file_that_cannot_be_written_is_done_without(
    calibration: Calibration,
    kept: Path,
    fits: list[Calibration],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: Path, data: object) -> None:
        raise RunError(f"cannot write {path}")

    monkeypatch.setattr(store, "write_json_atomic", refuse)
    for _ in range(2):
        cost_model_of(calibration)
        assert not kept.exists()
    assert len(fits) == 2


def test_several_at_once_find_the_same(
    calibration: Calibration, kept: Path, fits: list[Calibration]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(cost_model_of, [calibration] * 40))
    assert all(model.parameters == found[0].parameters for model in found)
    assert 1 <= len(fits) <= 8
    assert {path.name for path in kept.parent.iterdir()} == {
        kept.name,
        kept.name.replace(".model.json", ".json"),
        kept.name.replace(".model.json", ".lock"),
    }


def test_only_the_model_of_what_is_stored_and_was_measured_is_kept(
    calibration: Calibration,
    kept: Path,
    fits: list[Calibration],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = calibration.with_measurements(
        dataclasses.replace(m, origin="given") for m in env_measurements(OTHER_ENV, 1e-5)
    )
    cost_model_of(given)
    assert not kept.exists()
    monkeypatch.setenv("AUTOPLACE_HOME", str(tmp_path / "of another machine"))
    cost_model_of(calibration)
    assert not list((tmp_path / "of another machine").rglob("*.json"))


def test_one_in_a_read_only_home_is_used_though_saving_goes_elsewhere(
    calibration: Calibration,
    kept: Path,
    fits: list[Calibration],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost_model_of(calibration)
    monkeypatch.setattr(store, "data_dir", lambda: tmp_path / "elsewhere")
    cost_model_of(calibration)
    assert len(fits) == 1
    changed = calibration.with_measurements(env_measurements(OTHER_ENV, 1e-5))
    for _ in range(2):
        cost_model_of(changed)
    assert fits == [calibration, changed]
    assert (tmp_path / "elsewhere" / "calibrations" / kept.name).exists()
