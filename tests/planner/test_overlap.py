"""Schemes that sample and learn at the same time, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autoplace.errors import UsageError
from autoplace.measurement import Measurement, Task
from autoplace.planner.choices import (
    LAG_EFFICIENCY,
    lag_efficiency,
    policy_lags,
    sampler_counts,
)
from autoplace.planner.memory import EnvMemory, estimate_bytes
from autoplace.planner.placements import Placements
from autoplace.planner.plan import Placement
from autoplace.planner.schemes.asynchronous import ASYNC, straggling_s
from autoplace.planner.schemes.double_buffer import DOUBLE_BUFFER
from autoplace.planner.schemes.layout import overlapped
from autoplace.planner.search import make_plan
from tests.planner.test_schemes import (
    AXES,
    WORKLOAD,
    at,
    first,
    placements_of,
    timing,
    works_of,
)
from tests.planner.test_search import ENV, workload
from tests.synthetic import GPU, Truth, make_calibration

SAMPLING = {("policy_step", "sampler"): 2.0, ("env_step", "sampler"): 3.0}
LEARNING = {("gae", "learner"): 1.0, ("update", "learner"): 3.0}


def only(placement: Placement) -> Placements:
    """A single placement as columns."""
    return Placements.product(
        *({name: (value,)} for name, value in dataclasses.asdict(placement).items())
    )


def each(placements: Placements) -> list[Placement]:
    return [placements.placement(row) for row in range(len(placements))]


# --------------------------------------------------------------------------------------------------
# Both sides at once


@pytest.mark.parametrize(
    ("sampler_threads", "sampled", "learned"),
    [
        (1, 5.0, 4.0),  # a core each
        # Three threads on two cores: all slow by 1.5, the learner is through after 6 s; of the
        # sampling 4 s are done by then, and the last second runs at full speed.
        (2, 7.0, 6.0),
        # Four threads on two cores: the learner is through after 8 s, 4 s of the sampling are
        # done; its three threads, alone on two cores, then need 1.5 s for the last second.
        (3, 9.5, 8.0),
    ],
)
def test_threads_beyond_the_cores_take_turns(
    sampler_threads: int, sampled: float, learned: float
) -> None:
    seconds = stretched({}, sampler_threads=sampler_threads, processes=sampler_threads)
    assert sum(seconds[key] for key in SAMPLING) == pytest.approx(sampled)
    assert sum(seconds[key] for key in LEARNING) == pytest.approx(learned)
    # every stage of a side is stretched alike
    assert seconds["env_step", "sampler"] == pytest.approx(sampled * 3 / 5)


def test_threads_that_stay_on_their_cores_take_as_long_as_the_most_on_one() -> None:
    # Of three threads on two cores two share one: both take twice as long while they do, so that
    # the sampling (5 s) is done a second after the learner (4 s) is through at 8 s.
    seconds = stretched({}, uneven=1.0, sampler_threads=2, processes=2)
    assert sum(seconds[key] for key in SAMPLING) == pytest.approx(9.0)
    assert sum(seconds[key] for key in LEARNING) == pytest.approx(8.0)
    # Where there is a core for each, or as many on every one, nothing is uneven.
    for threads in (1, 3):
        some = stretched({}, uneven=1.0, sampler_threads=threads, processes=threads)
        both = sum(some[key] for key in LEARNING)
        assert both == pytest.approx(4.0 * (threads + 1) / 2)


def stretched(
    slowdown: dict[tuple[str, int], float],
    *,
    cores: int = 2,
    device: str = "cpu",
    uneven: float = 0.0,
    learning: dict[tuple[str, str], float] = LEARNING,
    **options: int,
) -> dict[tuple[str, str], float]:
    asked = timing(
        {**SAMPLING, **learning},
        usable_cpus=cores,
        unevenness=lambda work_s: np.full(len(work_s), uneven),
        slowdown=lambda stage, threads, busy: np.array(
            [slowdown.get((stage, int(b)), 1.0) for b in busy]
        ),
    )
    placement = first(placements_of(DOUBLE_BUFFER, learn_device=device))
    counts = {name: np.array([value]) for name, value in options.items()}
    found = overlapped(asked, placement, list(SAMPLING), list(learning), **counts)
    return {key: float(seconds[0]) for key, seconds in found.items()}


def test_a_message_waits_for_a_core_where_all_are_busy() -> None:
    # Two samplers and a learner on two cores: what is beside a message takes no fewer than both.
    with_message = {**LEARNING, ("handoff", "learner"): 0.5}
    slow = {("handoff", 2): 8.0}
    found = {
        count: stretched(slow, learning=with_message, sampler_threads=count, processes=count)
        for count in (1, 2)
    }
    assert found[1]["handoff", "learner"] == pytest.approx(0.5)
    # All that the learner does beside the samplers takes 1.5 times as long, a message 8 times:
    # 6 + 4 = 10 s. The samplers are through after 7.5 s; the rest goes on by itself.
    share = 7.5 / 10
    assert found[2]["handoff", "learner"] == pytest.approx(share * 4.0 + (1 - share) * 0.5)
    assert found[2]["update", "learner"] == pytest.approx(share * 4.5 + (1 - share) * 3.0)


def test_each_side_is_slowed_while_the_other_is_at_work() -> None:
    # Beside one busy core an env step takes 1.5 times as long, an update twice: 2 + 4.5 = 6.5 s of
    # sampling and 1 + 6 = 7 s of learning. Sampling is through first; of the learning 6.5 / 7 are
    # done by then, so the stages end up at 6.5 / 7 of their slowed and 0.5 / 7 of their own time.
    seconds = stretched({("env_step", 1): 1.5, ("update", 1): 2.0}, sampler_threads=1)
    assert seconds["env_step", "sampler"] == pytest.approx(4.5)
    assert seconds["policy_step", "sampler"] == pytest.approx(2.0)
    assert seconds["update", "learner"] == pytest.approx(6 * 6.5 / 7 + 3 * 0.5 / 7)
    assert seconds["gae", "learner"] == pytest.approx(1.0)


def test_samplers_slow_each_other_too_and_an_accelerator_is_not_slowed() -> None:
    slowdown = {("env_step", 2): 1.2, ("env_step", 1): 1.1, ("update", 2): 3.0}
    seconds = stretched(slowdown, cores=4, device=GPU, sampler_threads=2, processes=2)
    # Beside the other sampler and the learner's thread 2 + 3.6 = 5.6 s; the learner is through
    # after 4 s, and only the other sampler is left for the remaining 1.6 / 5.6.
    share = 4 / 5.6
    assert seconds["env_step", "sampler"] == pytest.approx(3 * (share * 1.2 + (1 - share) * 1.1))
    assert seconds["update", "learner"] == pytest.approx(3.0)


# --------------------------------------------------------------------------------------------------
# double-buffer


def double_buffer(sampling_s: float, update_s: float):
    seconds = {
        ("policy_step", "sampler"): 0.25 * sampling_s,
        ("env_step", "sampler"): 0.75 * sampling_s,
        ("handoff", "sampler"): 0.5,
        ("handoff", "learner"): 0.25,
        ("gae", "learner"): 1.0,
        ("update", "learner"): update_s,
    }
    placement = first(placements_of(DOUBLE_BUFFER))
    assert placement.max_policy_lag == 1
    return at(DOUBLE_BUFFER.layout(timing(seconds), placement))


def test_a_slow_learner_is_waited_for_until_its_answer_has_arrived() -> None:
    spans = double_buffer(sampling_s=2.0, update_s=4.0)
    # order 0.25, gae 1, update 4, answer 0.25: both meet at 5.5 and hand over until 6
    assert spans["wait", "sampler"] == (2.0, 3.5)
    assert spans["handoff", "sampler"] == (5.5, 0.5)
    assert spans["handoff", "learner"] == (0.0, 0.25)
    assert spans["update", "learner"] == (1.25, 4.0)
    assert spans["wait", "learner"] == (5.25, 0.75)


def test_a_slow_sampler_does_not_wait_for_messages() -> None:
    spans = double_buffer(sampling_s=8.0, update_s=4.0)
    assert ("wait", "sampler") not in spans
    assert spans["handoff", "sampler"] == (8.0, 0.5)
    assert spans["wait", "learner"] == (5.25, 3.25)


# --------------------------------------------------------------------------------------------------
# async


def asynchronous(spread: float, **placement: int):
    seconds = {
        ("policy_step", "sampler"): 2.0,
        ("env_step", "sampler"): 3.0,
        ("handoff", "sampler"): 0.5,
        ("handoff", "learner"): 0.25,
        ("gae", "learner"): 1.0,
        ("update", "learner"): 4.0,
    }
    found = dataclasses.replace(placements_of(ASYNC).placement(0), **placement)
    asked = timing(seconds, usable_cpus=4, env_spread_fraction=np.array([spread]))
    return at(ASYNC.layout(asked, only(found)))


def test_async_takes_as_long_as_its_slower_side() -> None:
    spans = asynchronous(0.0, num_workers=2, max_policy_lag=1)
    assert spans["policy_step", "sampler"] == (0.0, 2.0)
    assert spans["env_step", "sampler"] == (0.02, 3.0)
    assert spans["handoff", "sampler"] == (5.0, 0.5)
    assert ("wait", "sampler") not in spans  # 5.5 against 5.25
    assert spans["wait", "learner"] == (5.25, 0.25)


def test_parts_of_varying_length_cost_what_slack_does_not_absorb() -> None:
    # A vector step varies by 30 %, so 100 steps of 3 s together by 3 x 0.3 / 10 = 0.09 s. The
    # longer of two parts is longer by 0.5895 of that (Blom's value), 0.05305 s; a process may be
    # 5.5 - 5.25 = 0.25 s ahead: 0.05305 / (1 + 0.25 / 0.05305) = 0.009287 s remain.
    spans = asynchronous(0.3, num_workers=2, max_policy_lag=1)
    assert spans["wait", "sampler"] == (5.5, pytest.approx(0.009287, rel=1e-3))
    # One process alone, or a lag of 3 iterations, makes it next to nothing.
    assert ("wait", "sampler") not in asynchronous(0.3, num_workers=1, max_policy_lag=1)
    slack = asynchronous(0.3, num_workers=2, max_policy_lag=3)
    assert slack["wait", "sampler"] == (5.5, pytest.approx(0.05305 / (1 + 11.25 / 0.05305), 1e-3))


def simulated_s(count: int, spread: float, learning: float, lag: int) -> float:
    """Seconds of an iteration, part by part: a part is 1 s in the mean, and normal."""
    rng, iterations = np.random.default_rng(0), 4000
    ready, made = np.zeros(count), [0.0] * (lag + 1)
    for _ in range(iterations):
        ready = np.maximum(ready, made[0]) + 1 + spread * rng.standard_normal(count)
        made = [*made[1:], max(made[-1], ready.max()) + learning]
    return made[-1] / iterations


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("learning", [0.1, 0.9, 1.2])
@pytest.mark.parametrize("lag", [1, 2])
def test_stragglers_cost_what_a_simulation_of_the_pipeline_says(
    count: int, learning: float, lag: int
) -> None:
    late = straggling_s(*(np.array([x]) for x in (1.0, 0.05, learning, count, lag)))
    sampling = 1 + float(late[0])
    assert max(sampling, learning, (sampling + learning) / (lag + 1)) == pytest.approx(
        simulated_s(count, 0.05, learning, lag), rel=0.015
    )


def test_the_environments_are_shared_out_evenly_and_little_beyond_the_cores() -> None:
    assert sampler_counts(8, 2) == (1, 2, 4)
    assert sampler_counts(6, 4) == (1, 2, 3, 6)
    assert sampler_counts(7, 2) == (1, 7)
    assert sampler_counts(1, 64) == (1,)


def test_a_learner_of_several_threads_shares_no_core_with_a_sampler() -> None:
    placements = each(ASYNC.placements(AXES, 8, 100))
    assert {(p.num_workers, p.max_policy_lag) for p in placements} == {
        (workers, lag) for workers in (2, 4) for lag in (1, 3)
    }
    for placement in placements:
        assert placement.sample_threads == 1
        if placement.learn_threads > 1:
            assert placement.num_workers + placement.learn_threads <= 4
    assert not len(ASYNC.placements(dataclasses.replace(AXES, usable_cpus=1), 8, 100))


@pytest.mark.parametrize(
    ("counts", "kept"), [((1, 2, 4), {2, 4}), ((1, 7), {1, 7}), ((1,), {1})], ids=str
)
def test_one_process_alone_is_left_to_double_buffer_where_several_fit(
    counts: tuple[int, ...], kept: set[int]
) -> None:
    axes = dataclasses.replace(AXES, samplers=tuple(("sync", count) for count in counts))
    assert set(ASYNC.placements(axes, 8, 100).num_workers) == kept


def test_each_process_steps_its_share() -> None:
    works = works_of(ASYNC, placements_of(ASYNC, num_workers=4).placement(0))
    ((step, count),) = works["env_step", "sampler"].parts
    assert (step.num_envs, step.workers, count) == (2, 0, 100)
    (policy, count), (cold, as_often) = works["policy_step", "sampler"].parts
    assert (policy.rows, count, as_often) == (2, 100, 100)
    assert (cold.op, cold.num_envs, cold.workers) == ("cold_policy_step", 2, 0)
    (gae, _), (books, count) = works["gae", "learner"].parts
    assert gae.shape == (100, 8)
    assert (books.op, books.shape, count) == ("bookkeeping", (100, 8, 2, 3), 1)


def test_a_lag_keeps_rollouts_weights_and_processes_in_memory() -> None:
    one, three = (placements_of(ASYNC, max_policy_lag=lag).placement(0) for lag in (1, 3))
    rows = 800 * (4 * 4 + 8 + 12)
    more = estimate_bytes(WORKLOAD, three)["cpu"] - estimate_bytes(WORKLOAD, one)["cpu"]
    assert more >= 2 * (rows + 4 * WORKLOAD.network.num_parameters)
    two = dataclasses.replace(one, num_workers=one.num_workers + 1)
    process = estimate_bytes(WORKLOAD, two)["cpu"] - estimate_bytes(WORKLOAD, one)["cpu"]
    assert 50e6 < process < 500e6


def test_what_acts_by_numpy_needs_no_torch_beside_the_run() -> None:
    eager = placements_of(ASYNC, num_workers=4).placement(0)
    light = dataclasses.replace(eager, engine="numpy")
    saved = estimate_bytes(WORKLOAD, eager)["cpu"] - estimate_bytes(WORKLOAD, light)["cpu"]
    assert saved > 4 * 100e6  # of 120 MiB each, less what the engine keeps beside eager's
    # Double-buffer starts one sampler then; else a learner, which is a process with torch.
    one = dataclasses.replace(light, num_workers=0)
    apart = dataclasses.replace(one, sample_threads=2)
    more = estimate_bytes(WORKLOAD, apart)["cpu"] - estimate_bytes(WORKLOAD, one)["cpu"]
    assert more == (150 - 22) * 2**20


def test_environments_are_counted_in_every_process_that_makes_some() -> None:
    held = EnvMemory(process_bytes=7 * 2**20, env_bytes=2**20)

    def more(placement: Placement) -> int:
        counted = estimate_bytes(WORKLOAD, placement, held)["cpu"]
        return (counted - estimate_bytes(WORKLOAD, placement)["cpu"]) // 2**20

    light = dataclasses.replace(placements_of(ASYNC, num_workers=4).placement(0), engine="numpy")
    assert more(light) == 8 + 4 * 7  # eight environments in four samplers
    assert more(dataclasses.replace(light, num_workers=0)) == 8 + 7  # in one, of double-buffer
    serial = dataclasses.replace(light, max_policy_lag=0)
    workers = dataclasses.replace(serial, env_backend="process", num_workers=2)
    assert more(workers) == 8 + 2 * 7
    assert more(dataclasses.replace(workers, env_backend="joint")) == 8 + 7  # the run steps a share
    assert more(dataclasses.replace(serial, num_workers=0)) == 8  # which has made one before


def test_a_calibrated_contention_makes_overlap_dearer_and_leaves_turns_alone() -> None:
    quiet, loud = (
        make_calibration(Truth(contention=c), env=ENV, env_step_s=1e-4) for c in (0.0, 0.3)
    )
    given = workload(minibatch_rows=256)
    for scheme, dearer in (("cpu", False), ("double-buffer", True), ("async", True)):
        first = make_plan(quiet, given, scheme=scheme).chosen.iteration_s
        second = make_plan(loud, given, scheme=scheme).chosen.iteration_s
        assert second == pytest.approx(first) if not dearer else 1.05 < second / first < 1.35


# --------------------------------------------------------------------------------------------------
# Plans


@pytest.fixture(scope="module")
def server():
    return make_calibration(Truth(gpu=True), env=ENV, env_step_s=2e-4, usable_cpus=8)


def test_a_slow_environment_is_sampled_by_processes(server) -> None:
    plan = make_plan(server, workload(minibatch_rows=256, num_envs=16))
    assert plan.scheme == "async"
    assert plan.placement.num_workers >= 4
    assert plan.changes_learning == ("async samples with a policy one iteration old",)
    lanes: dict[str, float] = {}
    for stage in plan.chosen.stages:
        lanes[stage.lane] = lanes.get(stage.lane, 0.0) + stage.total_s
    assert set(lanes) == {"sampler", "learner"}
    for total in lanes.values():
        assert total == pytest.approx(plan.chosen.iteration_s)


def test_what_was_given_holds_for_async_too(server) -> None:
    given = {"num_workers": 2, "device": GPU}
    plan = make_plan(server, workload(), scheme="async", placement=given, max_policy_lag=2)
    assert (plan.placement.num_workers, plan.placement.learn_device) == (2, GPU)
    for candidate in plan.candidates:
        if candidate.rejected_because is None:
            assert candidate.placement.num_workers == 2
            assert candidate.placement.max_policy_lag in (1, 2)
    with pytest.raises(UsageError, match="--num-workers is auto or one of 0, 1, 2, 4, 8, got 3"):
        make_plan(server, workload(), scheme="async", placement={"num_workers": 3})


def test_a_lag_of_several_iterations_is_said_and_forbidden_where_there_may_be_none(server) -> None:
    plan = make_plan(server, workload(), scheme="async", max_policy_lag=3)
    # As fast as with a lag of one, which is taken then.
    assert plan.placement.max_policy_lag == 1
    reasons = {
        c.scheme: c.rejected_because
        for c in make_plan(server, workload(), max_policy_lag=0).candidates
    }
    assert reasons["async"] == "its policy lag of 1 is above --max-policy-lag 0"
    assert policy_lags(0) == ()
    assert policy_lags(1) == (1,)
    assert policy_lags(4) == (1, 4)


def test_a_lag_is_priced_by_what_was_declared_for_it(server) -> None:
    assert (lag_efficiency(0), lag_efficiency(1)) == (1.0, LAG_EFFICIENCY)
    for candidate in make_plan(server, workload(minibatch_rows=256), max_policy_lag=2).candidates:
        if candidate.rejected_because is None:
            lag = candidate.placement.max_policy_lag
            assert candidate.sample_efficiency == pytest.approx(LAG_EFFICIENCY**lag)


# --------------------------------------------------------------------------------------------------
# Split-half sampling


def with_workers(step_s: float, *, usable_cpus: int):
    """The environment under one worker process too: 20 microseconds and ``step_s`` per env."""
    calibration = make_calibration(Truth(), env=ENV, env_step_s=step_s, usable_cpus=usable_cpus)
    measurements = [
        Measurement(
            task=Task(op="env_step", env=ENV, backend="process", num_envs=number, workers=1),
            times_s=(2e-5 + number * step_s,) * 5,
        )
        for number in (1, 4, 8)
    ]
    return calibration.with_measurements(measurements)


@pytest.mark.parametrize("step_s", [1e-4, 2e-6], ids=["slow steps", "fast steps"])
def test_one_half_steps_while_the_actions_of_the_other_are_computed(step_s: float) -> None:
    given = {"env_backend": "process", "num_groups": 2}
    calibration = with_workers(step_s, usable_cpus=2)
    plan = make_plan(calibration, workload(minibatch_rows=256), scheme="cpu", placement=given)
    stages = {s.name: s for s in plan.chosen.stages if s.lane == "sampler"}
    assert plan.placement.num_groups == 2
    assert "process x 1 in 2 groups" in plan.explain()
    assert stages["policy_step"].calls == stages["env_step"].calls == 2 * 128
    # 128 vector steps of two halves of 4 environments
    steps_s = 2 * 128 * (2e-5 + 4 * step_s)
    policy_s = stages["policy_step"].total_s
    assert (steps_s > policy_s) == (step_s == 1e-4)
    assert policy_s + stages["env_step"].total_s == pytest.approx(max(steps_s, policy_s), rel=1e-3)


def test_split_half_sampling_is_proposed_where_policy_and_workers_have_cores_of_their_own() -> None:
    def groups(usable_cpus: int) -> set[int]:
        plan = make_plan(with_workers(1e-4, usable_cpus=usable_cpus), workload())
        return {c.placement.num_groups for c in plan.candidates if c.rejected_because is None}

    assert groups(1) == {1}
    assert groups(2) == {1, 2}
    plan = make_plan(with_workers(1e-4, usable_cpus=2), workload(), placement={"num_groups": 2})
    assert (plan.scheme, plan.placement.num_groups) == ("cpu", 2)  # no core is left for a learner
