"""Samplers at their own pace: the lag they run up, its bound, and what is learned from it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autoplace.errors import UsageError
from autoplace.planner.plan import Plan
from autoplace.train import StopRequested, train
from autoplace.train.callbacks import Callback, IterationReport
from autoplace.train.interrupt import StopRequest
from autoplace.train.local_learner import LocalLearner
from autoplace.train.loop import open_loop
from autoplace.train.remote_learner import RemoteLearner
from autoplace.workload import EnvSpec
from tests.envs.toys import Counter, register
from tests.train.lagged import simulate
from tests.train.plans import Listener, make_plan

pytestmark = pytest.mark.usefixtures("machine")

D = "emu:0"
Versions = list[tuple[int, ...]]


def timed(step_s: float, spread_s: float = 0.0) -> EnvSpec:
    """CartPole whose step takes a declared virtual time."""
    return EnvSpec.make(
        "tests/emulated/env.py:make_cartpole",
        {"env_step_s": step_s, "env_step_spread_s": spread_s},
    )


def planned(
    env: str | EnvSpec = "CartPole-v1", *, workers: int = 2, lag: int = 1, **options: object
) -> Plan:
    return make_plan(env, scheme="async", workers=workers, lag=lag, **{"num_envs": 4, **options})


def trained(plan: Plan, iterations: int = 8) -> tuple[Listener, Versions]:
    """What a run reports, and the versions that sampled each part of its rollouts."""
    versions: Versions = []
    learner = LocalLearner if plan.placement.learn_device == "cpu" else RemoteLearner
    hand_over = learner.hand_over

    def spy(self: object, *args: object, **options: object) -> None:
        versions.append(options["versions"])
        hand_over(self, *args, **options)

    listener = Listener()
    rows = plan.workload.hyperparameters.rollout_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "hand_over", spy)
        train(plan, total_steps=iterations * rows, callbacks=[listener])
    return listener, versions


def lags(versions: Versions) -> list[tuple[int, ...]]:
    return [tuple(k - version for version in acted) for k, acted in enumerate(versions)]


@pytest.mark.parametrize(
    ("env", "workers", "where"),
    [
        ("CartPole-v1", 1, {}),
        ("CartPole-v1", 2, {"device": D}),
        ("Pendulum-v1", 1, {"device": D}),
        ("Pendulum-v1", 2, {}),
    ],
)
def test_a_bound_of_one_computes_what_double_buffer_does(
    env: str, workers: int, where: dict[str, object]
) -> None:
    hyper = {"normalize_rewards": True, "entropy_coef": 0.01, **where}
    listener, versions = trained(planned(env, workers=workers, **hyper), 5)
    assert lags(versions) == [(0,) * workers, *[(1,) * workers] * 4]
    reference = Listener()
    plan = make_plan(env, scheme="double-buffer", num_envs=4, **hyper)
    train(plan, total_steps=5 * 64, callbacks=[reference])
    torch.testing.assert_close(listener.flat, reference.flat, atol=1e-5, rtol=1e-5)
    assert listener.reports[-1].mean_return == reference.reports[-1].mean_return
    ours, theirs = ([r.num_episodes for r in run.reports] for run in (listener, reference))
    # Who learns in place reports an iteration before the next rollout's episodes are known.
    assert (ours if where else [*ours[1:], ours[-1]]) == theirs
    assert [r.episodes for r in listener.reports] == [r.episodes for r in reference.reports]


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_bound_of_zero_computes_what_cpu_does(env: str) -> None:
    listener, versions = trained(planned(env, lag=0), 5)
    assert lags(versions) == [(0, 0)] * 5
    reference = Listener()
    train(make_plan(env, num_envs=4), total_steps=5 * 64, callbacks=[reference])
    torch.testing.assert_close(listener.flat, reference.flat, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_behind_a_slow_learner_samplers_run_ahead_to_the_bound_and_never_beyond(lag: int) -> None:
    listener, versions = trained(planned(timed(5e-6), lag=lag, epochs=10))
    found = lags(versions)
    assert found[0] == (0, 0)
    assert found[lag:] == [(lag, lag)] * (8 - lag)
    assert all(part <= lag for parts in found for part in parts)
    # That is what is reported, too.
    assert [r.max_policy_lag for r in listener.reports] == [max(parts) for parts in found]
    assert [r.policy_lag for r in listener.reports] == [sum(p) / len(p) for p in found]


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_slow_samplers_are_one_iteration_behind_however_much_is_allowed(lag: int) -> None:
    _, versions = trained(planned(timed(5e-3), lag=lag, epochs=1))
    assert lags(versions) == [(0, 0), *[(1, 1)] * 7]


@pytest.mark.parametrize(("normalize", "where"), [(True, {}), (False, {"device": D})])
def test_rollouts_of_mixed_age_compute_the_lagged_algorithm(
    normalize: bool, where: dict[str, object]
) -> None:
    """Each part's log-probabilities and values are those of the weights that acted in it."""
    hyper = {"normalize_rewards": normalize, "normalize_observations": normalize}
    plan = planned(timed(4e-4, 1e-3), lag=3, workers=4, epochs=4, **hyper, **where)
    listener, versions = trained(plan, 9)
    assert max(lag for parts in lags(versions) for lag in parts) <= 3
    assert any(len(set(parts)) > 1 for parts in versions)
    reference = simulate(plan, num_iterations=9, versions=versions)
    torch.testing.assert_close(listener.flat, reference, atol=1e-5, rtol=1e-5)
    # Lanes take turns in the order of virtual time, so even this repeats to the bit.
    again, same = trained(plan, 9)
    assert same == versions and torch.equal(again.flat, listener.flat)


