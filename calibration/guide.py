"""Compares a published guide to placing PPO with the plans for the machine it was written on.

    python -m calibration.guide > calibration/guide.txt

The guide (RTX 3090, Ryzen 9 5950X) names neither its environments nor its rollouts. Taken here: 17
observations, 6 continuous actions, 32 environments of 50 us a step, rollouts of 1,024 steps, 10
epochs; minibatches as the guide has them, 2,048 rows on the CPU and 1,024 on the GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from autoplace.cost_model import CostModel, fit_cost_model
from autoplace.measurement import Calibration, Task
from autoplace.planner.plan import Candidate
from autoplace.planner.schemes import SCHEMES
from autoplace.planner.search import make_plan
from autoplace.store import read_calibration
from autoplace.whatif import given_steps, with_steps
from autoplace.workload import EnvSpec, Hyperparameters, ImageSpec, NetworkSpec, Workload

MACHINE = Path(__file__).parent / "modelled-rtx3090-ryzen5950x.json"
ENV, ATARI = EnvSpec.make("Guide-v0"), EnvSpec.make("Guide-Atari-v0")
ATARI_STEP_S = 4 / 4893  # row A61 of tests/published/ppo_throughput.csv: 4 frames in a loop
MINIBATCH_ROWS = {"cpu": 2048}
GPU_MINIBATCH_ROWS = 1024
IN_TURNS = ("cpu", "hybrid", "gpu")
OVERLAPPED = ("double-buffer", "async")


class Guide:
    """Plans for the guide's machine."""

    def __init__(self, num_envs: int, rollout_steps: int, env_step_s: float) -> None:
        self.num_envs, self.rollout_steps = num_envs, rollout_steps
        calibration = read_calibration(MACHINE)
        for env, step_s in ((ENV, env_step_s), (ATARI, ATARI_STEP_S)):
            steps = [
                measurement
                for number in sorted({1, 8, num_envs})
                for measurement in given_steps(env, step_s, calibration, number)
            ]
            calibration = with_steps(calibration, env, steps)
        self.calibration: Calibration = calibration
        self.model: CostModel = fit_cost_model(calibration)

    def workload(
        self, scheme: str, *, hidden: int = 64, observations: int = 17, atari: bool = False
    ) -> Workload:
        if atari:
            image = ImageSpec(key="", height=84, width=84, channels=4)
            network = NetworkSpec(
                observation_size=image.size, hidden_sizes=(), action_size=6, images=(image,)
            )
        else:
            network = NetworkSpec(
                observation_size=observations,
                hidden_sizes=(hidden, hidden),
                action_size=6,
                continuous=True,
            )
        hyper = Hyperparameters(
            num_envs=8 if atari else self.num_envs,
            rollout_steps=128 if atari else self.rollout_steps,
            minibatch_rows=256 if atari else MINIBATCH_ROWS.get(scheme, GPU_MINIBATCH_ROWS),
            hidden_sizes=network.hidden_sizes,
        )
        return Workload(
            env=ATARI if atari else ENV, network=network, hyperparameters=hyper, action_bytes=24
        )

    def best(
        self, scheme: str, placement: dict[str, object] | None = None, **sizes: int | bool
    ) -> Candidate:
        """The fastest placement of a scheme, with what ``placement`` holds fixed."""
        return make_plan(
            self.calibration,
            self.workload(scheme, **sizes),  # type: ignore[arg-type]
            scheme=scheme,
            placement=placement,
            model=self.model,
        ).chosen

    def seconds(self, task: Task) -> float:
        return self.model.predict([task])[task].seconds


def _known(names: tuple[str, ...]) -> list[str]:
    return [scheme.name for scheme in SCHEMES if scheme.name in names]


def _ranking(
    guide: Guide,
    names: tuple[str, ...],
    placement: dict[str, object] | None = None,
    **sizes: int,
) -> list[tuple[str, float]]:
    """Schemes with their env steps/s, the fastest first."""
    rates = {name: guide.best(name, placement, **sizes).env_steps_per_s for name in _known(names)}
    return sorted(rates.items(), key=lambda entry: -entry[1])


def _verdict(agrees: bool) -> str:
    return "yes" if agrees else "no"


def widths(guide: Guide) -> Iterator[tuple[str, str, str]]:
    """Which scheme is the fastest for a hidden width."""
    claims = (
        (64, "cpu", "about 15 % ahead"),
        (128, "hybrid", "about 40 % ahead"),
        (256, "gpu", "about 25 % ahead"),
        (512, "async", ""),
        (1024, "async", ""),
    )
    for hidden, scheme, margin in claims:
        ranking = _ranking(guide, (*IN_TURNS, "async"), hidden=hidden)
        in_turns = [entry for entry in ranking if entry[0] in IN_TURNS]
        shown = ", ".join(f"{name} {value:,.0f}" for name, value in ranking)
        found = f"{_lead(ranking)} ({shown} env steps/s)"
        if in_turns[0] != ranking[0]:
            found += f"; of those that take turns {_lead(in_turns)}"
        yield (
            f"hidden {hidden}: {scheme} {margin}".strip(),
            found,
            _verdict(ranking[0][0] == scheme),
        )


def _lead(ranking: list[tuple[str, float]]) -> str:
    (first, rate), (second, next_rate) = ranking[:2]
    return f"{first}, {rate / next_rate - 1:.0%} ahead of {second}"


