"""Settings that are said to go with a scheme."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autoplace.cli import main
from autoplace.planner.scheme_settings import settings_changed, with_scheme_settings
from autoplace.planner.search import make_plan
from tests.planner.test_search import ENV, workload
from tests.synthetic import GPU, Truth, make_calibration


@pytest.fixture(scope="module")
def desktop():
    return make_calibration(Truth(gpu=True), env=ENV)


@pytest.mark.parametrize(
    ("scheme", "device", "steps", "expected"),
    [
        # 8 x 256 = 2,048 rows; under a lag 0.8 x 0.01 and 0.75 x 0.2
        ("double-buffer", "cpu", 256, (2048, 0.008, 0.15)),
        ("double-buffer", GPU, 256, (1024, 0.008, 0.15)),
        ("cpu", "cpu", 256, (2048, 0.01, 0.2)),
        ("hybrid", GPU, 64, (512, 0.01, 0.2)),
        ("cpu", "cpu", 128, (None, 0.01, 0.2)),  # 1,024 rows: none of 2,048
    ],
)
def test_they_follow_from_scheme_and_device(
    desktop, scheme: str, device: str, steps: int, expected: tuple[int | None, float, float]
) -> None:
    given = workload(rollout_steps=steps, entropy_coef=0.01)
    plan = make_plan(desktop, given, scheme=scheme, placement={"device": device})
    found = with_scheme_settings(plan)
    hyper = found.hyperparameters
    rows, entropy, clip = expected
    assert hyper.minibatch_rows == (rows or plan.placement.minibatch_rows)
    assert (hyper.entropy_coef, hyper.clip_range) == pytest.approx((entropy, clip))
    changed = settings_changed(plan, found)
    assert ("clip_range 0.15 instead of 0.2" in changed) == (clip == 0.15)
    assert any(line.startswith("minibatch_rows") for line in changed) == (rows is not None)


def test_a_minibatch_that_was_given_stays(desktop) -> None:
    plan = make_plan(desktop, workload(minibatch_rows=128), scheme="cpu")
    assert with_scheme_settings(plan) == plan.workload
    assert settings_changed(plan, plan.workload) == ()


def test_the_option_lists_what_it_changes_and_nothing_is_changed_unasked() -> None:
    calibration = Path(__file__).parents[2] / "calibration" / "reference-2-cores.json"
    command = ["plan", "CartPole-v1", "--calibration", str(calibration), "--json"]
    command += ["--scheme", "double-buffer", "--rollout-steps", "256"]

    def plan(*more: str) -> dict[str, object]:
        done = CliRunner().invoke(main, [*command, *more], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    lag = "double-buffer samples with a policy one iteration old"
    unasked, asked = plan(), plan("--scheme-settings")
    assert unasked["changes_learning"] == [lag]
    assert unasked["workload"]["hyperparameters"]["clip_range"] == 0.2
    first = unasked["placement"]["minibatch_rows"]
    assert asked["changes_learning"] == [
        lag,
        f"minibatch_rows 2048 instead of {first}",
        "clip_range 0.15 instead of 0.2",
    ]
    assert asked["scheme"] == "double-buffer"
    assert asked["placement"]["minibatch_rows"] == 2048
    assert asked["workload"]["hyperparameters"]["clip_range"] == pytest.approx(0.15)
