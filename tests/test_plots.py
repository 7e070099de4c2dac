"""Pictures: what is drawn is what the plan says, and a file that cannot be drawn to is named."""

from __future__ import annotations

import itertools
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from autoplace.cost_model import fit_cost_model
from autoplace.errors import UsageError
from autoplace.planner.plan import Plan
from autoplace.planner.search import make_plan
from autoplace.plots import (
    _blocks,
    _copies,
    picture_format,
    plot_crossovers,
    plot_machine,
    plot_plan,
)
from tests.planner.test_search import ENV, workload
from tests.synthetic import Truth, make_calibration

pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def plan() -> Plan:
    calibration = make_calibration(Truth(gpu=True, pinned_bytes=2e8), env=ENV)
    return make_plan(calibration, workload(hidden_sizes=(256, 256), minibatch_rows=256))


def test_blocks_of_a_lane_follow_each_other_and_hold_its_busy_time(plan: Plan) -> None:
    for scheme, candidate in plan.best_of_schemes.items():
        for lane in ("sampler", "learner"):
            blocks = _blocks(candidate, lane)
            busy_s = sum(s.total_s for s in candidate.stages if s.lane == lane and s.name != "wait")
            assert sum(b.end_s - b.start_s for b in blocks) == pytest.approx(busy_s), scheme
            for one, following in itertools.pairwise(blocks):
                assert one.end_s <= following.start_s * (1 + 1e-9)
            assert blocks[-1].end_s <= candidate.iteration_s * (1 + 1e-9)
    # Policy and environments alternate, so they share one block; gae and update follow each other.
    cpu = plan.best_of_schemes["cpu"]
    assert [[s.name for s in b.stages] for b in _blocks(cpu, "sampler")] == [
        ["policy_step", "env_step"]
    ]
    assert [[s.name for s in b.stages] for b in _blocks(cpu, "learner")] == [["gae"], ["update"]]


def test_each_chunk_is_copied_when_it_was_sampled_and_the_link_is_free(plan: Plan) -> None:
    hybrid = plan.best_of_schemes["hybrid"]
    (copy,) = (s for s in hybrid.stages if s.lane == "copy" and s.name != "wait")
    copies = _copies(copy)
    assert len(copies) == copy.calls
    assert copies[0].start_s == copy.start_s
    assert sum(c.end_s - c.start_s for c in copies) == pytest.approx(copy.total_s)
    for index, (one, following) in enumerate(itertools.pairwise(copies)):
        assert following.start_s == max(one.end_s, copy.start_s * (index + 2))


def texts(svg: bytes) -> str:
    """Matplotlib leaves each text of an SVG as a comment beside its outlines."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.fromstring(svg, parser)
    return "\n".join(e.text or "" for e in root.iter() if e.tag is ElementTree.Comment)


def test_a_picture_of_a_plan_names_schemes_stages_and_what_they_take(plan: Plan) -> None:
    shown = texts(plot_plan(plan, "svg"))
    for scheme in plan.best_of_schemes:
        assert f"{scheme}: " in shown
    for text in ("sampler", "learner", "copy", "update", "env_step", plan.bottleneck):
        assert text in shown
    assert f"{plan.chosen.env_steps_per_s:,.0f} env steps/s" in shown
    assert plot_plan(plan, "png").startswith(PNG)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_pictures_of_a_calibration_show_every_side_and_crossing(gpu: bool) -> None:
    calibration = make_calibration(Truth(gpu=gpu, handoff_s=2.5e-4))
    model = fit_cost_model(calibration)
    crossings = texts(plot_crossovers(calibration, model, "svg"))
    assert "cpu, 1 thread" in crossings and "cpu, 2 threads" in crossings
    machine = texts(plot_machine(calibration, model, "svg"))
    assert "message to another process and back: 250 µs" in machine
    assert ("cuda:0, copied there and back" in crossings) == gpu
    if gpu:
        # 2 n^3 / 4e10 + 3 us = 10 us, as the accelerator's products of this size cost next to
        # nothing: n = 52
        assert "52 (" in crossings
        assert "to cuda:0, page-locked memory" in machine


def test_a_name_without_a_format_and_a_missing_matplotlib_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert picture_format(Path("a/b.PNG")) == "png"
    for name in ("picture", "picture.docx"):
        with pytest.raises(UsageError, match=r"end the name in \.png"):
            picture_format(Path(name))
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'autoplace\[plots\]'"):
        picture_format(Path("a.png"))
