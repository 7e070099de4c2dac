"""An iteration laid out on lanes, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autoplace.planner.placements import Placements
from autoplace.planner.plan import Placement
from autoplace.planner.schemes import SCHEMES, Axes, Scheme, Timing, Work
from autoplace.planner.schemes.base import Key, Span
from autoplace.planner.schemes.hybrid import last_chunk_delay
from autoplace.planner.schemes.work import rollout_bytes_per_row
from autoplace.planner.schemes.work import update as update_rule
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


def placements_of(scheme: Scheme, **wanted: object) -> Placements:
    """Those that have these values."""
    found = scheme.placements(AXES, 8, 100)
    kept = np.ones(len(found), dtype=bool)
    for name, value in wanted.items():
        kept &= getattr(found, name) == value
    return found.where(kept)


def first(placements: Placements) -> Placements:
    return placements.where(np.arange(len(placements)) == 0)


def works_of(scheme: Scheme, placement: Placement) -> dict[Key, Work]:
    """The work of one placement."""
    found = (r(WORKLOAD, [getattr(placement, f) for f in r.fields]) for r in scheme.work)
    return {work.key: work for work in found if work is not None}


def works(name: str, **wanted: int) -> dict[Key, Work]:
    scheme = BY_NAME[name]
    return works_of(scheme, placements_of(scheme, **wanted).placement(0))


def timing(seconds: dict[Key, float], count: int = 1, **others: Any) -> Timing:
    """Of so many placements that take the same; nothing slows and nothing varies."""
    values = {
        "steps": np.full(count, 100),
        "usable_cpus": 2,
        "slowdown": lambda stage, threads, busy: np.ones(len(threads)),
        "unevenness": lambda work_s: np.zeros(len(work_s)),
        "env_spread_fraction": np.zeros(count),
        **others,
    }
    return Timing(seconds={key: np.full(count, s) for key, s in seconds.items()}, **values)


def at(spans: Sequence[Span], row: int = 0) -> dict[Key, tuple[float, float]]:
    """(start, seconds) of each stage of one placement, with the waits that it has."""
    return {
        (s.name, s.lane): (pytest.approx(s.start_s[row]), pytest.approx(s.total_s[row]))
        for s in spans
        if s.name != "wait" or s.total_s[row] > 0
    }


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_every_lane_adds_up_to_the_iteration(scheme) -> None:
    placements = scheme.placements(AXES, 8, 100)
    for row in range(len(placements)):
        works = works_of(scheme, placements.placement(row))
        seconds = {key: 0.1 * (index + 1) for index, key in enumerate(works)}
        only = placements.where(np.arange(len(placements)) == row)
        spans = scheme.layout(timing(seconds, env_spread_fraction=np.full(1, 0.3)), only)
        lanes: dict[str, float] = {}
        for span in spans:
            lanes[span.lane] = lanes.get(span.lane, 0.0) + float(span.total_s[0])
        assert len(set(round(total, 9) for total in lanes.values())) == 1, lanes
        assert set(seconds) <= {(span.name, span.lane) for span in spans}


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_all_placements_together_are_laid_out_as_each_by_itself(scheme) -> None:
    placements = scheme.placements(dataclasses.replace(AXES, minibatch_rows=(32, 64)), 8, 100)
    count = len(placements)
    assert count > 1
    rng = np.random.default_rng(0)
    keys = works_of(scheme, placements_of(scheme, learn_device=scheme_device(scheme)).placement(0))
    seconds = {key: rng.uniform(0.1, 1.0, count) for key in keys}
    others = {
        "steps": np.full(count, 100),
        "usable_cpus": 3,
        "slowdown": lambda stage, threads, busy: 1 + 0.1 * threads + 0.2 * np.maximum(busy, 0),
        "unevenness": lambda work_s: np.minimum(work_s, 1.0),
        "env_spread_fraction": rng.uniform(0, 0.5, count),
    }
    together = scheme.layout(Timing(seconds=seconds, **others), placements)
    for row in range(count):
        only = np.arange(count) == row
        alone = scheme.layout(
            Timing(
                seconds={key: values[only] for key, values in seconds.items()},
                steps=others["steps"][only],
                usable_cpus=3,
                slowdown=others["slowdown"],
                unevenness=others["unevenness"],
                env_spread_fraction=others["env_spread_fraction"][only],
            ),
            placements.where(only),
        )
        for span, one in zip(together, alone, strict=True):
            assert (span.name, span.lane) == (one.name, one.lane)
            assert (span.start_s[row], span.total_s[row]) == (one.start_s[0], one.total_s[0])


def scheme_device(scheme: Scheme) -> str:
    """Where it learns with the most stages."""
    return "cpu" if scheme.name == "cpu" else "cuda:0"


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_work_follows_from_the_fields_that_it_says(scheme) -> None:
    # A rule that reads any other field of a placement finds none.
    for rule in scheme.work:
        values = dataclasses.asdict(placements_of(scheme).placement(0))
        rule(WORKLOAD, [values[name] for name in rule.fields])
        assert len(set(rule.fields)) == len(rule.fields)


def test_placements_that_share_values_are_told_apart_once() -> None:
    axes = (
        {"num_workers": (0, 2, 2), "env_backend": ("a", "a", "b")},
        {"minibatch_rows": (64, 32)},
    )
    table = Placements.product(*axes)
    assert list(table.num_workers) == [0, 0, 2, 2, 2, 2]
    assert list(table.env_backend) == ["a"] * 4 + ["b"] * 2
    assert list(table.minibatch_rows) == [64, 32] * 3
    values, which = table.distinct("num_workers", "minibatch_rows")
    assert values == [(0, 64), (0, 32), (2, 64), (2, 32)]
    assert [values[w] for w in which] == [(0, 64), (0, 32), (2, 64), (2, 32), (2, 64), (2, 32)]
    some = table.where(table.env_backend == "b")
    assert some.distinct("num_workers", "env_backend")[0] == [(2, "b")]
    # so many values that a lookup table would be larger than the rows are worth
    many = Placements.product(
        {name: range(100) for name in ("num_envs", "num_workers", "num_groups")}
    )
    values, which = many.distinct("num_envs", "num_workers", "num_groups")
    assert values == [(n, n, n) for n in range(100)]
    assert list(which) == list(range(100))


def test_the_cpu_scheme_takes_turns() -> None:
    seconds = {
        ("policy_step", "sampler"): 2.0,
        ("env_step", "sampler"): 3.0,
        ("gae", "learner"): 1.0,
        ("update", "learner"): 4.0,
    }
    spans = at(BY_NAME["cpu"].layout(timing(seconds), first(placements_of(BY_NAME["cpu"]))))
    assert spans["policy_step", "sampler"] == (0.0, 2.0)
    assert spans["env_step", "sampler"] == (0.02, 3.0)  # after the first policy step
    assert spans["gae", "learner"] == (5.0, 1.0)
    assert spans["update", "learner"] == (6.0, 4.0)
    assert spans["wait", "sampler"] == (5.0, 5.0)
    assert spans["wait", "learner"] == (0.0, 5.0)


def test_a_rest_that_does_not_divide_is_costed_at_its_own_size() -> None:
    # 800 rows in minibatches of 64: twelve full ones and one of 32, in each of 3 epochs
    update = works("cpu")["update", "learner"]
    assert update.calls == 39
    assert [(task.op, task.rows, count) for task, count in update.parts] == [
        ("first_update", 64, 1),
        ("update", 64, 35),
        ("update", 32, 3),
    ]


def test_an_update_of_a_single_step_is_its_first() -> None:
    scheme = BY_NAME["cpu"]
    placement = placements_of(scheme).placement(0)
    whole = dataclasses.replace(placement, minibatch_rows=800)
    found = update_rule.make(WORKLOAD.replace(epochs=1), whole)
    assert found is not None and found.calls == 1
    assert [(task.op, task.rows, count) for task, count in found.parts] == [
        ("first_update", 800, 1)
    ]


def test_the_policy_runs_once_per_vector_step_on_all_envs() -> None:
    policy = works("cpu")["policy_step", "sampler"]
    (task, count), (cold, as_often) = policy.parts
    assert (task.rows, count, as_often) == (8, 100, 100)
    step = works("cpu")["env_step", "sampler"].parts[0][0]
    assert cold == dataclasses.replace(step, op="cold_policy_step", engine=task.engine)


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
    found = last_chunk_delay(*(np.array([x]) for x in (sampling, copy, steps, interval)))
    assert found == pytest.approx([delay])


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 33, 50, 60, 99, 100])
def test_many_chunks_follow_the_same_rule_as_one_by_one(interval: int) -> None:
    for sampling, copy in ((10.0, 3.0), (3.0, 10.0), (5.0, 5.0), (5.0, 5.5)):
        free, sampled = 0.0, 0
        while sampled < 100:
            length = min(interval, 100 - sampled)
            sampled += length
            free = max(free, sampling * sampled / 100) + copy * length / 100
        found = last_chunk_delay(*(np.array([x]) for x in (sampling, copy, 100, interval)))
        assert found == pytest.approx([free - sampling])


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
