"""Every scheme computes what `cpu` computes, wherever it puts the work."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from autoplace.planner.plan import Plan
from autoplace.train import StopRequested, evaluate, train
from autoplace.train.callbacks import Callback, IterationReport
from tests.emulated.runtime import runtime
from tests.envs.catch import Catch
from tests.envs.toys import Counter, Stateless, register
from tests.train.lagged import simulate
from tests.train.plans import Listener, make_plan

pytestmark = pytest.mark.usefixtures("machine")

D = "emu:0"
ON_DEVICE = [
    {"scheme": "hybrid", "device": D, "interval": 5},  # does not divide the rollout of 16
    {"scheme": "hybrid", "device": D, "interval": 16},
    {"scheme": "gpu", "device": D},
]


def trained(plan: Plan, **options: object) -> Listener:
    listener = Listener()
    train(plan, total_steps=160, callbacks=[listener], **options)
    return listener


@pytest.mark.parametrize("where", ON_DEVICE, ids=lambda w: f"{w['scheme']}-{w.get('interval')}")
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_parameters_and_statistics_after_five_iterations_agree_with_cpu(
    env: str, where: dict[str, object]
) -> None:
    hyper = {"normalize_rewards": True, "entropy_coef": 0.01}
    on_cpu = trained(make_plan(env, **hyper))
    on_device = trained(make_plan(env, **hyper, **where))
    torch.testing.assert_close(on_device.flat, on_cpu.flat, atol=1e-5, rtol=1e-5)
    assert on_device.reports[-1].mean_return == on_cpu.reports[-1].mean_return


@pytest.mark.parametrize("where", ON_DEVICE, ids=lambda w: f"{w['scheme']}-{w.get('interval')}")
def test_a_game_on_images_is_learned_from_as_on_the_cpu(where: dict[str, object]) -> None:
    env = register("CatchOnDevice", Catch)
    on_cpu, on_device = trained(make_plan(env)), trained(make_plan(env, **where))
    torch.testing.assert_close(on_device.flat, on_cpu.flat, atol=1e-5, rtol=1e-5)
    assert on_device.reports[-1].mean_return == on_cpu.reports[-1].mean_return is not None
    moved = [s for (name, _), s in on_device.reports[-1].stage_s.items() if name.endswith("device")]
    assert moved and all(seconds > 0 for seconds in moved)


@pytest.mark.parametrize("where", ON_DEVICE, ids=lambda w: f"{w['scheme']}-{w.get('interval')}")
def test_steps_that_only_reset_are_left_out_on_every_device(where: dict[str, object]) -> None:
    def by_vector(plan: Plan) -> Plan:  # CartPole's own vector environment: a step for each reset
        placement = dataclasses.replace(plan.placement, env_backend="vector")
        chosen = dataclasses.replace(plan.chosen, placement=placement)
        return dataclasses.replace(plan, chosen=chosen, candidates=(chosen,))

    on_cpu, on_device = trained(by_vector(make_plan())), trained(by_vector(make_plan(**where)))
    torch.testing.assert_close(on_device.flat, on_cpu.flat, atol=1e-5, rtol=1e-5)
    assert on_device.reports[-1].env_steps == on_cpu.reports[-1].env_steps < 160


@pytest.mark.parametrize("where", ON_DEVICE, ids=lambda w: f"{w['scheme']}-{w.get('interval')}")
def test_truncated_episodes_are_bootstrapped_the_same_on_every_scheme(
    where: dict[str, object],
) -> None:
    env = register("Truncates", lambda: Counter(length=3, truncates=True))
    on_cpu, on_device = trained(make_plan(env)), trained(make_plan(env, **where))
    torch.testing.assert_close(on_device.flat, on_cpu.flat, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("where", "sampler", "learner"),
    [
        (
            ON_DEVICE[0],
            {"policy_step", "env_step", "rollout_to_device", "wait"},
            {"gae", "update", "weights_to_host", "wait"},
        ),
        (
            ON_DEVICE[2],
            {
                "obs_to_device",
                "policy_step",
                "action_to_host",
                "env_step",
                "rollout_to_device",
                "wait",
            },
            {"gae", "update", "wait"},
        ),
    ],
    ids=["hybrid", "gpu"],
)
def test_stages_have_the_names_of_the_plan_and_each_lane_sums_to_the_iteration(
    where: dict[str, object], sampler: set[str], learner: set[str]
) -> None:
    report = trained(make_plan(**where)).reports[-1]
    for lane, names in (("sampler", sampler), ("learner", learner)):
        stages = {name: s for (name, of), s in report.stage_s.items() if of == lane}
        assert set(stages) == names
        assert sum(stages.values()) == pytest.approx(report.iteration_s)
        free = {"wait", "env_step"}  # what these environments do is not charged for
        assert all(seconds > 0 for name, seconds in stages.items() if name not in free)


LAGGED = [{"scheme": "double-buffer"}, {"scheme": "double-buffer", "device": D}]
ASYNC = {"scheme": "async", "workers": 2, "lag": 1, "device": D}


@pytest.mark.parametrize("where", LAGGED, ids=["cpu", "device"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_overlapping_computes_the_lagged_algorithm(env: str, where: dict[str, object]) -> None:
    plan = make_plan(env, normalize_rewards=True, entropy_coef=0.01, **where)
    overlapped = trained(plan)
    reference = simulate(
        make_plan(env, normalize_rewards=True, entropy_coef=0.01), num_iterations=5
    )
    torch.testing.assert_close(overlapped.flat, reference, atol=1e-5, rtol=1e-5)
    assert torch.equal(trained(plan).flat, overlapped.flat)


def test_overlapping_bootstraps_truncated_episodes_that_cross_to_the_device() -> None:
    env = register("TruncatesToo", lambda: Counter(length=3, truncates=True))
    overlapped = trained(make_plan(env, **LAGGED[1]))
    reference = simulate(make_plan(env), num_iterations=5)
    torch.testing.assert_close(overlapped.flat, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", LAGGED, ids=["cpu", "device"])
def test_overlapping_takes_as_long_as_the_slower_side_and_the_hand_over(
    where: dict[str, object],
) -> None:
    env = "tests/emulated/env.py:make_cartpole"  # a step costs 5 us of virtual time
    report = trained(make_plan(env, **where)).reports[2]
    lanes = {
        lane: {name: s for (name, of), s in report.stage_s.items() if of == lane}
        for lane in ("sampler", "learner")
    }
    copies = {"rollout_to_device", "weights_to_host"} if "device" in where else set()
    assert set(lanes["sampler"]) == {"policy_step", "env_step", "handoff", "wait"}
    assert set(lanes["learner"]) == {"gae", "update", "handoff", "wait"} | copies
    for stages in lanes.values():
        assert sum(stages.values()) == pytest.approx(report.iteration_s)
    busy = {lane: sum(stages.values()) - stages["wait"] for lane, stages in lanes.items()}
    # The learner is the slower one: it waits for the hand-over only.
    assert busy["learner"] > busy["sampler"]
    assert lanes["learner"]["wait"] < 0.05 * report.iteration_s


class StopAt(Callback):
    def on_iteration(self, report: IterationReport) -> None:
        if report.iteration == 2:
            raise StopRequested


WHERE = [{"scheme": "cpu"}, *ON_DEVICE[1:], LAGGED[1], ASYNC]


@pytest.mark.parametrize("second", WHERE, ids=lambda w: w["scheme"])
@pytest.mark.parametrize("first", WHERE, ids=lambda w: w["scheme"])
def test_a_run_that_resumes_under_another_scheme_learns_as_if_it_had_not_stopped(
    tmp_path: Path, first: dict[str, object], second: dict[str, object]
) -> None:
    """Where no reset loses anything."""
    env = register("StatelessSchemes", Stateless)
    hyper = {"normalize_rewards": True, "entropy_coef": 0.01}
    train(make_plan(env, **hyper, **first), total_steps=160, run_dir=tmp_path, callbacks=[StopAt()])
    plan = make_plan(env, **hyper, **second)
    listener = Listener()
    result = train(plan, total_steps=160, run_dir=tmp_path, resume=True, callbacks=[listener])
    assert result.env_steps == 160 and result.call_env_steps == 96
    assert evaluate(tmp_path, episodes=2).env_steps == 160
    # The first rollout of a run has no lag, nor has that of a call which finds no older weights.
    lagged = [w in (LAGGED[1], ASYNC) for w in (first, second)]
    lags = [0, lagged[0], all(lagged), lagged[1], lagged[1]]
    versions = [(k - lag,) for k, lag in enumerate(lags)]
    expected = simulate(plan, num_iterations=5, versions=versions)
    torch.testing.assert_close(listener.flat, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", WHERE[1:], ids=lambda w: w["scheme"])
def test_a_run_on_the_second_accelerator_leaves_the_first_alone(where: dict[str, object]) -> None:
    # Symptom: cuda:1 is asked for, and half of the tensors are on cuda:0.
    trained(make_plan(**{**where, "device": "emu:1"}))
    first, second = runtime().memories
    assert first.peak_bytes == 0 < second.peak_bytes
