"""Half of the environments step while the actions of the other half are computed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autoplace.envs import process
from autoplace.planner.plan import Plan
from autoplace.train import train
from tests.emulated import EmulatedMachine
from tests.emulated.env import make_cartpole
from tests.emulated.spec import AcceleratorSpec, CpuSpec, MachineSpec
from tests.emulated.workers import LaneWorkers
from tests.envs.toys import register
from tests.train.plans import Listener, make_plan

STEPS, NUM_ENVS, NUM_WORKERS = 16, 8, 2


@pytest.fixture(autouse=True)
def workers_are_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "Workers", LaneWorkers)


def plan_in(num_groups: int, *, step_s: float = 1e-5, **where: object) -> Plan:
    env = register("Timed", lambda: make_cartpole(env_step_s=step_s))
    plan = make_plan(env, num_envs=NUM_ENVS, rollout_steps=STEPS, **where)
    placement = dataclasses.replace(
        plan.placement, env_backend="process", num_workers=NUM_WORKERS, num_groups=num_groups
    )
    chosen = dataclasses.replace(plan.chosen, placement=placement)
    return dataclasses.replace(plan, chosen=chosen, candidates=(chosen,))


def trained(plan: Plan) -> Listener:
    listener = Listener()
    train(plan, total_steps=5 * STEPS * NUM_ENVS, callbacks=[listener])
    return listener


@pytest.mark.parametrize(
    ("step_s", "handoff_s", "bound"),
    [(5e-5, 1e-5, "workers"), (1e-7, 1e-6, "policy"), (1e-6, 2e-4, "way round")],
)
def test_two_halves_take_the_longest_of_policy_workers_and_the_way_round(
    step_s: float, handoff_s: float, bound: str
) -> None:
    """Each of 2 workers has 4 of 8 environments, 2 in each half.

    A vector step keeps a worker busy for E = 4 steps of an environment, and a half for E / 2. With
    p for a policy step and a hand-over (h) each way:

    - one group: T times p + h + E + h
    - workers:   the first order arrives after p + h, then they step without a pause for T E, and
      the last answer takes h
    - policy:    2 T policy steps without a pause, then h + E / 2 + h for the last half
    - way round: T times p + h + E / 2 + h, and the second half began p after the first
    """
    spec = MachineSpec(cpu=CpuSpec(cores=8, handoff_s=handoff_s))
    sampled_s, policy_s = {}, {}
    for num_groups in (1, 2):
        with EmulatedMachine(spec):
            stages = trained(plan_in(num_groups, step_s=step_s)).reports[2].stage_s
        policy_s[num_groups] = stages["policy_step", "sampler"] / (STEPS * num_groups)
        sampled_s[num_groups] = stages["policy_step", "sampler"] + stages["env_step", "sampler"]
    worker_s = NUM_ENVS // NUM_WORKERS * step_s
    p, h = policy_s[1], handoff_s
    assert sampled_s[1] == pytest.approx(STEPS * (p + h + worker_s + h), rel=1e-6)
    p = policy_s[2]
    expected_s = {
        "workers": p + h + STEPS * worker_s + h,
        "policy": 2 * STEPS * p + h + worker_s / 2 + h,
        "way round": STEPS * (p + h + worker_s / 2 + h) + p,
    }
    assert sampled_s[2] == pytest.approx(max(expected_s.values()), rel=1e-6)
    assert max(expected_s, key=expected_s.__getitem__) == bound
    if bound == "workers":
        assert sampled_s[2] < 0.9 * sampled_s[1]


@pytest.mark.parametrize("scheme", ["cpu", "hybrid", "gpu", "double-buffer"])
def test_every_scheme_learns_the_same_in_two_halves(scheme: str) -> None:
    spec = MachineSpec(accelerators=(AcceleratorSpec(name="one", memory_bytes=64e6),))
    where = {} if scheme == "cpu" else {"scheme": scheme, "device": "emu:0"}
    learned, returns = [], []
    for num_groups in (1, 2):
        with EmulatedMachine(spec):
            listener = trained(plan_in(num_groups, **where))
            learned.append(listener.flat)
        returns.append([report.mean_return for report in listener.reports])
    torch.testing.assert_close(*learned, atol=1e-5, rtol=1e-5)
    assert returns[0] == returns[1] and returns[0][-1] is not None
