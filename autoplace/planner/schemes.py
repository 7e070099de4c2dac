"""The schemes: an iteration as stages on lanes.

A scheme says, without any cost, which work an iteration consists of (:attr:`Scheme.work`), and,
given the seconds of each kind of work, when it happens (:attr:`Scheme.layout`). Adding a scheme to
the planner is one :class:`Scheme` entry in :data:`SCHEMES`.

==========  ========================================================================================
symbol      meaning
==========  ========================================================================================
T, N        vector steps in a rollout, environments stepped together
K, I        chunks that a rollout is copied in, vector steps per chunk (the last may be shorter)
S           seconds of sampling on the sampler's lane
c           seconds that the link needs for one chunk
==========  ========================================================================================
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoplace.measurement import Task
from autoplace.planner.plan import Placement
from autoplace.workload import FLOAT_BYTES, Workload, minibatch_sizes

Key = tuple[str, str]  # (stage name, lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kind of work of an iteration.

    Attributes:
        name: stage name.
        lane: where it runs.
        calls: how often the stage runs in an iteration.
        parts: the tasks it consists of, each with how often it runs in an iteration.
    """

    name: str
    lane: str
    calls: int
    parts: tuple[tuple[Task, float], ...]

    @property
    def key(self) -> Key:
        """(name, lane), unique within an iteration."""
        return self.name, self.lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a kind of work (or a wait) first starts, and how long all of it lasts."""

    name: str
    lane: str
    start_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values that each free part of a placement may take on one machine.

    Attributes:
        accelerators: canonical names, best known first.
        sample_threads: thread counts with timings, for a policy on the CPU.
        learn_threads: thread counts with timings, for a learner on the CPU.
        minibatch_rows: the declared choices, or the user's one.
        transfer_intervals: vector steps per chunk.
        env_backends: (vector backend, worker processes) with a measured step time.
        usable_cpus: cores that samplers and learners at work together may share out.
        engines: ways to execute the trainer's steps that have timings.
    """

    accelerators: tuple[str, ...]
    sample_threads: tuple[int, ...]
    learn_threads: tuple[int, ...]
    minibatch_rows: tuple[int, ...]
    transfer_intervals: tuple[int, ...]
    env_backends: tuple[tuple[str, int], ...]
    usable_cpus: int = 1
    engines: tuple[str, ...] = ("eager",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How an iteration is laid out on the devices.

    Attributes:
        name: as users write it.
        placements: every placement worth costing, given the free values and the number of envs.
        work: what an iteration consists of.
        layout: when it happens, from the seconds of each kind of work.
        policy_lag: iterations that the policy which samples is behind the one which learns.
    """

    name: str
    placements: Callable[[Axes, int, int], Iterator[Placement]]
    work: Callable[[Workload, Placement], tuple[Work, ...]]
    layout: Callable[[Mapping[Key, float], Placement, int], tuple[Span, ...]]
    policy_lag: int = 0


# --------------------------------------------------------------------------------------------------
# Placements


class _Sides(NamedTuple):
    """Where each side of an iteration runs, with how many threads of the CPU."""

    sample_device: str
    learn_device: str
    sample_threads: int = 1
    learn_threads: int = 1


def _placements(
    axes: Axes, num_envs: int, sides: Sequence[_Sides], intervals: Sequence[int]
) -> Iterator[Placement]:
    """Every combination of sides and chunk lengths with the values that any scheme may take."""
    for (backend, workers), engine, where, rows, interval in itertools.product(
        axes.env_backends, axes.engines, sides, axes.minibatch_rows, intervals
    ):
        yield Placement(
            device=where.learn_device,
            sample_device=where.sample_device,
            learn_device=where.learn_device,
            transfer_interval_steps=interval,
            minibatch_rows=rows,
            num_envs=num_envs,
            env_backend=backend,
            num_workers=workers,
            sample_threads=where.sample_threads,
            learn_threads=where.learn_threads,
            engine=engine,
        )


# --------------------------------------------------------------------------------------------------
# Work that several schemes share


def _env_step(workload: Workload, placement: Placement) -> Work:
    steps = workload.hyperparameters.rollout_steps
    task = Task(
        op="env_step",
        env=workload.env,
        backend=placement.env_backend,
        num_envs=placement.num_envs,
        workers=placement.num_workers,
    )
    return Work(name="env_step", lane="sampler", calls=steps, parts=((task, steps),))


def _per_step(op: str, workload: Workload, placement: Placement, lane: str = "sampler") -> Work:
    """A stage that runs once per vector step on the device that samples."""
    steps = workload.hyperparameters.rollout_steps
    task = Task(
        op=op,
        device=placement.sample_device,
        threads=placement.sample_threads,
        network=workload.network,
        rows=placement.num_envs,
        engine=placement.engine,
    )
    return Work(name=op, lane=lane, calls=steps, parts=((task, steps),))


def _gae(workload: Workload, placement: Placement) -> Work:
    task = Task(
        op="gae",
        device=placement.learn_device,
        threads=placement.learn_threads,
        shape=(workload.hyperparameters.rollout_steps, placement.num_envs),
        network=workload.network,
    )
    return Work(name="gae", lane="learner", calls=1, parts=((task, 1),))


def _update(workload: Workload, placement: Placement) -> Work:
    """Every epoch runs the real sizes: ceil(rows / minibatch) steps, the last one smaller."""
    hyper = workload.hyperparameters
    sizes = minibatch_sizes(hyper.rollout_steps * placement.num_envs, placement.minibatch_rows)
    parts = tuple(
        (
            Task(
                op="update",
                device=placement.learn_device,
                threads=placement.learn_threads,
                network=workload.network,
                rows=rows,
                engine=placement.engine,
            ),
            float(hyper.epochs * sizes.count(rows)),
        )
        for rows in sorted(set(sizes), reverse=True)
    )
    return Work(name="update", lane="learner", calls=hyper.epochs * len(sizes), parts=parts)


def _copy(device: str, direction: str, nbytes: int) -> Task:
    return Task(op="copy", device=device, direction=direction, pinned=True, shape=(nbytes,))


def rollout_bytes_per_row(workload: Workload) -> dict[str, int]:
    """Bytes of one env step in each tensor of a rollout, by name."""
    return {
        "observations": workload.observation_bytes,
        "actions": workload.action_bytes,
        "outcomes": 3 * FLOAT_BYTES,  # reward, terminated, truncated
    }


def _in_sequence(seconds: Mapping[Key, float], keys: list[Key], start_s: float) -> list[Span]:
    """Stages one after the other, from ``start_s`` on."""
    spans = []
    for name, lane in keys:
        total_s = seconds[name, lane]
        spans.append(Span(name=name, lane=lane, start_s=start_s, total_s=total_s))
        start_s += total_s
    return spans


def _interleaved(
    seconds: Mapping[Key, float], names: list[str], steps: int, lane: str = "sampler"
) -> list[Span]:
    """Stages that alternate within every vector step: each first starts within the first step."""
    spans, start_s = [], 0.0
    for name in names:
        total_s = seconds[name, lane]
        spans.append(Span(name=name, lane=lane, start_s=start_s, total_s=total_s))
        start_s += total_s / steps
    return spans


def _total(spans: list[Span]) -> float:
    return sum(span.total_s for span in spans)


def _wait(lane: str, start_s: float, total_s: float) -> list[Span]:
    return [Span(name="wait", lane=lane, start_s=start_s, total_s=total_s)] if total_s > 0 else []


def _then_learning(seconds: Mapping[Key, float], sampling: list[Span]) -> tuple[Span, ...]:
    """Learning starts when sampling has ended; each side waits for the other."""
    sampled_s = _total(sampling)
    learning = _in_sequence(seconds, [("gae", "learner"), ("update", "learner")], sampled_s)
    return (
        *sampling,
        *_wait("sampler", sampled_s, _total(learning)),
        *_wait("learner", 0.0, sampled_s),
        *learning,
    )


# --------------------------------------------------------------------------------------------------
# cpu: everything on the CPU, one thing at a time


def _cpu_placements(axes: Axes, num_envs: int, steps: int) -> Iterator[Placement]:
    pairs = itertools.product(axes.sample_threads, axes.learn_threads)
    sides = [_Sides("cpu", "cpu", *threads) for threads in pairs]
    return _placements(axes, num_envs, sides, (steps,))


def _cpu_work(workload: Workload, placement: Placement) -> tuple[Work, ...]:
    return (
        _per_step("policy_step", workload, placement),
        _env_step(workload, placement),
        _gae(workload, placement),
        _update(workload, placement),
    )


def _cpu_layout(seconds: Mapping[Key, float], placement: Placement, steps: int) -> tuple[Span, ...]:
    sampling = _interleaved(seconds, ["policy_step", "env_step"], steps)
    return _then_learning(seconds, sampling)


# --------------------------------------------------------------------------------------------------
# hybrid: sampling on the CPU, learning on an accelerator


def _hybrid_placements(axes: Axes, num_envs: int, steps: int) -> Iterator[Placement]:
    pairs = itertools.product(axes.accelerators, axes.sample_threads)
    sides = [_Sides("cpu", accelerator, threads) for accelerator, threads in pairs]
    return _placements(axes, num_envs, sides, axes.transfer_intervals)


def _hybrid_work(workload: Workload, placement: Placement) -> tuple[Work, ...]:
    steps = workload.hyperparameters.rollout_steps
    interval = placement.transfer_interval_steps
    device = placement.learn_device
    chunks = math.ceil(steps / interval)
    full, rest = divmod(steps, interval)
    row_bytes = rollout_bytes_per_row(workload)
    copies: dict[Task, float] = {}
    for length, count in ((interval, full), (rest, 1 if rest else 0)):
        for nbytes in row_bytes.values():
            if count:
                task = _copy(device, "h2d", nbytes * length * placement.num_envs)
                copies[task] = copies.get(task, 0.0) + count
    issue = Task(op="dispatch", device=device)
    weights = Task(
        op="weights_to_host",
        device=device,
        network=workload.network,
    )
    return (
        _per_step("policy_step", workload, placement),
        _env_step(workload, placement),
        Work(
            name="rollout_to_device",
            lane="sampler",
            calls=chunks,
            parts=((issue, float(chunks * len(row_bytes))),),
        ),
        Work(
            name="rollout_to_device",
            lane="copy",
            calls=chunks,
            parts=tuple(copies.items()),
        ),
        _gae(workload, placement),
        _update(workload, placement),
        Work(name="weights_to_host", lane="learner", calls=1, parts=((weights, 1.0),)),
    )


def last_chunk_delay(sampling_s: float, copy_s: float, steps: int, interval: int) -> float:
    """Seconds from the end of sampling until the last chunk has arrived.

    Chunk k of K can leave when it has been sampled, after k I / T of S, and when the link has
    finished the chunk before it. With equal chunks that is c where the link keeps up with sampling
    (c <= S / K); where it does not, the link never rests after the first chunk.
    """
    lengths = [interval] * (steps // interval) + ([steps % interval] if steps % interval else [])
    if len(lengths) > 2 and lengths[0] == lengths[-1]:
        # Equal chunks: the link is free at the end of sampling, or it never rests.
        chunk_s, each_s = copy_s / len(lengths), sampling_s / len(lengths)
        return max(chunk_s, each_s + copy_s - sampling_s)
    sampled_steps, free_s = 0, 0.0
    for length in lengths:
        sampled_steps += length
        free_s = max(free_s, sampling_s * sampled_steps / steps) + copy_s * length / steps
    return free_s - sampling_s


def _hybrid_layout(
    seconds: Mapping[Key, float], placement: Placement, steps: int
) -> tuple[Span, ...]:
    interval = placement.transfer_interval_steps
    sampling = _interleaved(seconds, ["policy_step", "env_step", "rollout_to_device"], steps)
    sampled_s = _total(sampling)
    copy_s = seconds["rollout_to_device", "copy"]
    arrived_s = sampled_s + last_chunk_delay(sampled_s, copy_s, steps, interval)
    learning = _in_sequence(
        seconds,
        [("gae", "learner"), ("update", "learner"), ("weights_to_host", "learner")],
        arrived_s,
    )
    end_s = arrived_s + _total(learning)
    first_chunk_s = sampled_s * min(interval, steps) / steps
    copying = Span(name="rollout_to_device", lane="copy", start_s=first_chunk_s, total_s=copy_s)
    return (
        *sampling,
        *_wait("sampler", sampled_s, end_s - sampled_s),
        *_wait("learner", 0.0, arrived_s),
        *learning,
        *_wait("copy", 0.0, end_s - copy_s),
        copying,
    )


# --------------------------------------------------------------------------------------------------
# gpu: envs on the CPU, policy and learner on the accelerator


def _gpu_placements(axes: Axes, num_envs: int, steps: int) -> Iterator[Placement]:
    sides = [_Sides(accelerator, accelerator) for accelerator in axes.accelerators]
    return _placements(axes, num_envs, sides, (steps,))


def _gpu_work(workload: Workload, placement: Placement) -> tuple[Work, ...]:
    rows = workload.hyperparameters.rollout_steps * placement.num_envs
    outcomes = _copy(
        placement.learn_device, "h2d", rollout_bytes_per_row(workload)["outcomes"] * rows
    )
    return (
        _per_step("obs_to_device", workload, placement),
        _per_step("policy_step", workload, placement),
        _per_step("action_to_host", workload, placement),
        _env_step(workload, placement),
        Work(
            name="rollout_to_device",
            lane="sampler",
            calls=1,
            parts=((outcomes, 1.0),),
        ),
        _gae(workload, placement),
        _update(workload, placement),
    )


def _gpu_layout(seconds: Mapping[Key, float], placement: Placement, steps: int) -> tuple[Span, ...]:
    sampling = _interleaved(
        seconds, ["obs_to_device", "policy_step", "action_to_host", "env_step"], steps
    )
    sampling += _in_sequence(seconds, [("rollout_to_device", "sampler")], _total(sampling))
    return _then_learning(seconds, sampling)


# --------------------------------------------------------------------------------------------------
# double-buffer: one rollout is sampled on the CPU while the other is learned from


def _double_buffer_placements(axes: Axes, num_envs: int, steps: int) -> Iterator[Placement]:
    """Every core works for one side only: threads of both, and workers, fit into the CPUs."""
    learners = [("cpu", threads) for threads in axes.learn_threads]
    learners += [(accelerator, 1) for accelerator in axes.accelerators]
    pairs = itertools.product(learners, axes.sample_threads)
    sides = [_Sides("cpu", device, threads, learning) for (device, learning), threads in pairs]
    for placement in _placements(axes, num_envs, sides, (steps,)):
        sampling = max(placement.sample_threads, placement.num_workers)
        if sampling + placement.learn_threads <= axes.usable_cpus:
            yield placement


def _double_buffer_work(workload: Workload, placement: Placement) -> tuple[Work, ...]:
    hyper = workload.hyperparameters
    rows = hyper.rollout_steps * placement.num_envs
    # Weights and both moments of Adam are taken over, the order of minibatches is handed over.
    numbers = 3 * workload.network.num_parameters + 2 * hyper.epochs * rows
    copied = Task(op="elementwise", threads=placement.sample_threads, shape=(numbers,))
    handoff = Work(
        name="handoff",
        lane="sampler",
        calls=1,
        parts=((Task(op="handoff"), 1.0), (copied, 1.0)),
    )
    works = [
        _per_step("policy_step", workload, placement),
        _env_step(workload, placement),
        handoff,
        _gae(workload, placement),
        _update(workload, placement),
    ]
    device = placement.learn_device
    if device != "cpu":
        copies = tuple(
            (_copy(device, "h2d", nbytes * rows), 1.0)
            for nbytes in (*rollout_bytes_per_row(workload).values(), 8 * hyper.epochs)
        )
        state = FLOAT_BYTES * 3 * workload.network.num_parameters
        works += [
            Work(name="rollout_to_device", lane="learner", calls=1, parts=copies),
            Work(
                name="weights_to_host",
                lane="learner",
                calls=1,
                parts=((_copy(device, "d2h", state), 1.0),),
            ),
        ]
    return tuple(works)


def _double_buffer_layout(
    seconds: Mapping[Key, float], placement: Placement, steps: int
) -> tuple[Span, ...]:
    """Both sides start together, the faster one waits, and then they hand over."""
    sampling = _interleaved(seconds, ["policy_step", "env_step"], steps)
    order = ("rollout_to_device", "gae", "update", "weights_to_host")
    keys = [(name, "learner") for name in order if (name, "learner") in seconds]
    learning = _in_sequence(seconds, keys, 0.0)
    sampled_s, learned_s = _total(sampling), _total(learning)
    met_s, handoff_s = max(sampled_s, learned_s), seconds["handoff", "sampler"]
    return (
        *sampling,
        *_wait("sampler", sampled_s, met_s - sampled_s),
        Span(name="handoff", lane="sampler", start_s=met_s, total_s=handoff_s),
        *learning,
        *_wait("learner", learned_s, met_s + handoff_s - learned_s),
    )


SCHEMES: tuple[Scheme, ...] = (
    Scheme(name="cpu", placements=_cpu_placements, work=_cpu_work, layout=_cpu_layout),
    Scheme(name="hybrid", placements=_hybrid_placements, work=_hybrid_work, layout=_hybrid_layout),
    Scheme(name="gpu", placements=_gpu_placements, work=_gpu_work, layout=_gpu_layout),
    Scheme(
        name="double-buffer",
        placements=_double_buffer_placements,
        work=_double_buffer_work,
        layout=_double_buffer_layout,
        policy_lag=1,
    ),
)
