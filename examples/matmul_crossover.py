"""The classic benchmark, done wrongly and rightly: one large matrix product on CPU and accelerator.

An accelerator works behind the host. Reading the clock without waiting for it times how fast work
can be *asked for*, which is how impossible figures come about. The right way waits, warms up first
and takes the median of several runs.

Run: python examples/matmul_crossover.py
"""

import argparse
import statistics

import torch

from autoplace import device


def wrongly(size, on):
    """One cold call, and the clock read without waiting."""
    a, b = torch.randn(size, size, device=on), torch.randn(size, size, device=on)
    start_s = device.now()
    a @ b
    return device.now() - start_s


def rightly(size, on, repeats=5):
    """Warmed up, waited for, the median of several."""
    a, b = torch.randn(size, size, device=on), torch.randn(size, size, device=on)
    a @ b
    device.synchronize(on)
    times = []
    for _ in range(repeats):
        start_s = device.now()
        a @ b
        device.synchronize(on)
        times.append(device.now() - start_s)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    accelerators = device.accelerator_devices()
    # 10,000 is the size people use; without an accelerator it would take minutes for nothing.
    parser.add_argument("--size", type=int, default=10_000 if accelerators else 2_000)
    args = parser.parse_args()

    flops = 2 * args.size**3
    for on in ("cpu", *accelerators):
        for how, time in (("wrongly", wrongly), ("rightly", rightly)):
            seconds = time(args.size, on)
            print(
                f"{args.size} x {args.size} on {on}, timed {how}: {1e3 * seconds:10.3f} ms, "
                f"{flops / seconds / 1e9:12,.0f} GFLOP/s"
            )

    if not accelerators:
        print("no accelerator here: on the CPU a call has ended when it returns, so both agree")
        return
    print("\nsmall products, timed rightly:")
    for size in (16, 32, 64, 128, 256, 512, 1024, 2048):
        on_cpu, there = rightly(size, "cpu"), rightly(size, accelerators[0])
        faster = "cpu" if on_cpu < there else accelerators[0]
        print(
            f"{size:5}: cpu {1e6 * on_cpu:10.1f} us, {accelerators[0]} {1e6 * there:10.1f} us"
            f" -> {faster}"
        )


if __name__ == "__main__":
    main()
