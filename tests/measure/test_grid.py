"""What a calibration times."""

from autoplace.measure.grid import calibration_tasks
from autoplace.measurement import Task


def test_no_device_is_ever_asked_for_float64():
    """Apple's GPUs have none, and a comparison across devices needs one type."""
    for quick in (False, True):
        tasks = calibration_tasks(("cpu", "mps:0"), 4, quick=quick)
        assert {task.dtype for task in tasks} <= {"float32", Task(op="gae").dtype}
        assert not [task for task in tasks if "64" in task.dtype]
        assert any(task.device == "mps:0" for task in tasks)
