"""What was published of PPO's speed, against plans for machines modelled from other figures.

Of the 49 rows of `ppo_throughput.csv`, 11 name enough to be formed (`cases.py` says what was taken
for what they leave open, and why the other 38 are not). The machines are those of
`calibration/modelled.py`, whose constants come from published times of single operations, copies
and products, never from these rows.
"""

from __future__ import annotations

import pytest

from autoplace.workload import NetworkSpec
from tests.published.cases import (
    CASES,
    CNN,
    CUDA_MACHINES,
    FOLDER,
    MACHINES,
    NOT_FORMED,
    SINGLE_ENV_CASES,
    Case,
    Way,
    env_of,
    machine,
    machines_of,
    mlp,
    planned,
    published_rows,
    rate,
)

AGREEMENT = 0.9  # share of the formed rows in which the plan names the published winner
DESKTOP = "rtx3090-ryzen5950x"
SIZES = {"num_envs": 8, "rollout_steps": 256, "minibatch_rows": 256, "epochs": 10}


def names_the_winner(case: Case) -> bool:
    """On every machine that the row may speak of."""
    return all(
        rate(case, name, case.faster) > rate(case, name, case.slower) for name in machines_of(case)
    )


def test_every_row_is_formed_or_has_its_reason() -> None:
    formed = [case.row for case in CASES]
    assert len(set(formed)) == len(formed) == 11
    assert set(formed) | set(NOT_FORMED) == set(published_rows())
    assert not set(formed) & set(NOT_FORMED)
    assert all(published_rows()[row]["winner"] for row in formed)


def test_the_plan_names_the_published_winner() -> None:
    wrong = [case.row for case in CASES if not names_the_winner(case)]
    assert len(wrong) <= (1 - AGREEMENT) * len(CASES), wrong


def test_the_committed_table_is_of_these_rows() -> None:
    lines = (FOLDER / "table.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("row  machine")
    shown = {line.split()[0] for line in lines[1:] if line.endswith(("  yes", "  no"))}
    assert shown == {case.row for case in CASES}


@pytest.mark.parametrize("case", SINGLE_ENV_CASES, ids=lambda case: case.machine)
def test_a_single_environment_is_not_worth_a_process(case: Case) -> None:
    assert names_the_winner(case)


# --------------------------------------------------------------------------------------------------
# Shapes: what is reported of PPO on many machines


def best(name: str, network: NetworkSpec, schemes: tuple[str, ...], **sizes: int) -> float:
    """Env steps per second of the fastest of these schemes."""
    hyper = {**SIZES, **sizes}
    ways = [Way(scheme=scheme) for scheme in schemes]
    return max(planned(name, network, env_of(5e-5), hyper, way).env_steps_per_s for way in ways)


@pytest.mark.parametrize("name", CUDA_MACHINES)
def test_a_gpu_never_pays_for_a_small_network(name: str) -> None:
    network = mlp(17, (64, 64), 6, continuous=True)
    on_cpu = best(name, network, ("cpu", "double-buffer"), minibatch_rows=64)
    assert on_cpu > best(name, network, ("hybrid", "gpu"), minibatch_rows=64)


@pytest.mark.parametrize("name", CUDA_MACHINES)
def test_convolutions_want_the_gpu(name: str) -> None:
    assert best(name, CNN, ("hybrid", "gpu")) > 2 * best(name, CNN, ("cpu",))


@pytest.mark.parametrize("hidden", [64, 256, 1024])
def test_throughput_has_one_peak_over_threads(hidden: int) -> None:
    network = mlp(17, (hidden, hidden), 6, continuous=True)
    rates = [
        planned(
            DESKTOP,
            network,
            env_of(5e-5),
            SIZES,
            Way(placement={"sample_threads": threads, "learn_threads": threads}),
        ).env_steps_per_s
        for threads in (1, 2, 4, 8, 16, 32)
    ]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert peak < 5  # 32 threads on 16 cores are never best


def test_more_threads_pay_only_for_larger_networks() -> None:
    def threads(hidden: int) -> int:
        network = mlp(17, (hidden, hidden), 6, continuous=True)
        return planned(DESKTOP, network, env_of(5e-5), SIZES, Way()).placement.learn_threads

    assert threads(16) <= threads(64) <= threads(256) <= threads(1024)
    assert threads(16) < threads(1024)


def workers(name: str, step_s: float, num_envs: int = 8) -> int:
    sizes = {**SIZES, "num_envs": num_envs}
    return planned(name, mlp(4, (64, 64), 2), env_of(step_s), sizes, Way()).placement.num_workers


def test_worker_processes_pay_from_a_vector_step_of_about_an_eighth_of_a_millisecond() -> None:
    # Eight environments of 5 us and less take 40 us together, of 50 us and more 400 us.
    assert [workers(DESKTOP, step_s) for step_s in (1e-6, 5e-6)] == [0, 0]
    assert all(workers(DESKTOP, step_s) > 0 for step_s in (5e-5, 1e-4, 1e-3))


@pytest.mark.parametrize("name", MACHINES)
def test_a_slow_environment_gets_a_worker_for_every_core_and_no_more(name: str) -> None:
    cpus = machine(name)[0].machine.usable_cpus
    assert workers(name, 1e-2, num_envs=256) == cpus
