"""Runs that are alive together and take turns."""

import contextlib

import torch

from autoplace.train import train
from autoplace.train.interrupt import StopRequest
from autoplace.train.loop import open_loop
from tests.train.plans import Listener, make_plan


def test_runs_that_take_turns_compute_what_each_would_alone():
    plans = [make_plan("Pendulum-v1", scheme=scheme) for scheme in ("cpu", "double-buffer")]
    alone = [Listener() for _ in plans]
    for plan, listener in zip(plans, alone, strict=True):
        train(plan, total_steps=160, callbacks=[listener])

    together = [Listener() for _ in plans]
    with contextlib.ExitStack() as stack:
        loops = [
            stack.enter_context(
                open_loop(plan, total_steps=160, callbacks=[listener], stop=StopRequest())
            )
            for plan, listener in zip(plans, together, strict=True)
        ]
        for turn in (2, 3):
            for loop in loops:
                for _ in range(turn):
                    loop.iterate()
                loop.rest()
        for loop in loops:
            assert loop.is_done
            loop.drain()
    for one, other in zip(alone, together, strict=True):
        assert [r.env_steps for r in other.reports] == [32, 64, 96, 128, 160]
        assert torch.equal(one.flat, other.flat)
