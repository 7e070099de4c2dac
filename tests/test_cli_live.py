"""What a training shows while it runs."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from autoplace.cli_live import LiveView, training_view
from autoplace.report import describe_lag, describe_progress
from autoplace.train import train
from tests.envs.toys import Counter, register
from tests.train.plans import Listener, make_plan


@pytest.fixture(scope="module")
def told() -> Listener:
    """A short run's start and reports."""
    listener = Listener()
    train(make_plan(), total_steps=320, callbacks=[listener])
    return listener


def shown(view: LiveView, width: int, *, encoding: str = "utf-8") -> list[str]:
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    console = Console(file=buffer, width=width, force_terminal=True, color_system=None)
    console.print(view.picture())
    buffer.flush()
    return buffer.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_progress_return_speed_time_and_split_are_shown_in_any_width(
    told: Listener, width: int, encoding: str
) -> None:
    view = LiveView(told.starts[0])
    for report in told.reports[:5]:
        view.update(report)
    lines = shown(view, width, encoding=encoding)
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    report = told.reports[4]
    for word in ("CartPole-v1", "160", "320", f"{report.mean_return:.1f}", "env_step", "update"):
        assert word in text.replace(" ", "")
    if width == 200:
        assert "160 of 320 env steps (50%)" in [line.strip() for line in lines]
        assert re.search(r"[\d,.]+ env steps/s \(0 predicted\)", text)
        assert re.search(r"0:0\d gone, 0:0\d left", text)


def test_the_split_of_each_lane_adds_up_to_the_whole(told: Listener) -> None:
    view = LiveView(told.starts[0])
    for report in told.reports:
        view.update(report)
    lines = shown(view, 200)
    for lane in ("sampler", "learner"):
        (line,) = (line for line in lines if line.startswith(lane))
        assert sum(int(share) for share in re.findall(r"(\d+)%", line)) == pytest.approx(100, abs=2)


def test_the_age_of_the_weights_that_sample_is_shown_where_they_are_not_those_that_learn(
    told: Listener,
) -> None:
    lagged = dataclasses.replace(told.reports[0], policy_lag=1.5, max_policy_lag=2)
    view = LiveView(told.starts[0])
    view.update(told.reports[0])
    assert "policy lag" not in " ".join(shown(view, 80)) + describe_progress(told.reports[0])
    view.update(lagged)
    assert "policy lag 1.50 iterations (at most 2)" in " ".join(shown(view, 80))
    assert ", policy lag 1.50 iterations (at most 2), " in describe_progress(lagged)
    assert describe_lag(1.0, 1) == "policy lag 1.00 iterations"


def test_before_the_first_iteration_and_the_first_episode_there_is_something_to_see(
    told: Listener,
) -> None:
    view = LiveView(told.starts[0])
    assert "warming up" in shown(view, 80)
    endless = Listener()
    env = register("EndlessShown", lambda: Counter(length=10**9))
    train(make_plan(env), total_steps=32, callbacks=[endless])
    view.update(endless.reports[0])
    assert "no episode finished yet (longest running 16 steps)" in " ".join(shown(view, 80))


def test_lines_without_a_terminal_are_one_for_each_tenth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with training_view() as watch:
        train(make_plan(), total_steps=32 * 40, callbacks=[watch])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("128 of 1,280 steps, ")
    assert lines[-1].startswith("1,280 of 1,280 steps, ")
    assert not any("\x1b" in line for line in lines)
