"""Published comparisons of two ways to run PPO, as workloads and machines to plan for.

`ppo_throughput.csv` holds what was published, with its sources. A row is *formed* where it names
enough for a workload and a machine and says which of two ways was faster: :data:`CASES`. Why the
others are not is in :data:`NOT_FORMED`. What a formed row leaves out is named in its case.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoplace import store
from autoplace.cost_model import CostModel, fit_cost_model
from autoplace.measurement import Calibration, Measurement, Task
from autoplace.planner.plan import Candidate
from autoplace.planner.search import make_plan
from autoplace.whatif import given_steps, with_steps
from autoplace.workload import EnvSpec, Hyperparameters, ImageSpec, NetworkSpec, Workload

FOLDER = Path(__file__).parent
CALIBRATIONS = FOLDER.parents[1] / "calibration"
ATARI = ImageSpec(key="", height=84, width=84, channels=4)
MACHINES = tuple(p.stem.partition("-")[2] for p in sorted(CALIBRATIONS.glob("modelled-*.json")))
CUDA_MACHINES = tuple(name for name in MACHINES if name not in ("m2-laptop", "epyc7763-server"))
ANY = "any machine with a CUDA card"
# Seconds of one Pong step, frame skip included: 4 frames at the rates of a single process in a loop
# (rows A61 and A63).
PONG_LAPTOP_S, PONG_SERVER_S = 4 / 4893, 4 / 4640


@dataclass(frozen=True, kw_only=True)
class Way:
    """One of the two ways that a row compares.

    Attributes:
        scheme: which of the planner's it is.
        placement: what else it fixes.
        hyper: sizes that only it has.
    """

    scheme: str = "cpu"
    placement: Mapping[str, object] = field(default_factory=dict)
    hyper: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row that names enough.

    Attributes:
        row: its id.
        machine: name of the modelled machine, or :data:`ANY` where the row does not say and its
            author means machines in general.
        faster: the way that was faster.
        slower: the other one.
        network: observations, hidden layers and actions.
        hyper: sizes of an iteration.
        env_step_s: seconds of one environment's step.
        vector_step_s: of a whole vector step, where that hardly depends on how many there are.
        stage: what was timed where it was not the whole iteration.
        left_open: what the row does not name, and what was taken for it.
    """

    row: str
    machine: str
    faster: Way
    slower: Way
    network: NetworkSpec
    hyper: Mapping[str, int]
    env_step_s: float = 1e-4
    vector_step_s: float = 0.0
    stage: str = ""
    left_open: str = ""


def mlp(
    observations: int, hidden: tuple[int, ...], actions: int, *, continuous: bool = False
) -> NetworkSpec:
    return NetworkSpec(
        observation_size=observations,
        hidden_sizes=hidden,
        action_size=actions,
        continuous=continuous,
    )


CNN = NetworkSpec(observation_size=ATARI.size, hidden_sizes=(), action_size=6, images=(ATARI,))
_SMALL = mlp(4, (64, 64), 2)
_SOCCER = mlp(46, (64, 64), 2, continuous=True)
_PHASES = mlp(300, (256, 256), 26)
# 40 updates of 4096 rows to 2048 steps, as published; a rollout holds at least one minibatch.
_PHASES_HYPER = {"num_envs": 1, "rollout_steps": 4096, "minibatch_rows": 4096, "epochs": 80}
_LOOP = Way(placement={"env_backend": "sync"})
_WORKERS = Way(placement={"env_backend": "process"})


def _soccer(row: str, num_envs: int, rollout_steps: int) -> Case:
    return Case(
        row=row,
        machine="m2-laptop",
        faster=Way(hyper={"num_envs": num_envs, "rollout_steps": rollout_steps}),
        slower=Way(hyper={"num_envs": 1, "rollout_steps": 512}),
        network=_SOCCER,
        hyper={"minibatch_rows": 64, "epochs": 10},
        vector_step_s=718.9e-3 / 512,
        left_open=(
            "network and minibatch: the defaults of SB3 (64-64, 64); 2 continuous actions; no "
            "figures of an M4 Pro's CPU: an M2's"
        ),
    )


