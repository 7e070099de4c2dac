"""What a calibration times."""

import pytest

from autoplace.device_names import CPU
from autoplace.engines import EAGER, NUMPY
from autoplace.measure.grid import calibration_tasks
from autoplace.measurement import Task


def test_no_device_is_ever_asked_for_float64():
    """Apple's GPUs have none, and a comparison across devices needs one type."""
    for quick in (False, True):
        tasks = calibration_tasks(("cpu", "mps:0"), 4, quick=quick)
        assert {task.dtype for task in tasks} <= {"float32", Task(op="gae").dtype}
        assert not [task for task in tasks if "64" in task.dtype]
        assert any(task.device == "mps:0" for task in tasks)


@pytest.mark.parametrize("quick", [False, True])
def test_products_are_timed_by_torch_on_every_device_and_by_numpy_on_the_cpu(quick):
    engines = {CPU: (EAGER, NUMPY), "cuda:0": (EAGER, "graph")}
    tasks = calibration_tasks((CPU, "cuda:0"), 4, engines=engines, quick=quick)
    products = [task for task in tasks if task.op == "matmul"]
    assert {(t.device, t.engine) for t in products} == {
        (CPU, EAGER), (CPU, NUMPY), ("cuda:0", EAGER)
    }  # fmt: skip
    # A single row, widths that fill no vector, and the ends of the threads, by each.
    for on, engine in {(t.device, t.engine) for t in products}:
        shapes = [t.shape for t in products if (t.device, t.engine) == (on, engine)]
        assert any(n % 8 for _, _, n in shapes)
        assert engine != NUMPY or sum(m == 1 for m, _, _ in set(shapes)) >= 2
    assert {t.threads for t in products if t.engine == NUMPY} >= {1, 4}
    assert len(tasks) == len(set(tasks))
