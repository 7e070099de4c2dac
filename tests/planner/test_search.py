"""Plans for machines whose costs are known."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from autoplace.cost_model import fit_cost_model
from autoplace.errors import CalibrationError, UsageError
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.planner.choices import (
    MINIBATCH_EFFICIENCY,
    minibatch_choices,
    minibatch_efficiency,
    transfer_intervals,
)
from autoplace.planner.memory import Limits
from autoplace.planner.plan import Plan, Stage
from autoplace.planner.search import make_plan
from autoplace.workload import EnvSpec, Hyperparameters, NetworkSpec, Workload
from tests.synthetic import GPU, Truth, make_calibration

ENV = EnvSpec.make("Known-v0")


def workload(**hyper: object) -> Workload:
    hyperparameters = Hyperparameters(**hyper)  # type: ignore[arg-type]
    return Workload(
        env=ENV,
        network=NetworkSpec(
            observation_size=16, hidden_sizes=hyperparameters.hidden_sizes, action_size=4
        ),
        hyperparameters=hyperparameters,
        action_bytes=8,
    )


@pytest.fixture(scope="module")
def desktop() -> Calibration:
    """A fast accelerator behind launches of 10 microseconds."""
    return make_calibration(Truth(gpu=True), env=ENV)


@pytest.fixture(scope="module")
def laptop() -> Calibration:
    """Two cores and nothing else."""
    return make_calibration(Truth(), env=ENV)


def test_a_small_network_stays_on_the_cpu(desktop: Calibration) -> None:
    small = workload(hidden_sizes=(32, 32), minibatch_rows=64)
    assert make_plan(desktop, small, max_policy_lag=0).scheme == "cpu"
    assert make_plan(desktop, small).placement.learn_device == "cpu"


def test_a_wide_network_learns_on_the_accelerator(desktop: Calibration) -> None:
    plan = make_plan(desktop, workload(hidden_sizes=(512, 512), minibatch_rows=512))
    assert plan.scheme in ("hybrid", "gpu", "double-buffer", "async")
    assert plan.placement.learn_device == GPU


def test_one_env_with_a_wide_network_samples_where_a_round_trip_is_not_paid() -> None:
    # A round trip per step against a forward pass of a few microseconds
    slow_link = make_calibration(Truth(gpu=True, copy_latency_s=2e-4), env=ENV)
    plan = make_plan(
        slow_link,
        workload(hidden_sizes=(256, 256), num_envs=1, rollout_steps=2048, minibatch_rows=512),
        max_policy_lag=0,
    )
    assert plan.scheme == "hybrid"


def test_without_an_accelerator_the_threads_are_what_is_chosen(laptop: Calibration) -> None:
    small = make_plan(laptop, workload(hidden_sizes=(16, 16), minibatch_rows=64), max_policy_lag=0)
    large = make_plan(
        laptop, workload(hidden_sizes=(512, 512), minibatch_rows=512), max_policy_lag=0
    )
    assert small.scheme == large.scheme == "cpu"
    assert large.placement.learn_threads == 2
    rejected = {c.scheme: c.rejected_because for c in small.candidates if c.rejected_because}
    assert rejected["gpu"] == rejected["hybrid"] == "no accelerator was calibrated on this machine"


def test_the_same_input_gives_the_same_plan_to_the_byte(desktop: Calibration) -> None:
    first, second = (json.dumps(make_plan(desktop, workload()).to_json()) for _ in range(2))
    assert first == second


def test_a_plan_survives_json(desktop: Calibration) -> None:
    plan = make_plan(desktop, workload(hidden_sizes=(256, 256)))
    back = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert back.chosen == plan.chosen
    assert back.workload == plan.workload
    assert back.to_json() == plan.to_json()


def test_the_plan_has_every_key_that_users_rely_on(desktop: Calibration) -> None:
    data = make_plan(desktop, workload()).to_json()
    assert set(data) >= {
        "scheme", "placement", "env_steps_per_s", "iteration_s", "stages", "bottleneck",
        "candidates", "runner_up", "margin_fraction", "is_close", "flips", "changes_learning",
        "reasons",
    }  # fmt: skip
    assert set(data["placement"]) == {
        "device", "sample_device", "learn_device", "transfer_interval_steps", "minibatch_rows",
        "num_envs", "num_workers", "env_backend", "sample_threads", "learn_threads", "engine",
        "precision", "accumulation_steps", "max_policy_lag", "num_groups",
    }  # fmt: skip
    for stage in data["stages"]:
        assert set(stage) == {
            "name", "lane", "start_s", "calls", "total_s", "low_s", "high_s", "source"
        }  # fmt: skip
    for candidate in data["candidates"]:
        assert set(candidate) >= {"scheme", "placement", "env_steps_per_s", "rejected_because"}


@pytest.mark.parametrize("scheme", ["cpu", "hybrid", "gpu"])
def test_each_lane_sums_to_the_iteration(desktop: Calibration, scheme: str) -> None:
    plan = make_plan(desktop, workload(), scheme=scheme)
    assert plan.scheme == scheme
    lanes: dict[str, float] = {}
    for stage in plan.chosen.stages:
        lanes[stage.lane] = lanes.get(stage.lane, 0.0) + stage.total_s
    for total in lanes.values():
        assert total == pytest.approx(plan.chosen.iteration_s)
    assert plan.chosen.env_steps_per_s == pytest.approx(1024 / plan.chosen.iteration_s)


def test_what_the_user_gave_is_kept_and_the_rest_is_planned_around_it(desktop: Calibration) -> None:
    plan = make_plan(
        desktop,
        workload(minibatch_rows=128),
        scheme="hybrid",
        placement={"transfer_interval_steps": 50, "sample_threads": 2, "device": "CUDA"},
    )
    assert plan.placement.minibatch_rows == 128
    assert plan.placement.transfer_interval_steps == 50
    assert plan.placement.sample_threads == 2
    assert plan.placement.device == GPU


def test_a_wide_margin_is_no_tie_and_equal_candidates_are(desktop: Calibration) -> None:
    wide = workload(hidden_sizes=(1024, 1024), minibatch_rows=512)
    clear = make_plan(desktop, wide, max_policy_lag=0)
    assert clear.margin_fraction > 0.1
    assert not clear.is_close
    # An accelerator exactly as good as the CPU's runner-up: hybrid with two chunk lengths
    close = make_plan(
        desktop, workload(hidden_sizes=(512, 512), minibatch_rows=512), scheme="hybrid"
    )
    assert close.margin_fraction < 0.01
    assert close.is_close


def test_rivals_are_what_may_be_faster_and_differ_in_kind(desktop: Calibration) -> None:
    plan = make_plan(desktop, workload(hidden_sizes=(64, 64)), max_policy_lag=0)
    assert 2 <= len(plan.rivals) <= 3
    assert plan.rivals[0] == plan.chosen
    for first, second in itertools.combinations(plan.rivals, 2):
        assert any(
            getattr(first.placement, part) != getattr(second.placement, part)
            for part in (
                "minibatch_rows",
                "sample_threads",
                "learn_threads",
                "env_backend",
                "device",
            )
        )
    # Of a pair each may be the faster one: with errors of a few per cent, none is far behind.
    assert all(0.8 < c.score / plan.chosen.score < 1.03 for c in plan.rivals)
    # What is a hundred times as fast as all others has none.
    alone = workload(hidden_sizes=(2048, 2048), minibatch_rows=512)
    assert make_plan(desktop, alone, max_policy_lag=0, scheme="gpu").rivals == ()


def test_flips_hold_when_they_are_tried(desktop: Calibration) -> None:
    plan = make_plan(desktop, workload(hidden_sizes=(64, 64), minibatch_rows=64), max_policy_lag=0)
    assert plan.scheme == "cpu"
    flips = {flip.parameter: flip for flip in plan.flips}
    assert "hidden_sizes" in flips
    flip = flips["hidden_sizes"]
    assert flip.scheme_from == "cpu"
    width = round(flip.to_value * 1.05)
    there = make_plan(desktop, plan.workload.replace(hidden_sizes=(width, width)), max_policy_lag=0)
    assert there.scheme == flip.scheme_to
    width = round(flip.to_value * 0.85)
    before = make_plan(
        desktop, plan.workload.replace(hidden_sizes=(width, width)), max_policy_lag=0
    )
    assert before.scheme == "cpu"


def test_a_faster_environment_raises_the_prediction_by_what_it_saves() -> None:
    slow = make_calibration(Truth(), env=ENV, env_step_s=1e-3)
    fast = make_calibration(Truth(), env=ENV, env_step_s=5e-4)
    first = make_plan(slow, workload(minibatch_rows=256), scheme="double-buffer")
    second = make_plan(fast, workload(minibatch_rows=256), scheme="double-buffer")
    assert first.bottleneck == "env_step"
    saved = first.chosen.iteration_s - second.chosen.iteration_s
    assert saved == pytest.approx(128 * 8 * 5e-4, rel=0.01)


def test_rows_that_only_reset_are_no_env_steps() -> None:
    calibration = make_calibration(Truth(), env=ENV)
    whole = make_plan(calibration, workload(), scheme="cpu").chosen
    lossy = [
        dataclasses.replace(m, valid_fraction=0.9)
        for m in calibration.measurements
        if m.task.op == "env_step"
    ]
    less = make_plan(calibration.with_measurements(lossy), workload(), scheme="cpu").chosen
    assert less.iteration_s == pytest.approx(whole.iteration_s)
    assert less.env_steps_per_s == pytest.approx(0.9 * whole.env_steps_per_s)
    for measurement in lossy:
        assert Measurement.from_json(measurement.to_json()).valid_fraction == 0.9


def test_memory_that_is_not_there_rejects_with_the_figure(desktop: Calibration) -> None:
    plan = make_plan(
        desktop,
        workload(hidden_sizes=(1024, 1024), minibatch_rows=512),
        limits=Limits(host_bytes=2**34, device_bytes=2**20),
    )
    assert plan.scheme == "cpu"
    reasons = [c.rejected_because for c in plan.candidates if c.scheme == "gpu"]
    assert reasons and all("GiB on cuda:0" in str(reason) for reason in reasons)


@pytest.mark.parametrize(
    ("kwargs", "hyper", "message"),
    [
        (
            {"scheme": "magic"},
            {},
            "--scheme is auto or one of cpu, hybrid, gpu, double-buffer, async, got 'magic'",
        ),
        ({"placement": {"device": "cuda:7"}}, {}, "--device is one that was calibrated"),
        ({"placement": {"device": "tpu"}}, {}, "a device is cpu, cuda"),
        ({"placement": {"transfer_interval_steps": 0}}, {}, "--transfer-interval is between 1 and"),
        ({"placement": {"sample_threads": 0}}, {}, "--sample-threads is a whole number from 1"),
        ({"placement": {"env_backend": "none"}}, {}, "--env-backend is auto or one of sync"),
        ({"scheme": "gpu", "placement": {"device": "cpu"}}, {}, "no placement has all of"),
        ({"limits": Limits(host_bytes=1000)}, {}, "no placement fits"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    desktop: Calibration, kwargs: dict[str, object], hyper: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        make_plan(desktop, workload(**hyper), **kwargs)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_environment_without_a_step_time_names_the_next_command(desktop: Calibration) -> None:
    other = dataclasses.replace(workload(), env=EnvSpec.make("Other-v0"))
    with pytest.raises(CalibrationError, match="autoplace calibrate --env Other-v0"):
        make_plan(desktop, other)


def test_a_scheme_that_needs_an_accelerator_says_so(laptop: Calibration) -> None:
    with pytest.raises(UsageError, match="needs an accelerator"):
        make_plan(laptop, workload(), scheme="hybrid")


def test_minibatches_that_the_planner_proposes_divide_the_rollout() -> None:
    for rows in (2, 3, 100, 300, 1000, 1024, 2048, 65 * 7, 8 * 997):
        for choice in minibatch_choices(rows, None):
            assert rows % choice == 0
            assert choice >= 2
    assert minibatch_choices(1024, 100) == (100,)


def test_the_rollout_is_one_minibatch_where_it_is_a_prime_number_of_rows() -> None:
    assert minibatch_choices(97, None) == (97,)


def test_sample_efficiency_is_interpolated_between_declared_sizes() -> None:
    sizes = sorted(MINIBATCH_EFFICIENCY)
    for size in sizes:
        assert minibatch_efficiency(size) == MINIBATCH_EFFICIENCY[size]
    low, high = sizes[-2:]
    middle = minibatch_efficiency(round((low * high) ** 0.5))
    assert MINIBATCH_EFFICIENCY[high] <= middle <= MINIBATCH_EFFICIENCY[low]
    assert minibatch_efficiency(10**6) == MINIBATCH_EFFICIENCY[sizes[-1]]


def test_transfer_intervals_halve_down_from_the_rollout() -> None:
    assert transfer_intervals(128) == (128, 64, 32, 16, 8, 4, 2, 1)
    assert transfer_intervals(1) == (1,)
    assert transfer_intervals(5) == (5, 3, 2, 1)


def test_of_equally_fast_minibatches_the_smaller_is_taken() -> None:
    # An environment so slow that learning does not matter
    calibration = make_calibration(Truth(), env=ENV, env_step_s=0.1)
    assert make_plan(calibration, workload()).placement.minibatch_rows == min(MINIBATCH_EFFICIENCY)


def test_overlap_takes_as_long_as_its_slower_side_and_is_priced_in_policy_lag() -> None:
    calibration = make_calibration(Truth(), env=ENV, env_step_s=1e-4)
    plan = make_plan(calibration, workload(minibatch_rows=256), scheme="double-buffer")
    stages = {(s.name, s.lane): s.total_s for s in plan.chosen.stages}
    sampling = stages["policy_step", "sampler"] + stages["env_step", "sampler"]
    learning = stages["gae", "learner"] + stages["update", "learner"]
    assert plan.chosen.iteration_s == pytest.approx(
        max(sampling, learning) + stages["handoff", "sampler"]
    )
    assert plan.changes_learning == ("double-buffer samples with a policy one iteration old",)
    assert plan.placement.sample_threads + plan.placement.learn_threads <= 2
    assert make_plan(calibration, workload(), max_policy_lag=0).scheme == "cpu"


def test_overlap_needs_a_second_core() -> None:
    calibration = make_calibration(Truth(), env=ENV, usable_cpus=1)
    plan = make_plan(calibration, workload())
    assert plan.scheme == "cpu"
    reasons = {c.scheme: c.rejected_because for c in plan.candidates}
    assert reasons["double-buffer"] == "sampling and learning at once need two usable CPUs"


def test_a_lag_that_is_forbidden_is_the_reason_given(laptop: Calibration) -> None:
    plan = make_plan(laptop, workload(), max_policy_lag=0)
    reasons = {c.scheme: c.rejected_because for c in plan.candidates}
    assert reasons["double-buffer"] == "its policy lag of 1 is above --max-policy-lag 0"


def test_no_more_workers_are_proposed_than_there_are_environments() -> None:
    def step(number: int, workers: int) -> Task:
        backend = "process" if workers else "sync"
        return Task(op="env_step", env=ENV, backend=backend, num_envs=number, workers=workers)

    # 1 ms a step, and workers that cost next to nothing.
    times = {step(1, 0): 1e-3, step(8, 0): 8e-3, step(1, 1): 1e-3, step(8, 2): 4e-3}
    steps = [Measurement(task=task, times_s=(time_s,)) for task, time_s in times.items()]
    calibration = make_calibration(Truth(), quick=True).with_measurements(steps)
    many = make_plan(calibration, workload(num_envs=8), scheme="cpu")
    assert many.placement.num_workers == 2
    one = make_plan(calibration, workload(num_envs=1), scheme="cpu")
    assert {c.placement.num_workers for c in one.candidates} == {0, 1}


def test_a_given_precision_and_parts_are_kept_costed_and_said():
    calibration = make_calibration(Truth(), env=ENV)
    given = {"precision": "bf16", "accumulation_steps": 2}
    plan = make_plan(calibration, workload(minibatch_rows=64), placement=given)
    assert (plan.placement.precision, plan.placement.accumulation_steps) == ("bf16", 2)
    update = next(stage for stage in plan.chosen.stages if stage.name == "update")
    assert update.source == "extrapolated"  # nothing was timed in bf16
    assert "gradient steps compute in bf16" in plan.changes_learning
    free = make_plan(calibration, workload(minibatch_rows=64))
    assert (free.placement.precision, free.placement.accumulation_steps) == ("fp32", 1)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"precision": "int8"}, "--precision is one of fp32"),
        ({"precision": "tf32"}, "--precision tf32 is of accelerators"),
        ({"accumulation_steps": 65}, "--accumulation-steps is between 1 and the rows"),
    ],
)
def test_a_precision_or_parts_that_cannot_be_are_refused(given, problem):
    calibration = make_calibration(Truth(), env=ENV)
    with pytest.raises(UsageError, match=problem):
        make_plan(calibration, workload(minibatch_rows=64), placement=given)


def test_what_happens_beside_a_full_lane_is_no_bottleneck(desktop: Calibration) -> None:
    plan = make_plan(desktop, workload(hidden_sizes=(64, 64)), scheme="double-buffer")

    def stage(name: str, lane: str, total_s: float) -> Stage:
        return dataclasses.replace(plan.chosen.stages[0], name=name, lane=lane, total_s=total_s)

    # The sampler is never idle; the learner's one long stage is hidden behind it.
    hidden = dataclasses.replace(
        plan.chosen,
        iteration_s=1.0,
        stages=(
            stage("env_step", "sampler", 0.55),
            stage("policy_step", "sampler", 0.44),
            stage("wait", "sampler", 0.01),
            stage("update", "learner", 0.7),
            stage("wait", "learner", 0.3),
        ),
    )
    assert hidden.bottleneck == "env_step"
    # In turn, both lanes wait, and whatever is longest counts.
    in_turn = dataclasses.replace(
        plan.chosen,
        iteration_s=1.0,
        stages=(
            stage("env_step", "sampler", 0.3),
            stage("wait", "sampler", 0.7),
            stage("wait", "learner", 0.3),
            stage("update", "learner", 0.7),
        ),
    )
    assert in_turn.bottleneck == "update"
    assert all(c.stages for c in plan.best_of_schemes.values())


def test_threads_of_a_policy_do_not_wait_on_the_cores_of_workers(laptop: Calibration) -> None:
    step = Task(op="env_step", env=ENV, backend="process", num_envs=8, workers=2)
    calibration = laptop.with_measurements([Measurement(task=step, times_s=(1e-4,) * 5)])
    cores = calibration.machine.usable_cpus
    assert cores == 2
    wide = workload(hidden_sizes=(1024, 1024), minibatch_rows=512)
    spread: dict[str, object] = {"env_backend": "process", "num_workers": cores}
    chosen = make_plan(calibration, wide, scheme="cpu", placement=spread).placement
    assert (chosen.sample_threads, chosen.learn_threads) == (1, 2)
    asked = make_plan(calibration, wide, scheme="cpu", placement={**spread, "sample_threads": 2})
    assert asked.placement.sample_threads == 2


def test_a_product_that_the_accelerator_wins_does_not_decide_where_a_small_run_goes(
    desktop: Calibration,
) -> None:
    # Symptom: the GPU multiplies 8.6 x as fast, and PPO is 2.7 x slower there.
    product = [Task(op="matmul", device=on, shape=(256, 256, 256)) for on in ("cpu", GPU)]
    costs = fit_cost_model(desktop).predict(product)
    assert costs[product[0]].seconds > 8 * costs[product[1]].seconds
    # 256 x 256, but one environment: a forward pass of one row is issued, not computed.
    one = workload(
        hidden_sizes=(256, 256), num_envs=1, rollout_steps=256, minibatch_rows=32, epochs=1
    )
    plan = make_plan(desktop, one, max_policy_lag=0)
    best: dict[str, float] = {}
    for candidate in plan.candidates:
        if not candidate.rejected_because:
            rate = max(best.get(candidate.scheme, 0.0), candidate.env_steps_per_s)
            best[candidate.scheme] = rate
    assert plan.scheme != "gpu" and best[plan.scheme] > 1.5 * best["gpu"]
    assert plan.placement.sample_device == "cpu"


class SlowCores(Truth):
    """4 fast cores and 12 slow ones, which every thread but the first 4 has to wait for."""

    def seconds(self, task: Task) -> float:
        slowest = 1.0 if task.threads <= 4 else 6.0
        return slowest * super().seconds(task)


def test_of_fast_and_slow_cores_no_more_threads_are_used_than_pay() -> None:
    # Symptom: one thread per core, and every parallel region waits for an efficiency core.
    hybrid = make_calibration(SlowCores(), env=ENV, usable_cpus=16)
    wide = workload(hidden_sizes=(512, 512), minibatch_rows=512)
    plan = make_plan(hybrid, wide, max_policy_lag=0)
    assert 2 <= plan.placement.learn_threads <= 4
    alike = make_plan(make_calibration(Truth(), env=ENV, usable_cpus=16), wide, max_policy_lag=0)
    assert alike.placement.learn_threads > 4


@pytest.mark.parametrize("usable_cpus", [1, 2, 3])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_plan_has_no_more_threads_at_work_than_a_quota_leaves_cpus(
    usable_cpus: int, lag: int
) -> None:
    # Symptom: as many threads as the host has cores, within a container of two.
    calibration = make_calibration(Truth(), env=ENV, env_step_s=2e-4, usable_cpus=usable_cpus)
    assert max(m.task.threads for m in calibration.measurements) == usable_cpus
    plan = make_plan(
        calibration, workload(hidden_sizes=(256, 256), minibatch_rows=512), max_policy_lag=lag
    )
    where = plan.placement
    assert max(where.sample_threads, where.learn_threads) <= usable_cpus
    if where.max_policy_lag:  # both sides at once
        samplers = max(1, where.num_workers) * where.sample_threads
        assert samplers + where.learn_threads <= max(2, usable_cpus)
        assert usable_cpus > 1


def test_a_rollout_that_memory_has_no_room_for_is_refused_with_the_figure(
    laptop: Calibration,
) -> None:
    # Symptom: "Unable to allocate 8.05 GiB", hours later or at once: 10,000 steps of 84,480 floats.
    network = NetworkSpec(observation_size=84_480, hidden_sizes=(64, 64), action_size=4)
    large = dataclasses.replace(
        workload(num_envs=1, rollout_steps=10_000, minibatch_rows=100), network=network
    )
    with pytest.raises(UsageError, match=r"no placement fits.*needs about .* GiB on cpu") as error:
        make_plan(laptop, large, limits=Limits(host_bytes=8 * 2**30))
    needed = float(str(error.value).partition("needs about ")[2].split()[0])
    assert 10_000 * 84_480 * 4 / 2**30 < needed < 20
    assert make_plan(laptop, large, limits=Limits(host_bytes=64 * 2**30)).scheme == "cpu"
