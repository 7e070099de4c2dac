"""The pieces that costs are made of."""

from __future__ import annotations

import math

import pytest

from autoplace.engines import NUMPY
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.physics import Curve, Matmul, Primitives, physics
from autoplace.rates import fit_primitives
from autoplace.workload import NetworkSpec
from tests.synthetic import Truth, make_calibration


def test_a_curve_passes_through_what_was_timed_and_bounds_what_lies_between() -> None:
    # 1 s for each of the first 100, then 3 s each: a cache was left at 100.
    sizes = (10.0, 50.0, 200.0, 400.0)
    truth = {size: size if size <= 100 else 100 + 3 * (size - 100) for size in range(1, 1001)}
    curve = Curve(sizes, tuple(float(truth[int(size)]) for size in sizes))
    for size in sizes:
        assert curve(size) == (pytest.approx(truth[int(size)]), pytest.approx(1.0))
    for size in range(10, 400):
        seconds, factor = curve(size)
        assert seconds / factor <= truth[size] * 1.0001
        assert truth[size] <= seconds * factor * 1.0001
    assert curve(30)[0] == pytest.approx(30)  # only one line passes there
    # Beyond, the last two sizes say how it goes on.
    assert curve(1000)[0] == pytest.approx(truth[1000])


def made_of(shapes: dict[tuple[int, int, int], float], engine: str) -> list[Measurement]:
    return [
        Measurement(task=Task(op="matmul", shape=shape, engine=engine), times_s=(seconds,))
        for shape, seconds in shapes.items()
    ]


def products(model: Matmul) -> dict[tuple[int, int, int], float]:
    sizes = (2, 8, 17, 64, 100, 300)
    shapes = [(m, k, n) for m in sizes for k in (8, 128) for n in (*sizes, 5, 33)]
    shapes += [(1, 64, 64), (1, 512, 512)]
    return {shape: model.fixed_s + model.work_s(*shape) for shape in shapes}


def test_blocks_of_columns_and_single_rows_are_found() -> None:
    truth = Matmul(1e-6, 1e11, 1e10, 4.0, 1.0, block=16.0, vector_bytes_per_s=5e10)
    base = make_calibration(Truth())
    calibration = base.with_measurements(made_of(products(truth), NUMPY))
    found = fit_primitives(calibration).numpy_matmul["cpu", 1]
    assert found.block == 16.0
    assert found.flops_per_s == pytest.approx(1e11, rel=0.02)
    assert found.vector_bytes_per_s == pytest.approx(5e10, rel=0.02)
    # 17 columns are two blocks, 16 are one.
    assert found.work_s(64, 128, 17) == pytest.approx(
        found.work_s(64, 128, 32) * (1 + 1 / 17) / (1 + 1 / 32), rel=0.02
    )


def test_steps_of_an_engine_use_its_own_products() -> None:
    base = make_calibration(Truth())
    slow = Matmul(1e-6, 1e9, 1e10, 4.0, 1.0)
    both = fit_primitives(base.with_measurements(made_of(products(slow), NUMPY)))
    network = NetworkSpec(observation_size=64, hidden_sizes=(256, 256), action_size=4)

    def seconds(primitives: Primitives, engine: str) -> float:
        task = Task(op="update", network=network, rows=256, engine=engine)
        parts = physics(primitives, task)
        return parts.total_s([1.0] * len(parts.flat))

    assert seconds(both, "eager") == seconds(fit_primitives(base), "eager")
    assert seconds(both, NUMPY) > 3 * seconds(both, "eager")
    assert seconds(fit_primitives(base), NUMPY) == seconds(fit_primitives(base), "eager")


def test_a_streaming_size_between_two_caches_is_interpolated() -> None:
    from autoplace.cost_model import fit_cost_model

    times = {4096: 1e-6, 16384: 4e-6, 65536: 1.6e-5, 262144: 2.6e-4, 1048576: 1.05e-3}
    base = make_calibration(Truth())
    timed = [
        Measurement(task=Task(op="elementwise", shape=(size,)), times_s=(seconds,) * 20)
        for size, seconds in times.items()
    ]
    others = [m for m in base.measurements if m.task.op != "elementwise"]
    model = fit_cost_model(Calibration(machine=base.machine, measurements=(*others, *timed)))
    between = Task(op="elementwise", shape=(120000,))
    cost = model.predict([between])[between]
    assert cost.source == "interpolated"
    # If the cache ends right after 65536, or right before 262144.
    assert cost.low_s < 4.4e-5 < 8e-5 < cost.high_s
    inside = Task(op="elementwise", shape=(8192,))
    cost = model.predict([inside])[inside]
    assert cost.seconds == pytest.approx(2e-6, rel=0.01)
    assert math.log(cost.high_s / cost.low_s) < 0.2