def _stepping(row: str, machine: str, num_envs: int, step_s: float, faster: Way) -> Case:
    return Case(
        row=row,
        machine=machine,
        faster=faster,
        slower=_WORKERS if faster is _LOOP else _LOOP,
        network=_SMALL,
        hyper={"num_envs": num_envs, "rollout_steps": 128, "minibatch_rows": 64, "epochs": 4},
        env_step_s=step_s,
        stage="env_step",
        left_open="the best number of environments: one per CPU",
    )


CASES = (
    Case(
        row="A01",
        machine=ANY,
        faster=Way(scheme="cpu"),
        slower=Way(scheme="gpu"),
        network=mlp(24, (64, 64), 4, continuous=True),
        hyper={"num_envs": 32, "rollout_steps": 2048, "minibatch_rows": 64, "epochs": 10},
        left_open="the machine; 0.1 ms a step of the environment, the same for both",
    ),
    Case(
        row="A10",
        machine="gtx1080ti-16-cores",
        faster=Way(scheme="gpu", hyper={"num_envs": 64, "minibatch_rows": 64 * 128 // 4}),
        slower=Way(scheme="gpu", hyper={"num_envs": 16, "minibatch_rows": 16 * 128 // 4}),
        network=CNN,
        hyper={"rollout_steps": 128, "epochs": 4},
        env_step_s=PONG_LAPTOP_S,
        left_open="128 steps, 4 minibatches, 4 epochs: that program's defaults for Atari",
    ),
    Case(
        row="A16",
        machine="rtx3060ti-windows",
        faster=Way(scheme="cpu"),
        slower=Way(scheme="gpu"),
        network=_PHASES,
        hyper=_PHASES_HYPER,
        env_step_s=1e-9,
        left_open="the environment's step, which the report leaves out",
    ),
    Case(
        row="A17",
        machine="rtx3060ti-windows",
        faster=Way(scheme="hybrid"),
        slower=Way(scheme="cpu"),
        network=_PHASES,
        hyper=_PHASES_HYPER,
        env_step_s=1e-9,
        left_open="the environment's step, which the report leaves out",
    ),
    _soccer("A31", 8, 512),
    _soccer("A32", 32, 512),
    _soccer("A34", 128, 256),
    Case(
        row="A50",
        machine=ANY,
        faster=Way(scheme="cpu"),
        slower=Way(scheme="gpu"),
        network=_SMALL,
        hyper={"num_envs": 4, "rollout_steps": 128, "minibatch_rows": 128, "epochs": 4},
        env_step_s=5e-6,
        left_open="the machine; 5 us a step of the environment, the same for both",
    ),
    _stepping("A61", "rtx3060-laptop", 12, PONG_LAPTOP_S, _WORKERS),
    _stepping("A63", "a100-server", 256, PONG_SERVER_S, _WORKERS),
    _stepping("A65", "rtx3090-ryzen5950x", 32, 5 / 20298, _WORKERS),
)
# The note of A65: with a single environment a process is slower than the loop, on both machines.
SINGLE_ENV_CASES = (
    _stepping("A65", "rtx3060-laptop", 1, 5 / 12326, _LOOP),
    _stepping("A65", "rtx3090-ryzen5950x", 1, 5 / 19472, _LOOP),
)


# Why the other rows are not formed. A row may have several reasons; the first is given.
_PROGRAMS = "compares programs, or versions or engines of one, not placements"
_MACHINE = "does not name the machine"
_SIZES = "names too few sizes of the workload: not its observations or its network"
_NO_WINNER = "names no winner of two ways"
_ELSEWHERE = "environments on the accelerator, or several accelerators: no scheme of the planner"
_NOT_PPO = "another algorithm, or a kernel alone"
NOT_FORMED = {
    "A03": _PROGRAMS,
    "A06": _SIZES,
    "A07": _SIZES,
    "A09": _NOT_PPO,
    "A11": _ELSEWHERE,
    "A12": _SIZES,
    "A13": _SIZES,
    "A14": _PROGRAMS,
    "A18": _PROGRAMS,
    "A19": _PROGRAMS,
    "A20": _PROGRAMS,
    "A21": _MACHINE,
    "A23": _MACHINE,
    "A25": _MACHINE,
    "A27": _SIZES,
    "A30": _MACHINE,
    "A36": _ELSEWHERE,
    "A37": _ELSEWHERE,
    "A38": _NO_WINNER,
    "A39": _ELSEWHERE,
    "A40": _NO_WINNER,
    "A41": _NO_WINNER,
    "A43": _MACHINE,
    "A44": _PROGRAMS,
    "A45": _NO_WINNER,
    "A47": _ELSEWHERE,
    "A48": _PROGRAMS,
    "A49": _ELSEWHERE,
    "A51": _PROGRAMS,
    "A52": _NO_WINNER,
    "A53": _MACHINE,
    "A55": _NOT_PPO,
    "A56": _PROGRAMS,
    "A57": _NOT_PPO,
    "A59": _SIZES,
    "A66": _ELSEWHERE,
    "A67": _NOT_PPO,
    "A68": _PROGRAMS,
}


def published_rows() -> dict[str, dict[str, str]]:
    """What was published, by row id."""
    with (FOLDER / "ppo_throughput.csv").open(encoding="utf-8", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


# --------------------------------------------------------------------------------------------------
# Planning them

# Numbers of environments that are stepped together, and seconds of a step, that tests plan with.
NUMS_ENVS = (1, 4, 8, 12, 16, 32, 64, 128, 256)
STEPS_S = (1e-6, 5e-6, 5e-5, 1e-4, 1e-3, 1e-2)


def env_of(step_s: float, *, together: bool = False) -> EnvSpec:
    """An environment whose step, or vector step of whatever size, takes so long."""
    return EnvSpec.make(f"{'Together' if together else 'Each'}-{step_s:g}-v0")


@functools.cache
def machine(name: str) -> tuple[Calibration, CostModel]:
    """A modelled machine with the environments of all cases, and what things cost on it."""
    calibration = store.read_calibration(CALIBRATIONS / f"modelled-{name}.json")
    for step_s in {*STEPS_S, *(case.env_step_s for case in (*CASES, *SINGLE_ENV_CASES))}:
        env = env_of(step_s)
        steps = [m for n in NUMS_ENVS for m in given_steps(env, step_s, calibration, n)]
        calibration = with_steps(calibration, env, steps)
    for step_s in {case.vector_step_s for case in CASES if case.vector_step_s}:
        env = env_of(step_s, together=True)
        tasks = [Task(op="env_step", env=env, backend="vector", num_envs=n) for n in NUMS_ENVS]
        steps = [Measurement(task=task, times_s=(step_s,), origin="given") for task in tasks]
        calibration = with_steps(calibration, env, steps)
    return calibration, fit_cost_model(calibration)


def machines_of(case: Case) -> tuple[str, ...]:
    """Names of the modelled machines that a case is planned for."""
    return CUDA_MACHINES if case.machine == ANY else (case.machine,)


def planned(
    name: str, network: NetworkSpec, env: EnvSpec, hyper: Mapping[str, int], way: Way
) -> Candidate:
    """What the plan for a modelled machine chooses within one way."""
    calibration, model = machine(name)
    sizes = {**hyper, **way.hyper}
    workload = Workload(
        env=env,
        network=network,
        hyperparameters=Hyperparameters(hidden_sizes=network.hidden_sizes, **sizes),
        action_bytes=4 * network.action_columns * (1 if network.continuous else 2),
    )
    placement = dict(way.placement)
    return make_plan(
        calibration, workload, scheme=way.scheme, placement=placement, model=model
    ).chosen


def rate(case: Case, name: str, way: Way) -> float:
    """Env steps per second that a plan predicts for one way of a case, or for its stage alone."""
    env = env_of(case.vector_step_s or case.env_step_s, together=bool(case.vector_step_s))
    chosen = planned(name, case.network, env, case.hyper, way)
    if not case.stage:
        return chosen.env_steps_per_s
    stage_s = sum(stage.total_s for stage in chosen.stages if stage.name == case.stage)
    return chosen.env_steps_per_s * chosen.iteration_s / stage_s
