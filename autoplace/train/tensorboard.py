"""TensorBoard events of a run.

Every scalar is described in ``SCALARS``; the horizontal axis is env steps of the whole run. The
events are written here rather than by torch's writer, whose thread would compete with the run and
would end with a traceback of its own where a disk is full.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from autoplace.planner.plan import Plan
from autoplace.results import stage_seconds
from autoplace.train.callbacks import Callback, IterationReport, RunStart
from autoplace.train.log_file import LogFile

# What each tag means; <stage> stands for a stage's name, <stage>@<lane> where several lanes have
# one of that name.
SCALARS = {
    "return/mean": "mean return of the last 100 training episodes; absent while none has ended",
    "return/length": "mean length of the last 100 training episodes; absent while none has ended",
    "speed/env_only": "env steps per second of env stepping alone",
    "speed/sampling": "env steps per second of sampling: the sampler's lane without its waits",
    "speed/all": "env steps per second of the whole iteration",
    "time/iteration": "seconds of the iteration",
    "time/<stage>": "seconds of a stage in the iteration",
    "predicted/iteration": "seconds that the plan predicted for `time/iteration`",
    "predicted/<stage>": "seconds that the plan predicted for `time/<stage>`",
    "policy_lag/mean": "mean age in iterations of the weights that sampled the rollout",
    "policy_lag/max": "age in iterations of the oldest weights that sampled the rollout",
    "loss/policy": "clipped surrogate loss, mean over the minibatches of the last epoch",
    "loss/value": "value loss, likewise",
    "loss/entropy": "entropy of the policy, likewise",
    "update/approx_kl": "approximate KL divergence from the policy that sampled, likewise",
    "update/clip_fraction": "share of rows whose probability ratio was clipped, likewise",
    "update/grad_norm": "norm of the gradient before it was clipped, likewise",
    "update/learning_rate": "Adam's step size",
}


class TensorBoard(Callback):
    """Writes one event per iteration into a run folder."""

    def __init__(self) -> None:
        self._file: LogFile | None = None
        self._predicted: dict[str, float] = {}

    def on_start(self, start: RunStart) -> None:
        """Begin an event file; what an earlier call wrote beyond its checkpoint is hidden."""
        assert start.run_dir is not None
        self._predicted = _predicted(start.plan)
        self._file = LogFile(_event_path(start.run_dir))
        self._write(Event(file_version="brain.Event:2"))
        if start.env_steps:
            session = SessionLog(status=SessionLog.START)
            self._write(Event(step=start.env_steps + 1, session_log=session))

    def on_switch(self, plan: Plan) -> None:
        """From now on the predictions are another plan's."""
        self._predicted = _predicted(plan)

    def on_iteration(self, report: IterationReport) -> None:
        """Write one point of every curve."""
        update = report.update
        scalars = {
            "return/mean": report.mean_return,
            "return/length": report.mean_length,
            "speed/env_only": report.env_only_steps_per_s,
            "speed/sampling": report.sampling_steps_per_s,
            "speed/all": report.iteration_steps_per_s,
            "time/iteration": report.iteration_s,
            **{f"time/{name}": s for name, s in stage_seconds(report.stage_s).items()},
            **self._predicted,
            "policy_lag/mean": report.policy_lag,
            "policy_lag/max": report.max_policy_lag,
            "loss/policy": update.policy_loss,
            "loss/value": update.value_loss,
            "loss/entropy": update.entropy,
            "update/approx_kl": update.approx_kl,
            "update/clip_fraction": update.clip_fraction,
            "update/grad_norm": update.grad_norm,
            "update/learning_rate": update.learning_rate,
        }
        values = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars.items()
            if value is not None
        ]
        self._write(Event(step=report.env_steps, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        assert self._file is not None
        event.wall_time = time.time()
        RecordWriter(_Sink(self._file)).write(event.SerializeToString())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class _Sink:
    """What tensorboard's framing of records writes to."""

    def __init__(self, file: LogFile) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        self._file.append(data)


def _predicted(plan: Plan) -> dict[str, float]:
    chosen = plan.chosen
    stages = {(stage.name, stage.lane): stage.total_s for stage in chosen.stages}
    return {
        "predicted/iteration": chosen.iteration_s,
        **{f"predicted/{name}": s for name, s in stage_seconds(stages).items()},
    }


def _event_path(run_dir: Path) -> Path:
    """A name of the form that TensorBoard looks for; a process may begin several in a second."""
    unique = f"{time.time_ns() // 1_000_000_000}.{socket.gethostname()}.{os.getpid()}"
    for count in range(1000):
        path = run_dir / f"events.out.tfevents.{unique}.{count}"
        if not path.exists():
            return path
    raise AssertionError("a thousand event files in one second")
