"""What real runs keep in host memory at most, beside what their plans said (Linux).

    python -m tests.benchmarks.memory_estimates

Counted is what the run's processes have to themselves or share with each other, files left out, on
top of what the planning process had before.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from autoplace import store
from autoplace.envs import describe
from autoplace.measure.env_start import measure_env_start
from autoplace.planner.memory import EnvMemory, estimate_bytes
from autoplace.planner.search import make_plan
from autoplace.workload import EnvSpec

REFERENCE = Path(__file__).parents[2] / "calibration" / "reference-2-cores.json"
# env, scheme, what else is fixed
CASES = (
    ("CartPole-v1", "cpu", {}),
    ("CartPole-v1", "cpu", {"engine": "eager"}),
    ("CartPole-v1", "cpu", {"env_backend": "process", "num_workers": 2}),
    ("CartPole-v1", "double-buffer", {}),
    ("CartPole-v1", "async", {}),
    ("Hopper-v5", "async", {"env_backend": "sync"}),
)
# num_envs, rollout_steps, minibatch_rows, hidden_sizes: nothing much; the rollout; the weights
PONG = ("ALE/Pong-v5", "cpu", {"engine": "eager", "env_backend": "sync", "num_workers": 0})
SIZES = ((8, 128, 128, (64, 64)), (64, 2048, 4096, (64, 64)), (8, 128, 128, (1024, 1024)))
PONG_SIZES = ((8, 128, 256, (512,)), (32, 64, 64, (512,)))
ITERATIONS = 4
REPEATS = 3
POLL_S = 0.002


def run(row: str) -> None:
    """Plan, say the estimate, wait for a line, and run."""
    env, scheme, fixed, *sizes = json.loads(row)
    num_envs, rollout_steps, minibatch_rows, hidden_sizes = sizes
    workload = describe(
        env,
        num_envs=num_envs,
        rollout_steps=rollout_steps,
        minibatch_rows=minibatch_rows,
        hidden_sizes=tuple(hidden_sizes),
    )
    # What CartPole's steps cost serves every environment and backend: no time matters here.
    sized = describe("CartPole-v1").network
    timed = dataclasses.replace(workload, env=EnvSpec.make("CartPole-v1"), network=sized)
    plan = make_plan(store.read_calibration(REFERENCE), timed, scheme=scheme)
    placement = dataclasses.replace(plan.placement, **fixed)
    chosen = dataclasses.replace(plan.chosen, placement=placement)
    plan = dataclasses.replace(plan, workload=workload, chosen=chosen)
    (start,) = measure_env_start(workload.env)
    held = EnvMemory(process_bytes=start.process_bytes, env_bytes=start.env_bytes)
    print(estimate_bytes(workload, plan.placement, held)["cpu"], flush=True)
    sys.stdin.readline()
    from autoplace.train import train

    with tempfile.TemporaryDirectory() as folder:
        train(
            plan,
            total_steps=ITERATIONS * workload.hyperparameters.rollout_rows,
            run_dir=Path(folder) / "run",
        )


def held_bytes(root: psutil.Process) -> int:
    """Memory of a process and its children, of no file; what they share counts once."""
    own, shared = 0, 0
    try:
        for process in (root, *root.children(recursive=True)):
            parent = process.parent()
            if process != root and parent and process.cmdline() == parent.cmdline():
                continue  # just forked, it still has its parent's pages
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name == "RssAnon":
                    own += 1024 * int(value.split()[0])
                elif name == "RssShmem":  # the process that learns sees all of it
                    shared = max(shared, 1024 * int(value.split()[0]))
    except (psutil.Error, OSError):  # one of them has just ended
        return 0
    return own + shared


def measured(command: list[str]) -> tuple[int, int]:
    """What a run was estimated to hold, and the most that it did, in bytes."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        estimate, root = int(child.stdout.readline()), psutil.Process(child.pid)
        while not (before := held_bytes(root)):  # what timed an environment may just be ending
            time.sleep(POLL_S)
        child.stdin.write("\n")
        child.stdin.flush()
        peak = 0
        while child.poll() is None:
            peak = max(peak, held_bytes(root))
            time.sleep(POLL_S)
    return estimate, peak - before


def main() -> None:
    """Measure every scheme with every size."""
    cases = [*itertools.product(CASES, SIZES), *((PONG, sizes) for sizes in PONG_SIZES)]
    for case, sizes in cases:
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.memory_estimates",
            json.dumps((*case, *sizes)),
        ]
        found = [measured(command) for _ in range(REPEATS)]
        estimate, added = (int(statistics.median(values)) for values in zip(*found, strict=True))
        name = " ".join((*case[:2], *map(str, case[2].values())))
        print(
            f"{name:<34} {sizes!s:<32} {added / 2**20:6.0f} MiB, estimated "
            f"{estimate / 2**20:6.0f}, ratio {estimate / added:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1])
    else:
        main()
