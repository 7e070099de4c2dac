"""Ten minutes on a machine with an accelerator: the gpu tests, a calibration, races, short runs.

    python tests/gpu_check.py --output DIR [--device cuda:0] [--minutes 10]

Needs no network. Everything that is measured is written below DIR; a short table is printed last.
`--device cpu` is a dry run of the same steps where there is no accelerator; its calibration is a
quick one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CATCH = f"{ROOT / 'tests' / 'gpu_check_env.py'}:make_env"

# (name, environment, options): a small perceptron, a wide one, convolutions on 84 x 84 images.
WORKLOADS = (
    ("64x64", "CartPole-v1", ()),
    ("256x256", "Pendulum-v1", ("--hidden-sizes", "256,256", "--minibatch-rows", "512")),
    ("NatureCNN", CATCH, ("--epochs", "4", "--minibatch-rows", "256")),
)
# (name of the run, options)
RUNS = (
    ("cpu", ("--scheme", "cpu")),
    ("hybrid", ("--scheme", "hybrid")),
    ("gpu", ("--scheme", "gpu")),
    ("gpu by graph", ("--scheme", "gpu", "--engine", "graph")),
    ("double-buffer", ("--scheme", "double-buffer")),
    ("async", ("--scheme", "async")),
)
DRY_RUNS = ("cpu", "double-buffer", "async")  # what needs no accelerator
CANDIDATES = 5  # about as many take turns in a race
# The most of all the time that the tests, the calibration, each race and each run may take.
TESTS_SHARE, CALIBRATION_SHARE, RACE_SHARE, RUN_SHARE = 0.3, 0.35, 0.15, 0.1
BUDGET_SHARE = 0.1  # of all the time; environments and networks of images are timed on top of it


@dataclass
class Step:
    """A step of the check and what came of it."""

    name: str
    outcome: str
    seconds: float
    failed: bool = False


class Check:
    """Runs steps one after the other and goes on where one fails."""

    def __init__(self, output: Path, device: str, minutes: float) -> None:
        self.output, self.device = output, device
        self.is_dry = device == "cpu"
        self.end_s = time.monotonic() + 60 * minutes
        self.total_s = 60 * minutes
        self.steps: list[Step] = []
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "AUTOPLACE_HOME": str(output / "home"),
            "AUTOPLACE_TEST_DEVICE": device,
        }

    @property
    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def run(self, name: str, *command: str, share: float = 1.0) -> str | None:
        """Standard output of a command, ``None`` where it failed or there was no time left."""
        limit_s = min(self.left_s, share * self.total_s)
        if limit_s < 5:
            self.steps.append(Step(name, "no time left", 0.0, failed=True))
            return None
        print(f"... {name}", flush=True)
        start_s = time.monotonic()
        log = self.output / f"{name.replace(' ', '-')}.log"
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                env=self.env,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            log.write_bytes((error.stdout or b"") + (error.stderr or b""))
            self.steps.append(Step(name, f"stopped after {limit_s:.0f} s", limit_s, True))
            return None
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
        spent_s = time.monotonic() - start_s
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            self.steps.append(
                Step(name, f"exit code {done.returncode}: {last[0][:90]}", spent_s, True)
            )
            return None
        self.steps.append(Step(name, "done", spent_s))
        return done.stdout

    def describe(self, text: str) -> None:
        """Put what a step found in place of its outcome."""
        self.steps[-1].outcome = text


def check_tests(check: Check) -> None:
    command = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests")
    printed = check.run("gpu tests", *command, share=TESTS_SHARE)
    if printed is not None:
        check.describe(printed.strip().splitlines()[-1])


def check_calibration(check: Check) -> Path | None:
    path = check.output / "calibration.json"
    devices = [word for name in {"cpu", check.device} for word in ("--device", name)]
    envs = [word for _, env, _ in WORKLOADS for word in ("--env", env)]
    printed = check.run(
        "calibrate",
        *("-m", "autoplace", "calibrate", *devices, *envs, "--force", "--json"),
        *(("--quick",) if check.is_dry else ("--budget", f"{BUDGET_SHARE * check.total_s:.0f}")),
        share=CALIBRATION_SHARE,
    )
    if printed is None:
        return None
    result = json.loads(printed)
    (check.output / "crossovers.json").write_text(printed, encoding="utf-8")
    stored = next((check.output / "home").glob("calibrations/*.json"))
    path.write_bytes(stored.read_bytes())
    errors = ", ".join(f"{name} {error:.0%}" for name, error in result["op_error"].items())
    check.describe(f"{len(result['crossovers'])} crossovers; errors {errors}")
    return path


def check_engines(check: Check, calibration: Path) -> None:
    """What the steps take by each engine on the device, over the eager ones."""
    start_s = time.monotonic()
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in json.loads(calibration.read_text(encoding="utf-8"))["measurements"]:
        task = row["task"]
        if task["op"] in ("policy_step", "update") and task.get("device", "cpu") == check.device:
            same = json.dumps({**task, "engine": ""}, sort_keys=True)
            by_engine = times.setdefault((task["op"], same), {})
            by_engine[task.get("engine", "eager")] = statistics.median(row["times_s"])
    ratios: dict[tuple[str, str], list[float]] = {}
    for (op, _), by_engine in times.items():
        for engine in by_engine.keys() - {"eager"} if "eager" in by_engine else ():
            ratios.setdefault((op, engine), []).append(by_engine["eager"] / by_engine[engine])
    found = ", ".join(
        f"{op} {engine} x {min(r):.2f} to {max(r):.2f} ({len(r)} sizes)"
        for (op, engine), r in sorted(ratios.items())
    )
    step = Step("engines", f"speed over eager: {found or 'none was timed'}", 0.0)
    step.seconds = time.monotonic() - start_s
    check.steps.append(step)


def check_race(check: Check, name: str, env: str, options: tuple[str, ...]) -> None:
    seconds = RACE_SHARE * check.total_s / (2 * CANDIDATES)  # beside planning and first turns
    printed = check.run(
        f"compare {name}",
        *("-m", "autoplace", "compare", env, *options, "--seconds", f"{seconds:.1f}", "--json"),
        share=RACE_SHARE,
    )
    if printed is None:
        return
    (check.output / f"compare-{name}.json").write_text(printed, encoding="utf-8")
    result = json.loads(printed)
    shown = [
        f"{row['scheme']} {row['predicted_env_steps_per_s']:,.0f}|"
        f"{row['measured_env_steps_per_s']:,.0f}"
        for row in result["candidates"]
    ]
    check.describe(
        f"regret {result['regret_fraction']:.1%} (noise {result['noise_fraction']:.1%}), "
        f"steps/s predicted|measured: {', '.join(shown)}"
    )


def check_run(check: Check, name: str, options: tuple[str, ...]) -> None:
    given = () if name == "cpu" else ("--device", check.device)
    folder = check.output / f"run-{name.replace(' ', '-')}"
    printed = check.run(
        f"train {name}",
        *("-m", "autoplace", "train", "CartPole-v1", *options, *given, "--no-race"),
        *("--total-steps", "20000", "--run-dir", str(folder), "--json"),
        share=RUN_SHARE,
    )
    if printed is not None:
        last = json.loads(printed.strip().splitlines()[-1])
        dropped = [v["dropped_because"] for v in last["engines"] if v["dropped_because"]]
        check.describe(
            f"{last['env_steps_per_s']:,.0f} steps/s, mean return {last['mean_return']:.0f}"
            + "".join(f"; an engine was dropped: {reason}" for reason in dropped)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("gpu-check"))
    parser.add_argument("--device", default="cuda:0", help="cpu for a dry run")
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)

    check = Check(output, args.device, args.minutes)
    machine = check.run("machine", "-m", "autoplace", "machine", "--json")
    if machine is not None:
        (output / "machine.json").write_text(machine, encoding="utf-8")
        cards = [card["name"] for card in json.loads(machine)["accelerators"] if card["usable"]]
        check.describe(", ".join(cards) or "no usable accelerator")
    check_tests(check)
    calibration = check_calibration(check)
    if calibration is not None:
        check_engines(check, calibration)
    for name, env, options in WORKLOADS:
        check_race(check, name, env, options)
    for name, options in RUNS:
        if not check.is_dry or name in DRY_RUNS:
            check_run(check, name, options)

    rows = [f"{step.name:<20}{step.seconds:6.0f} s  {step.outcome}" for step in check.steps]
    table = "\n".join(rows)
    (output / "summary.txt").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\nwritten to {output}")
    sys.exit(1 if any(step.failed for step in check.steps) else 0)


if __name__ == "__main__":
    main()