class Uneven(Counter):
    """Its episodes are cut off after as many steps as its first seed says."""

    def __init__(self) -> None:
        super().__init__(truncates=True)

    def reset(self, *, seed: int | None = None, options: object = None) -> object:
        if seed is not None:
            self.length = 3 + seed % 5
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("where", [{}, {"device": D}], ids=["cpu", "device"])
def test_truncated_episodes_are_bootstrapped_in_their_own_columns(
    where: dict[str, object],
) -> None:
    env = register("TruncatesApart", Uneven)
    listener, _ = trained(planned(env, workers=4, **where), 5)
    reference = Listener()
    plan = make_plan(env, scheme="double-buffer", num_envs=4)
    train(plan, total_steps=5 * 64, callbacks=[reference])
    assert len({e.length for r in reference.reports for e in r.episodes}) > 1
    torch.testing.assert_close(listener.flat, reference.flat, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", [{}, {"device": D}], ids=["cpu", "device"])
def test_stages_have_the_names_of_the_plan_and_each_lane_sums_to_the_iteration(
    where: dict[str, object],
) -> None:
    listener, _ = trained(planned(timed(2e-5), **where))
    report = listener.reports[3]
    copies = {"rollout_to_device", "weights_to_host"} if where else set()
    for lane, names in (
        ("sampler", {"policy_step", "env_step", "handoff", "wait"}),
        ("learner", {"gae", "update", "handoff", "wait"} | copies),
    ):
        stages = {name: s for (name, of), s in report.stage_s.items() if of == lane}
        assert set(stages) == names
        assert sum(stages.values()) == pytest.approx(report.iteration_s)
    # Two samplers of two environments each: 16 steps of 2 x 20 us.
    assert report.stage_s["env_step", "sampler"] == pytest.approx(16 * 2 * 2e-5, rel=0.3)


def test_at_rest_nothing_works_and_a_run_goes_on_as_if_it_had_not_rested() -> None:
    plan = planned("Pendulum-v1")
    alone, together = Listener(), Listener()
    train(plan, total_steps=5 * 64, callbacks=[alone])
    with open_loop(plan, total_steps=5 * 64, callbacks=[together], stop=StopRequest()) as loop:
        while not loop.is_done:
            loop.iterate()
            loop.rest()
        loop.drain()
    assert torch.equal(alone.flat, together.flat)


class StopAt(Callback):
    def on_iteration(self, report: IterationReport) -> None:
        if report.iteration == 3:
            raise StopRequested


def test_a_stopped_run_goes_on_with_fresh_environments(tmp_path: object) -> None:
    plan = planned(lag=2, normalize_rewards=True)
    result = train(plan, total_steps=8 * 64, run_dir=tmp_path, callbacks=[StopAt()])
    assert result.interrupted and result.env_steps == 3 * 64
    listener = Listener()
    result = train(plan, total_steps=8 * 64, run_dir=tmp_path, resume=True, callbacks=[listener])
    assert (result.env_steps, result.call_env_steps) == (8 * 64, 5 * 64)
    assert [r.iteration for r in listener.reports] == [4, 5, 6, 7, 8]
    lags = [r.max_policy_lag for r in listener.reports]
    assert lags[0] == 1 and max(lags) <= 2  # the weights before the last act again


@pytest.mark.parametrize("workers", [0, 3])
def test_workers_that_do_not_divide_the_environments_are_refused(workers: int) -> None:
    with pytest.raises(UsageError, match=f"--num-workers must divide the 4 .* got {workers}: use"):
        trained(planned(workers=workers))


def test_samplers_that_would_need_processes_for_their_environments_are_refused() -> None:
    plan = planned()
    placement = dataclasses.replace(plan.placement, env_backend="process")
    chosen = dataclasses.replace(plan.chosen, placement=placement)
    with pytest.raises(UsageError, match="got --env-backend process: use sync or vector"):
        train(dataclasses.replace(plan, chosen=chosen), total_steps=64)
