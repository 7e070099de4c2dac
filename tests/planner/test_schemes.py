"""An iteration laid out on lanes, with numbers worked out by hand."""

from __future__ import annotations

import pytest

from autoplace.planner.schemes import SCHEMES, Axes, Timing
from autoplace.planner.schemes.hybrid import last_chunk_delay
from autoplace.planner.schemes.work import rollout_bytes_per_row
from autoplace.workload import EnvSpec, Hyperparameters, NetworkSpec, Workload

WORKLOAD = Workload(
    env=EnvSpec.make("Known-v0"),
    network=NetworkSpec(observation_size=4, hidden_sizes=(64, 64), action_size=2),
    hyperparameters=Hyperparameters(num_envs=8, rollout_steps=100, epochs=3, minibatch_rows=64),
    action_bytes=8,
)
AXES = Axes(
    accelerators=("cuda:0",),
    sample_threads=(1, 2),
    learn_threads=(1, 2),
    minibatch_rows=(64,),
    transfer_intervals=(100, 30),
    env_backends=(("sync", 0),),
    samplers=(("sync", 1), ("sync", 2), ("sync", 4)),
    policy_lags=(1, 3),
    usable_cpus=4,
)
BY_NAME = {scheme.name: scheme for scheme in SCHEMES}


def first_placement(name: str, **wanted: int):
    placements = BY_NAME[name].placements(AXES, 8, 100)
    return next(p for p in placements if all(getattr(p, k) == v for k, v in wanted.items()))


def works(name: str, **wanted: int):
    placement = first_placement(name, **wanted)
    return {work.key: work for work in BY_NAME[name].work(WORKLOAD, placement)}


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_every_lane_adds_up_to_the_iteration(scheme) -> None:
    for placement in scheme.placements(AXES, 8, 100):
        seconds = {w.key: 0.1 * (i + 1) for i, w in enumerate(scheme.work(WORKLOAD, placement))}
        timing = Timing(seconds=seconds, steps=100, usable_cpus=2, env_spread_fraction=0.3)
        spans = scheme.layout(timing, placement)
        lanes: dict[str, float] = {}
        for span in spans:
            lanes[span.lane] = lanes.get(span.lane, 0.0) + span.total_s
        assert len(set(round(total, 9) for total in lanes.values())) == 1, lanes
        assert set(seconds) <= {(span.name, span.lane) for span in spans}


def test_the_cpu_scheme_takes_turns() -> None:
    seconds = {
        ("policy_step", "sampler"): 2.0,
        ("env_step", "sampler"): 3.0,
        ("gae", "learner"): 1.0,
        ("update", "learner"): 4.0,
    }
    spans = BY_NAME["cpu"].layout(Timing(seconds=seconds, steps=100), first_placement("cpu"))
    at = {(s.name, s.lane): (s.start_s, s.total_s) for s in spans}
    assert at["policy_step", "sampler"] == (0.0, 2.0)
    assert at["env_step", "sampler"] == (pytest.approx(0.02), 3.0)  # after the first policy step
    assert at["gae", "learner"] == (5.0, 1.0)
    assert at["update", "learner"] == (6.0, 4.0)
    assert at["wait", "sampler"] == (5.0, 5.0)
    assert at["wait", "learner"] == (0.0, 5.0)


def test_a_rest_that_does_not_divide_is_costed_at_its_own_size() -> None:
    # 800 rows in minibatches of 64: twelve full ones and one of 32, in each of 3 epochs
    update = works("cpu")["update", "learner"]
    assert update.calls == 39
    assert [(task.rows, count) for task, count in update.parts] == [(64, 36), (32, 3)]


def test_the_policy_runs_once_per_vector_step_on_all_envs() -> None:
    policy = works("cpu")["policy_step", "sampler"]
    ((task, count),) = policy.parts
    assert (task.rows, count) == (8, 100)


def test_hybrid_copies_every_row_once_whatever_the_interval() -> None:
    bytes_per_row = sum(rollout_bytes_per_row(WORKLOAD).values())
    assert bytes_per_row == 4 * 4 + 8 + 12
    for interval, chunks in ((100, 1), (30, 4)):
        copy = works("hybrid", transfer_interval_steps=interval)["rollout_to_device", "copy"]
        assert copy.calls == chunks
        copied = sum(task.shape[0] * count for task, count in copy.parts)
        assert copied == 800 * bytes_per_row


def test_gpu_crosses_with_observations_and_actions_every_step_and_outcomes_once() -> None:
    found = works("gpu")
    for name in ("obs_to_device", "policy_step", "action_to_host"):
        assert found[name, "sampler"].calls == 100
    ((task, count),) = found["rollout_to_device", "sampler"].parts
    assert (task.shape[0], count) == (800 * 12, 1)


@pytest.mark.parametrize(
    ("sampling", "copy", "steps", "interval", "delay"),
    [
        # one chunk: all of it arrives after sampling
        (10.0, 2.0, 100, 100, 2.0),
        # four equal chunks, the link keeps up: only the last is late
        (10.0, 2.0, 100, 25, 0.5),
        # the link needs longer than sampling: busy from 2.5 on for 20
        (10.0, 20.0, 100, 25, 12.5),
        # chunks of 30, 30, 30, 10 steps: sampled at 3, 6, 9, 10; copies of 0.6, 0.6, 0.6, 0.2
        (10.0, 2.0, 100, 30, 0.2),
        # the same with a slow link, 20 s: 3 + 6 = 9, 15, 21, 23
        (10.0, 20.0, 100, 30, 13.0),
    ],
)
def test_the_last_chunk_is_late_by_hand_worked_seconds(
    sampling: float, copy: float, steps: int, interval: int, delay: float
) -> None:
    assert last_chunk_delay(sampling, copy, steps, interval) == pytest.approx(delay)


def test_many_equal_chunks_follow_the_same_rule_as_one_by_one() -> None:
    for sampling, copy in ((10.0, 3.0), (3.0, 10.0), (5.0, 5.0)):
        free = 0.0
        for chunk in range(1, 51):
            free = max(free, sampling * chunk / 50) + copy / 50
        assert last_chunk_delay(sampling, copy, 100, 2) == pytest.approx(free - sampling)


def test_the_rollout_that_is_costed_is_the_rollout_that_is_allocated() -> None:
    from autoplace.ppo.rollout import Rollout

    for continuous in (False, True):
        network = NetworkSpec(
            observation_size=5, hidden_sizes=(8,), action_size=3, continuous=continuous
        )
        workload = Workload(
            env=EnvSpec.make("Known-v0"),
            network=network,
            action_bytes=12 if continuous else 8,
        )
        rollout = Rollout(network, rollout_steps=16, num_envs=4)
        expected = rollout_bytes_per_row(workload)
        assert rollout.actions.nbytes == 64 * expected["actions"]
        assert rollout.outcomes.nbytes == 64 * expected["outcomes"]
        assert rollout.observations[:-1].nbytes == 64 * expected["observations"]
