"""A plan as data: what was chosen, out of what, from which costed stages.

Nothing here computes a cost. The text and the JSON of a plan are read off these values, so the
explanation cannot say anything else than what the choice was made from.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoplace.errors import UsageError
from autoplace.workload import Workload

if TYPE_CHECKING:
    from autoplace.planner.handover import CommandArguments, Sb3Arguments

STAGES = (
    "env_step",
    "policy_step",
    "obs_to_device",
    "action_to_host",
    "rollout_to_device",
    "gae",
    "update",
    "weights_to_host",
    "handoff",
    "wait",
)
LANES = ("sampler", "learner", "copy")
_FULL = 0.05  # share of an iteration that a lane may wait and still bound it


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and how the work of an iteration is done.

    Attributes:
        device: the accelerator in use, or ``cpu``.
        sample_device: where the policy runs while sampling.
        learn_device: where gradient steps run.
        transfer_interval_steps: vector steps in each rollout chunk that is copied to the learner.
        minibatch_rows: rows of one gradient step.
        num_envs: environments stepped together.
        num_workers: processes that step environments, 0 for the sampler's own alone.
        num_groups: 2 for split-half sampling: one half of each worker's environments steps while
            the actions of the other half are computed. For backends with workers, on a sampler on
            the CPU; per vector step, it makes ``num_groups`` policy steps of about
            ``num_envs / num_groups`` rows each.
        env_backend: how environments are stepped together.
        sample_threads: intra-op threads of torch while sampling.
        learn_threads: intra-op threads of torch while learning.
        engine: how policy steps and gradient steps are executed.
        precision: number format of the arithmetic.
        accumulation_steps: backward passes that make one gradient step.
        max_policy_lag: updates that the weights which sample may be behind those which learn from
            the sample, at most.
    """

    device: str
    sample_device: str
    learn_device: str
    transfer_interval_steps: int
    minibatch_rows: int
    num_envs: int
    num_workers: int = 0
    num_groups: int = 1
    env_backend: str = "sync"
    sample_threads: int = 1
    learn_threads: int = 1
    engine: str = "eager"
    precision: str = "fp32"
    accumulation_steps: int = 1
    max_policy_lag: int = 0

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One kind of work on one lane of an iteration.

    Attributes:
        name: one of :data:`STAGES`.
        lane: one of :data:`LANES`.
        start_s: when the first call starts, from the start of the iteration.
        calls: how often it runs in an iteration.
        total_s: predicted seconds of all calls together.
        low_s: lower end of its 90 % interval.
        high_s: upper end of its 90 % interval.
        source: that of the least certain task that is at least a fifth of it (see
            :class:`autoplace.cost_model.Cost`), or ``derived`` for a wait.
    """

    name: str
    lane: str
    start_s: float
    calls: int
    total_s: float
    low_s: float
    high_s: float
    source: str

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return dataclasses.asdict(self)


def start_share(env_steps_per_s: float, one_off_s: float, total_steps: int | None) -> float:
    """What a run takes once, as a share of what all its iterations take."""
    return 0.0 if total_steps is None else one_off_s * env_steps_per_s / total_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A placement that was costed, or rejected with the reason.

    Attributes:
        scheme: how the iteration is laid out on the devices.
        placement: where and how.
        iteration_s: predicted seconds of one iteration; 0 where rejected before costing.
        low_s: lower end of its 90 % interval.
        high_s: upper end of its 90 % interval.
        env_steps_per_s: predicted env steps per second; vector steps that only reset an environment
            do not count.
        sample_efficiency: measured relative sample efficiency of its minibatch and policy lag, 1
            where there is no loss.
        one_off_s: predicted seconds that a run takes once: its processes start.
        total_steps: env steps that the run is to take; ``None`` for one without an end.
        stages: what the prediction is made of.
        rejected_because: why it may not run, or ``None``.
    """

    scheme: str
    placement: Placement
    iteration_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    env_steps_per_s: float = 0.0
    sample_efficiency: float = 1.0
    one_off_s: float = 0.0
    total_steps: int | None = None
    stages: tuple[Stage, ...] = ()
    rejected_because: str | None = None

    @property
    def score(self) -> float:
        """What candidates are ranked by, see :meth:`score_at`."""
        return self.score_at(self.env_steps_per_s)

    def score_at(self, env_steps_per_s: float) -> float:
        """Env steps per second of the whole run x relative sample efficiency.

        The whole run of N env steps takes ``N / env_steps_per_s + one_off_s``.
        """
        share = start_share(env_steps_per_s, self.one_off_s, self.total_steps)
        return env_steps_per_s * self.sample_efficiency / (1 + share)

    @property
    def start_share(self) -> float:
        """What a run takes once, as a share of what all its iterations take."""
        return start_share(self.env_steps_per_s, self.one_off_s, self.total_steps)

    @property
    def bottleneck(self) -> str:
        """The longest stage of those that bound the iteration; of a candidate with stages.

        Where a lane (almost) never waits, what happens beside it on others costs nothing.
        """
        waits = dict.fromkeys((s.lane for s in self.stages), 0.0)
        for stage in self.stages:
            waits[stage.lane] += stage.total_s * (stage.name == "wait")
        full = {lane for lane, wait_s in waits.items() if wait_s <= _FULL * self.iteration_s}
        bounding = [s for s in self.stages if s.name != "wait" and s.lane in (full or waits)]
        return max(bounding, key=lambda s: s.total_s).name

    def to_json(self) -> dict[str, Any]:
        """The JSON object of a candidate in a plan's list."""
        return {
            "scheme": self.scheme,
            "placement": self.placement.to_json(),
            "env_steps_per_s": self.env_steps_per_s,
            "iteration_s": self.iteration_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "sample_efficiency": self.sample_efficiency,
            "one_off_s": self.one_off_s,
            "total_steps": self.total_steps,
            "rejected_because": self.rejected_because,
        }

    @classmethod
    def from_json(cls, row: dict[str, Any], stages: tuple[Stage, ...] = ()) -> Candidate:
        """The inverse of :meth:`to_json`, with ``stages`` where they are known."""
        return cls(**{**row, "placement": Placement(**row["placement"]), "stages": stages})


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A change of one parameter at which another scheme, or another learner, becomes the fastest.

    Attributes:
        parameter: what is changed.
        from_value: its value in the workload.
        to_value: the nearest value at which the choice changes.
        scheme_from: the scheme chosen now.
        scheme_to: the scheme chosen there.
        device_from: the device that learns now.
        device_to: the device that learns there.
    """

    parameter: str
    from_value: float
    to_value: float
    scheme_from: str
    scheme_to: str
    device_from: str = ""
    device_to: str = ""

    def to_json(self) -> dict[str, Any]:
        """The JSON object of a flip in a plan's list."""
        return {
            "parameter": self.parameter,
            "from": self.from_value,
            "to": self.to_value,
            "scheme_from": self.scheme_from,
            "scheme_to": self.scheme_to,
            "device_from": self.device_from,
            "device_to": self.device_to,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen placement and everything the choice was made from.

    Attributes:
        workload: what is to be done.
        fingerprint: of the machine the calibration belongs to.
        chosen: the candidate to run.
        candidates: the best of every scheme first, then the others (without their stages),
            rejected ones last.
        runner_up: the best candidate of another scheme, or of another placement where there is
            only one scheme; ``None`` where nothing else is possible.
        margin_fraction: how much faster the choice is than the runner-up.
        is_close: whether the margin is inside the model's own error.
        bottleneck: the stage whose time bounds the iteration.
        flips: what would change the choice.
        changes_learning: settings that differ from the user's and may change what is learned.
        reasons: the choice in sentences.
        assumes: what the predictions take for granted, in sentences.
        origin: ``measured``, or ``modelled`` where the calibration was derived.
        raced: what a race said where the prediction is a tie, "" where there was none.
        rivals: the choice and those that the model cannot tell from it, most promising first;
            empty where the choice is clear.
    """

    workload: Workload
    fingerprint: str
    chosen: Candidate
    candidates: Sequence[Candidate]
    runner_up: Candidate | None
    margin_fraction: float
    is_close: bool
    bottleneck: str
    flips: tuple[Flip, ...]
    changes_learning: tuple[str, ...]
    reasons: tuple[str, ...]
    assumes: tuple[str, ...] = ()
    origin: str = "measured"
    raced: str = ""
    rivals: tuple[Candidate, ...] = ()

    @property
    def scheme(self) -> str:
        """The chosen scheme."""
        return self.chosen.scheme

    @property
    def placement(self) -> Placement:
        """The chosen placement."""
        return self.chosen.placement

    @property
    def best_of_schemes(self) -> dict[str, Candidate]:
        """The best candidate of every scheme that can run, the chosen one first."""
        best = {self.scheme: self.chosen}
        seen: set[str] = set()
        for candidate in self.candidates:  # the best of every scheme come first
            if candidate.rejected_because is not None or candidate.scheme in seen:
                break
            seen.add(candidate.scheme)
            best.setdefault(candidate.scheme, candidate)
        return best

    @property
    def rejected(self) -> Sequence[Candidate]:
        """The candidates that may not run."""
        start = bisect.bisect_left(
            self.candidates, True, key=lambda c: c.rejected_because is not None
        )
        return self.candidates[start:]

    def to_json(self) -> dict[str, Any]:
        """The plan as ``autoplace plan --json`` prints it."""
        chosen = self.chosen
        return {
            "env": self.workload.env.id,
            "scheme": chosen.scheme,
            "placement": chosen.placement.to_json(),
            "env_steps_per_s": chosen.env_steps_per_s,
            "iteration_s": chosen.iteration_s,
            "stages": [stage.to_json() for stage in chosen.stages],
            "bottleneck": self.bottleneck,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "runner_up": self.runner_up.to_json() if self.runner_up is not None else None,
            "margin_fraction": self.margin_fraction,
            "is_close": self.is_close,
            "flips": [flip.to_json() for flip in self.flips],
            "changes_learning": list(self.changes_learning),
            "reasons": list(self.reasons),
            "assumes": list(self.assumes),
            "fingerprint": self.fingerprint,
            "origin": self.origin,
            "raced": self.raced,
            "rivals": [candidate.to_json() for candidate in self.rivals],
            "workload": self.workload.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The inverse of :meth:`to_json`; only the chosen candidate has stages."""
        stages = tuple(Stage(**row) for row in data["stages"])
        chosen, *others = data["candidates"]
        runner_up = data["runner_up"]
        return cls(
            workload=Workload.from_json(data["workload"]),
            fingerprint=data["fingerprint"],
            chosen=Candidate.from_json(chosen, stages),
            candidates=(
                Candidate.from_json(chosen, stages),
                *(Candidate.from_json(row) for row in others),
            ),
            runner_up=Candidate.from_json(runner_up) if runner_up is not None else None,
            margin_fraction=data["margin_fraction"],
            is_close=data["is_close"],
            bottleneck=data["bottleneck"],
            flips=tuple(
                Flip(
                    parameter=row["parameter"],
                    from_value=row["from"],
                    to_value=row["to"],
                    scheme_from=row["scheme_from"],
                    scheme_to=row["scheme_to"],
                    device_from=row.get("device_from", ""),
                    device_to=row.get("device_to", ""),
                )
                for row in data["flips"]
            ),
            changes_learning=tuple(data["changes_learning"]),
            reasons=tuple(data["reasons"]),
            assumes=tuple(data.get("assumes", ())),
            origin=data["origin"],
            raced=data.get("raced", ""),
            rivals=tuple(Candidate.from_json(row) for row in data.get("rivals", ())),
        )

    @classmethod
    def read(cls, data: dict[str, Any], where: str) -> Plan:
        """A plan from JSON that may be none.

        Raises:
            UsageError: it is not a plan; the message names ``where`` it came from.
        """
        try:
            return cls.from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{where} is not a plan ({type(error).__name__}: {error}): "
                "make one by `autoplace plan ENV --json`"
            ) from error

    def explain(self) -> str:
        """Why this plan: the stages, the bottleneck, the runner-up, what would flip it."""
        from autoplace.planner.explain import explain_plan  # a sibling that reads this file's types

        return explain_plan(self)

    def for_sb3(self) -> Sb3Arguments:
        """What to give Stable-Baselines3: the best placement that it can run.

        Raises:
            EnvError: the environment cannot be made here.
            UsageError: Stable-Baselines3 cannot run it.
        """
        from autoplace.planner import handover

        return handover.for_sb3(self)

    def for_cleanrl(self) -> CommandArguments:
        """What to give CleanRL's PPO: the best placement that it can run.

        Raises:
            EnvError: the environment cannot be made here.
            UsageError: CleanRL cannot run it.
        """
        from autoplace.planner import handover

        return handover.for_cleanrl(self)

    def for_sample_factory(self) -> CommandArguments:
        """What to give Sample Factory: the best placement that it can run."""
        from autoplace.planner import handover

        return handover.for_sample_factory(self)
