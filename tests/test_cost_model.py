"""The cost model against machines whose costs are known."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
import pytest

from autoplace.cost_model import fit_cost_model
from autoplace.errors import CalibrationError
from autoplace.measurement import Calibration, Episodes, Measurement, Task
from autoplace.physics import physics
from autoplace.workload import EnvSpec, NetworkSpec
from tests.synthetic import GPU, Truth, make_calibration, random_tasks

ENV = EnvSpec.make("Known-v0")
NETWORK = NetworkSpec(observation_size=17, hidden_sizes=(128, 128), action_size=6)


def log_errors(truth: Truth, tasks: list[Task], model: object) -> np.ndarray:
    costs = model.predict(tasks)  # type: ignore[attr-defined]
    return np.array([math.log(costs[task].seconds / truth.seconds(task)) for task in tasks])


@pytest.mark.parametrize(("device", "threads"), [("cpu", 1), ("cpu", 2), (GPU, 1)])
def test_sizes_that_were_never_timed_are_predicted_within_a_few_per_cent(
    device: str, threads: int
) -> None:
    truth = Truth(gpu=True)
    model = fit_cost_model(make_calibration(truth))
    errors = np.abs(
        log_errors(truth, random_tasks(np.random.default_rng(0), device, 120, threads), model)
    )
    assert np.median(errors) < 0.04
    assert np.quantile(errors, 0.9) < 0.15


@pytest.mark.parametrize("threads", [3, 6, 10])
def test_thread_counts_between_the_timed_ones_are_predicted_too(threads: int) -> None:
    truth = Truth()
    model = fit_cost_model(make_calibration(truth, usable_cpus=12))
    errors = np.abs(
        log_errors(truth, random_tasks(np.random.default_rng(6), "cpu", 90, threads), model)
    )
    assert np.median(errors) < 0.05


def test_noise_of_five_per_cent_barely_moves_predictions() -> None:
    truth = Truth()
    rng = np.random.default_rng(5)
    model = fit_cost_model(
        make_calibration(truth, noise=lambda: math.exp(0.05 * rng.standard_normal()))
    )
    errors = np.abs(log_errors(truth, random_tasks(np.random.default_rng(1), "cpu", 90, 1), model))
    assert np.median(errors) < 0.06


@pytest.mark.parametrize("spread", [0.0, 0.03])
def test_samples_a_thousand_times_too_long_do_not_move_predictions(spread: float) -> None:
    truth, moved = Truth(), []
    tasks = random_tasks(np.random.default_rng(2), "cpu", 60, 1)

    def noise(outliers: float, seed: int) -> Callable[[], float]:
        rng, chosen = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        return lambda: (
            math.exp(spread * rng.standard_normal())
            * (1000.0 if chosen.random() < outliers else 1.0)
        )

    for seed in (7, 20, 21):
        clean, spoilt = (
            fit_cost_model(make_calibration(truth, samples=41, noise=noise(share, seed)))
            for share in (0.0, 0.05)
        )
        first, second = clean.predict(tasks), spoilt.predict(tasks)
        moved += [abs(math.log(second[task].seconds / first[task].seconds)) for task in tasks]
    assert np.quantile(moved, 0.99) <= 0.01 and max(moved) <= 0.015


def test_tasks_that_waited_for_a_core_all_along_do_not_spoil_others_of_their_kind() -> None:
    truth = Truth()
    calibration = make_calibration(truth)
    products = [m for m in calibration.measurements if m.task.op == "matmul"]
    stuck = [
        dataclasses.replace(m, times_s=tuple(1000 * t for t in m.times_s)) for m in products[::12]
    ]
    assert len(stuck) >= 5
    tasks = [t for t in random_tasks(np.random.default_rng(3), "cpu", 60, 1) if t.op == "matmul"]
    errors = np.abs(log_errors(truth, tasks, fit_cost_model(calibration.with_measurements(stuck))))
    assert np.median(errors) < 0.05


def test_intervals_hold_for_most_sizes_that_were_never_timed() -> None:
    truth = Truth(gpu=True)
    held = []
    # What one calibration has wrong of a rate, all its predictions share.
    for seed in range(6):
        rng = np.random.default_rng(seed)
        model = fit_cost_model(
            make_calibration(truth, noise=lambda rng=rng: math.exp(0.05 * rng.standard_normal()))
        )
        tasks = random_tasks(rng, "cpu", 60, 1)
        costs = model.predict(tasks)
        held += [costs[t].low_s <= truth.seconds(t) <= costs[t].high_s for t in tasks]
    assert 0.75 <= np.mean(held) <= 0.99


def test_a_task_that_was_timed_gets_its_median_and_says_measured() -> None:
    truth = Truth()
    calibration = make_calibration(truth)
    task = next(m.task for m in calibration.measurements if m.task.op == "update")
    cost = fit_cost_model(calibration).predict([task])[task]
    assert cost.seconds == pytest.approx(truth.seconds(task))
    assert cost.source == "measured"
    assert cost.low_s < cost.seconds < cost.high_s


def test_a_first_step_that_was_never_timed_goes_by_the_other_steps() -> None:
    calibration = make_calibration(Truth())
    kept = tuple(m for m in calibration.measurements if m.task.op != "first_update")
    model = fit_cost_model(dataclasses.replace(calibration, measurements=kept))
    step = next(m.task for m in kept if m.task.op == "update")
    first = dataclasses.replace(step, op="first_update")
    costs = model.predict([step, first])
    # What is done once is more than nothing, and known less well than a step that was timed.
    own, other = (physics(model.primitives, task) for task in (first, step))
    more = sum(own.flat) / sum(other.flat)
    assert more > 1.05
    assert costs[first].seconds == pytest.approx(more * costs[step].seconds)
    assert costs[first].high_s / costs[first].low_s > costs[step].high_s / costs[step].low_s
    # Where it was timed, that counts.
    timed = fit_cost_model(calibration).predict([first])[first]
    assert timed.source == "measured"


def test_far_outside_of_what_was_timed_the_source_says_so_and_the_interval_is_wider() -> None:
    model = fit_cost_model(make_calibration(Truth()))
    inside = Task(op="update", network=NETWORK, rows=300)
    outside = dataclasses.replace(inside, rows=300_000)
    costs = model.predict([inside, outside])
    assert costs[inside].source == "interpolated"
    assert costs[outside].source == "extrapolated"

    def width(task: Task) -> float:
        return costs[task].high_s / costs[task].low_s

    assert width(outside) - 1 > 1.5 * (width(inside) - 1)


def test_extrapolation_follows_the_physics() -> None:
    truth = Truth()
    model = fit_cost_model(make_calibration(truth))
    task = Task(op="matmul", shape=(16384, 4096, 4096))
    cost = model.predict([task])[task]
    assert cost.seconds == pytest.approx(truth.seconds(task), rel=0.1)


def test_more_threads_and_a_faster_device_cost_less() -> None:
    model = fit_cost_model(make_calibration(Truth(gpu=True)))
    tasks = [
        Task(op="update", network=NETWORK, rows=4000, device=device, threads=threads)
        for device, threads in (("cpu", 1), ("cpu", 2), (GPU, 1))
    ]
    one, two, gpu = (model.predict(tasks)[task].seconds for task in tasks)
    assert one > two > gpu


def test_an_environment_between_two_timed_numbers_is_interpolated() -> None:
    calibration = make_calibration(Truth(), env=ENV, env_step_s=1e-4)
    task = Task(op="env_step", env=ENV, backend="sync", num_envs=20)
    cost = fit_cost_model(calibration).predict([task])[task]
    assert cost.seconds == pytest.approx(5e-6 + 20e-4, rel=0.02)
    assert cost.source == "interpolated"


def with_env_steps(calibration: Calibration, **known: object) -> Calibration:
    return dataclasses.replace(
        calibration,
        measurements=tuple(
            dataclasses.replace(m, **known) if m.task.op == "env_step" else m  # type: ignore[arg-type]
            for m in calibration.measurements
        ),
    )


def test_episodes_are_as_long_as_in_a_run() -> None:
    calibration = make_calibration(Truth(), env=ENV, env_step_s=1e-4)
    episodes = Episodes(end_s=2e-4, steps=10.0, timed_ends=0.1, limit=100)
    model = fit_cost_model(with_env_steps(calibration, episodes=episodes))
    before = fit_cost_model(calibration)
    for number in (8, 20):  # timed, and in between
        task = Task(op="env_step", env=ENV, backend="sync", num_envs=number)
        cost, timed = model.predict([task])[task], before.predict([task])[task]
        # 0.1 ends per step when it was timed, 0.0391 in a run.
        saved_s = number * 2e-4 * (0.1 - 0.0390865)
        assert cost.seconds == pytest.approx(timed.seconds - saved_s, rel=1e-5)
        assert cost.high_s > timed.seconds  # the interval reaches as far as what was timed
    # Where the median of what was timed saw no end, they are added.
    unseen = dataclasses.replace(episodes, timed_ends=0.0)
    more = fit_cost_model(with_env_steps(calibration, episodes=unseen)).predict([task])[task]
    assert more.seconds == pytest.approx(timed.seconds + number * 2e-4 * 0.0390865, rel=1e-5)


def test_a_backend_that_saw_too_few_episodes_goes_by_another() -> None:
    calibration = make_calibration(Truth(), env=ENV, env_step_s=1e-4)
    episodes = Episodes(end_s=2e-4, steps=10.0, timed_ends=0.1, limit=100)
    calibration = with_env_steps(calibration, episodes=episodes)
    other = Task(op="env_step", env=ENV, backend="process", workers=1, num_envs=8)
    timed = Measurement(task=other, times_s=(1e-3,) * 5)
    both = dataclasses.replace(calibration, measurements=(*calibration.measurements, timed))
    cost = fit_cost_model(both).predict([other])[other]
    assert cost.seconds == pytest.approx(1e-3 - 8 * 2e-4 * (0.1 - 0.0390865), rel=1e-5)


def test_policy_steps_are_as_cold_as_behind_the_environment() -> None:
    calibration = make_calibration(Truth(gpu=True), env=ENV)
    cold_s = (("numpy", 3e-6), ("eager", 2e-5))
    model = fit_cost_model(with_env_steps(calibration, cold_s=cold_s))
    cold = Task(op="cold_policy_step", env=ENV, backend="sync", num_envs=6, engine="numpy")
    on_gpu, graph = (
        dataclasses.replace(cold, device=GPU, engine=name) for name in ("eager", "graph")
    )
    costs = model.predict([cold, on_gpu, graph])
    assert costs[cold].seconds == pytest.approx(3e-6)
    assert costs[on_gpu].seconds == pytest.approx(2e-5)  # the host issues it
    assert costs[graph].seconds == pytest.approx(3e-6)  # was not timed: as little as the best
    assert costs[graph].high_s / costs[graph].low_s > costs[cold].high_s / costs[cold].low_s
    nothing = fit_cost_model(calibration).predict([cold])[cold]
    assert nothing.seconds < 1e-8
    with pytest.raises(CalibrationError, match="autoplace calibrate --env Other-v0"):
        model.predict([dataclasses.replace(cold, env=EnvSpec.make("Other-v0"))])


def test_fewer_environments_in_as_many_workers_still_have_to_be_handed_over() -> None:
    calibration = make_calibration(Truth())
    times = {("sync", 0, 16): 160e-6, ("process", 2, 16): 130e-6, ("joint", 2, 16): 120e-6}
    timed = tuple(
        Measurement(
            task=Task(op="env_step", env=ENV, backend=backend, workers=workers, num_envs=number),
            times_s=(seconds,) * 5,
        )
        for (backend, workers, number), seconds in times.items()
    )
    both = dataclasses.replace(calibration, measurements=(*calibration.measurements, *timed))

    def predicted(number: int, calibration: Calibration) -> dict[str, float]:
        tasks = [
            Task(op="env_step", env=ENV, backend=backend, workers=workers, num_envs=number)
            for backend, workers, _ in times
            if any(m.task.backend == backend for m in calibration.measurements)
        ]
        costs = fit_cost_model(calibration).predict(tasks)
        return {str(task.backend): costs[task].seconds for task in tasks}

    # A process steps 2 instead of 8, 10 us each: 60 us less, and 50 or 40 of handing over remain.
    assert predicted(4, both) == pytest.approx({"sync": 40e-6, "process": 70e-6, "joint": 60e-6})
    assert predicted(32, both)["process"] == pytest.approx(210e-6)
    # Without the environment's own time nobody knows how much of it is handing over.
    apart = dataclasses.replace(calibration, measurements=(*calibration.measurements, timed[1]))
    assert predicted(4, apart) == pytest.approx({"process": 130e-6})
    assert predicted(32, apart) == pytest.approx({"process": 260e-6})


def test_an_environment_that_was_never_timed_names_the_next_command() -> None:
    model = fit_cost_model(make_calibration(Truth()))
    with pytest.raises(CalibrationError, match="autoplace calibrate --env Known-v0"):
        model.predict([Task(op="env_step", env=ENV, backend="sync", num_envs=8)])


def test_a_device_that_was_never_timed_names_the_next_command() -> None:
    model = fit_cost_model(make_calibration(Truth()))
    with pytest.raises(CalibrationError, match="cuda:0 was not calibrated"):
        model.predict([Task(op="update", device=GPU, network=NETWORK, rows=64)])


def test_a_calibration_without_basic_timings_is_refused() -> None:
    calibration = make_calibration(Truth())
    bare = dataclasses.replace(calibration, measurements=calibration.measurements[:3])
    with pytest.raises(CalibrationError, match="run `autoplace calibrate` again"):
        fit_cost_model(bare)


def test_fitting_twice_gives_the_same_model() -> None:
    calibration = make_calibration(Truth(gpu=True))
    tasks = random_tasks(np.random.default_rng(4), "cpu", 30, 1)
    first = fit_cost_model(calibration).predict(tasks)
    assert fit_cost_model(calibration).predict(tasks) == first


@pytest.mark.bench
def test_fitting_takes_less_than_a_second() -> None:
    calibration = make_calibration(Truth(gpu=True))
    start_s = time.perf_counter()
    fit_cost_model(calibration)
    assert time.perf_counter() - start_s < 1.0
