"""A race on a machine whose time is known: turns measure what a run alone takes."""

from __future__ import annotations

import pytest

from autoplace.race import race
from autoplace.train import train
from tests.train.plans import make_plan

pytestmark = pytest.mark.usefixtures("machine")

ENV = "tests/emulated/env.py:make_cartpole"  # a step costs 5 us of virtual time
SCHEMES = ("cpu", "hybrid", "gpu", "double-buffer")


def test_whoever_takes_turns_is_as_fast_as_alone_and_the_fastest_is_found() -> None:
    plans = {
        scheme: make_plan(ENV, scheme=scheme, device="cpu" if scheme == "cpu" else "emu:0")
        for scheme in SCHEMES
    }
    alone_s = {
        scheme: train(plan, total_steps=10 * 32).iteration_s for scheme, plan in plans.items()
    }
    result = race(
        plans["gpu"],
        [(scheme, plans[scheme].chosen) for scheme in ("gpu", "cpu", "hybrid", "double-buffer")],
        seconds=0.05,
    )
    for entrant in result.entrants:
        assert entrant.iteration_s == pytest.approx(alone_s[entrant.name], rel=0.02), entrant.name
    assert result.best.name == min(alone_s, key=lambda scheme: alone_s[scheme])
    loss = 1 - alone_s[result.best.name] / alone_s["gpu"]
    assert result.regret_fraction == pytest.approx(loss, rel=0.05)
    assert result.noise_fraction < 0.01
