"""Does a calibration notice other programs here? Alternating tries, with and without a load.

    python -m tests.benchmarks.sentinel [--tries 20] [--seconds 10] [--seed 0]

In every second try processes that compute keep half or all of the CPUs busy for 20 to 60 % of the
calibration, from a random moment on. Printed is what each try said; nothing else should run
meanwhile.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import threading
import time

from autoplace.machine import detect_machine
from autoplace.measure.calibrate import calibrate
from autoplace.measurement import Calibration

SPIN = "while True: pass"


def with_load(budget_s: float, usable: int, seed: int) -> tuple[Calibration, str]:
    """A quick calibration beside a load, and what that load was."""
    rng = random.Random(seed)
    length_s = rng.uniform(0.2, 0.6) * budget_s
    start_s = rng.uniform(0.0, 0.9 * budget_s - length_s)
    cores = rng.choice((-(-usable // 2), usable))
    over = threading.Event()

    def disturb() -> None:
        if over.wait(start_s):
            return
        partners = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(cores)]
        over.wait(length_s)
        for partner in partners:
            partner.kill()
            partner.wait()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        calibration = calibrate(devices="cpu", budget_s=budget_s, quick=True)
    finally:
        over.set()
        thread.join()
    return calibration, f"{cores} cores busy from {start_s:.1f} s to {start_s + length_s:.1f} s"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each calibration")
    parser.add_argument("--seed", type=int, default=0, help="of the loads")
    args = parser.parse_args()
    usable = detect_machine().usable_cpus
    flagged = {True: 0, False: 0}
    for index in range(args.tries):
        is_loaded = index % 2 == 1
        if is_loaded:
            calibration, load = with_load(args.seconds, usable, args.seed + index)
        else:
            load = "no load"
            calibration = calibrate(devices="cpu", budget_s=args.seconds, quick=True)
        said = [w.split(":")[0] for w in calibration.warnings if "slower than at other times" in w]
        flagged[is_loaded] += bool(said)
        print(f"{load:<44}{said[0] if said else '-'}", flush=True)
        time.sleep(1.0)
    loaded = args.tries // 2
    print(f"\nloads noticed: {flagged[True]} of {loaded}")
    print(f"false alarms: {flagged[False]} of {args.tries - loaded}")


if __name__ == "__main__":
    main()
