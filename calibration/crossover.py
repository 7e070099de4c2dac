"""Times matrix products and transfers on this machine and prints where the crossover is.

A small look at what `autoplace calibrate` does in full. Run: python calibration/crossover.py
"""

import argparse

from autoplace import device
from autoplace.measure.probes import build_probe
from autoplace.measure.timing import Series, run_probe
from autoplace.measurement import Measurement, Task

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)


def measure(task: Task, time_limit_s: float) -> Measurement:
    """Time one task: warmed up, waited for, repeated until its median is known."""
    series = Series(tasks=(task,))
    with device.torch_threads(task.threads):
        run_probe(build_probe(task), series, time_limit_s=time_limit_s)
    return series.measurements()[0]


def show(name: str, measurement: Measurement) -> None:
    task = measurement.task
    error = 100 * measurement.error_fraction
    print(f"{name:32}{1e6 * measurement.median_s:12.1f} us  +- {error:.1f} %  ({task.device})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-size", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each measurement")
    parser.add_argument("--threads", type=int, nargs=2, default=None, metavar=("FEW", "MANY"))
    args = parser.parse_args()
    accelerators = device.accelerator_devices()

    if accelerators:
        sides = [
            Task(op="matmul", shape=(1, 1, 1)),
            Task(op="matmul", shape=(1, 1, 1), device=accelerators[0]),
        ]
    else:
        from autoplace import detect_machine

        few, many = args.threads or (1, detect_machine(accelerators=False).usable_cpus)
        sides = [
            Task(op="matmul", shape=(1, 1, 1), threads=few),
            Task(op="matmul", shape=(1, 1, 1), threads=many),
        ]
    names = [f"{side.device}, {side.threads} thread(s)" for side in sides]
    print(f"square products: {names[0]} against {names[1]}")
    crossover = None
    for size in [size for size in SIZES if size <= args.max_size]:
        times = []
        for side in sides:
            task = Task(
                op="matmul", device=side.device, threads=side.threads, shape=(size, size, size)
            )
            measurement = measure(task, args.seconds)
            show(f"{size} x {size}, {side.threads} thread(s)", measurement)
            times.append(measurement.median_s)
        crossover = crossover or size if times[1] < times[0] else None
    if crossover is None:
        print(f"{names[1]} is not faster at any of these sizes")
    else:
        print(f"{names[1]} is faster from {crossover} x {crossover} on")

    for accelerator in accelerators:
        for nbytes in (256, 1 << 16, 1 << 20, 1 << 24):
            for direction in ("h2d", "d2h"):
                for pinned in (True, False):
                    task = Task(
                        op="copy",
                        device=accelerator,
                        direction=direction,
                        pinned=pinned,
                        shape=(nbytes,),
                    )
                    kind = "pinned" if pinned else "pageable"
                    show(f"{direction} {kind} {nbytes} B", measure(task, args.seconds))


if __name__ == "__main__":
    main()