def wide_observations(guide: Guide) -> Iterator[tuple[str, str, str]]:
    rates = dict(_ranking(guide, IN_TURNS, observations=1200))
    on_gpu = max(rates["hybrid"], rates["gpu"])
    yield (
        "observations over 1,000 wide: GPU even for small networks",
        f"1,200 wide, hidden 64: GPU {on_gpu / rates['cpu'] - 1:+.0%} against cpu",
        _verdict(on_gpu > rates["cpu"]),
    )


def intervals(guide: Guide) -> Iterator[tuple[str, str, str]]:
    steps = guide.rollout_steps
    rates = {
        interval: guide.best(
            "hybrid", {"transfer_interval_steps": interval}, hidden=128
        ).env_steps_per_s
        for interval in (1, 8, 32, 64, 128, 200, 350, 500, steps)
    }
    best = max(rates, key=lambda interval: rates[interval])
    shown = ", ".join(f"{interval}: {rate:,.0f}" for interval, rate in rates.items())
    yield (
        "transfer interval of 200 to 500 steps best",
        f"{best} steps best of hybrid, hidden 128 ({shown} env steps/s)",
        _verdict(200 <= best <= 500),
    )
    yield (
        "whole trajectories instead of single steps: +35 %",
        f"chunks of {steps} steps {rates[steps] / rates[1] - 1:+.0%} against chunks of 1",
        _verdict(0.25 <= rates[steps] / rates[1] - 1 <= 0.45),
    )


def atari_copies(guide: Guide) -> Iterator[tuple[str, str, str]]:
    chosen = guide.best("gpu", atari=True)
    workload = guide.workload("gpu", atari=True)
    hyper = workload.hyperparameters
    one = Task(
        op="copy",
        device="cuda:0",
        direction="h2d",
        pinned=True,
        shape=(workload.observation_bytes,),
    )
    together = dataclasses.replace(one, shape=(hyper.num_envs * workload.observation_bytes,))
    apart_s, together_s = hyper.num_envs * guide.seconds(one), guide.seconds(together)
    more_s = hyper.rollout_steps * (apart_s - together_s)
    yield (
        "batched copies on Atari: 3 x",
        f"{apart_s / together_s:.1f} x as fast a copy of {hyper.num_envs} frame stacks, "
        f"{1 + more_s / chosen.iteration_s:.2f} x as fast an iteration",
        _verdict(2 <= 1 + more_s / chosen.iteration_s <= 4),
    )


def weights_back(guide: Guide) -> Iterator[tuple[str, str, str]]:
    chosen = guide.best("hybrid", hidden=128)
    updates = next(stage for stage in chosen.stages if stage.name == "update")
    back = next(stage for stage in chosen.stages if stage.name == "weights_to_host")
    more_s = (updates.calls - 1) * back.total_s
    change = chosen.iteration_s / (chosen.iteration_s + more_s) - 1
    yield (
        "weights back after every update: -23 %",
        f"{change:+.1%}: {updates.calls} times {1e6 * back.total_s:.0f} us beside updates of "
        f"{1e6 * updates.total_s / updates.calls:.0f} us",
        _verdict(-0.33 <= change <= -0.13),
    )


def double_buffering(guide: Guide) -> Iterator[tuple[str, str, str]]:
    winners = {
        hidden: _ranking(guide, (*IN_TURNS, *OVERLAPPED), hidden=hidden)[0][0]
        for hidden in (64, 128, 256, 512, 1024)
    }
    shown = ", ".join(f"{name} at {hidden}" for hidden, name in winners.items())
    yield (
        "double buffering fastest",
        shown,
        _verdict(set(winners.values()) == {"double-buffer"}),
    )


PARTS = (widths, wide_observations, intervals, atari_copies, weights_back, double_buffering)


def fewer_threads(guide: Guide) -> Iterator[str]:
    """Winners by width where the CPU works with fewer threads than are best."""
    for threads in (1, 4):
        held: dict[str, object] = {"sample_threads": 1, "learn_threads": threads}
        found = []
        for hidden in (64, 128, 256, 512):
            (first, rate), (_, next_rate) = _ranking(guide, IN_TURNS, held, hidden=hidden)[:2]
            found.append(f"{hidden}: {first} {rate / next_rate - 1:+.0%}")
        yield f"sampling on 1 thread, learning on {threads}: {', '.join(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--rollout-steps", type=int, default=1024)
    parser.add_argument("--env-step-time", type=float, default=5e-5, metavar="SECONDS")
    args = parser.parse_args()
    guide = Guide(args.num_envs, args.rollout_steps, args.env_step_time)
    print(
        f"{guide.calibration.machine.name}, {guide.calibration.origin}; {args.num_envs} envs x "
        f"{args.rollout_steps} steps, {1e6 * args.env_step_time:.0f} us a step of an environment\n"
    )
    rows = [row for part in PARTS for row in part(guide)]
    for claim, found, agrees in rows:
        print(f"{claim}\n    plan: {found}\n    reproduced: {agrees}\n")
    agreed = sum(agrees == "yes" for _, _, agrees in rows)
    print(f"{agreed} of {len(rows)} reproduced\n")
    print("Taking turns with fewer threads of the CPU, by hidden width:")
    for line in fewer_threads(guide):
        print(f"    {line}")


if __name__ == "__main__":
    main()
