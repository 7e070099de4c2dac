"""Engines in a run: tried in its first steps, dropped with a reason, said and recorded."""

import json
import logging

import pytest
import torch

from autoplace.engines import COMPILE, GRAPH, NUMPY
from autoplace.ppo import steps
from autoplace.train import train
from tests.ppo.test_engines import Slow, Wrong, needs_compiler
from tests.train.plans import Listener, make_plan


def run(plan, **options):
    listener = Listener()
    result = train(plan, total_steps=96, callbacks=[listener], **options)
    return result, listener.flat


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, logger="autoplace")
    return caplog


@pytest.mark.parametrize(("engine", "why"), [(Wrong, "differs"), (Slow, "takes")])
def test_a_run_drops_an_engine_that_is_wrong_or_slow_says_so_and_records_it(
    engine, why, monkeypatch, said, tmp_path
):
    monkeypatch.setitem(steps._UPDATERS, COMPILE, engine)
    monkeypatch.setitem(steps._POLICY_STEPS, COMPILE, steps.PolicyStep)
    result, flat = run(make_plan(engine=COMPILE), run_dir=tmp_path)
    eager = run(make_plan())[1]
    assert torch.equal(flat, eager)
    (line,) = [r.getMessage() for r in said.records if "gradient step" in r.getMessage()]
    assert line.startswith("engine compile is dropped, each gradient step is eager: ")
    (verdict,) = [v for v in result.engines if v.step == "gradient step"]
    assert verdict.dropped_because in line and why in verdict.dropped_because
    kept = json.loads((tmp_path / "result.json").read_text())["engines"]
    assert verdict.to_json() in kept


@pytest.mark.parametrize(("scheme", "lag", "workers"), [("async", 1, 2)])
def test_what_other_processes_have_tried_is_heard_once(scheme, lag, workers, said):
    plan = make_plan(scheme=scheme, lag=lag, workers=workers, engine=NUMPY)
    result, _ = run(plan)
    kinds = [(v.engine, v.step, v.dropped_because) for v in result.engines]
    assert sorted(kinds) == [(NUMPY, "gradient step", None), (NUMPY, "policy step", None)]
    assert not said.records


def test_the_graph_engine_on_the_cpu_is_numpy():
    result, _ = run(make_plan(engine=GRAPH))
    assert {v.engine for v in result.engines} == {NUMPY}


@needs_compiler
def test_without_a_compiler_a_compiled_run_goes_on_eager(monkeypatch, said, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.cxx": ("/no/compiler/here",)}):
        result, flat = run(make_plan(engine=COMPILE, hidden_sizes=(9,)))
    assert torch.equal(flat, run(make_plan(hidden_sizes=(9,)))[1])
    reasons = [v.dropped_because for v in result.engines]
    assert len(reasons) == 2 and all("/no/compiler/here" in reason for reason in reasons), reasons
    assert len([r for r in said.records if "is dropped" in r.getMessage()]) == 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["cpu", "double-buffer"])
def test_a_compiled_run_learns_what_an_eager_one_does(scheme):
    plans = [make_plan("Pendulum-v1", scheme=scheme, engine=e) for e in (COMPILE, "eager")]
    (result, flat), (_, eager) = map(run, plans)
    torch.testing.assert_close(flat, eager, rtol=0, atol=1e-5)
    assert {(v.engine, v.step) for v in result.engines} == {
        (COMPILE, "gradient step"),
        (COMPILE, "policy step"),
    }
    assert all(v.one_off_s > 0 for v in result.engines if v.dropped_because is None)
