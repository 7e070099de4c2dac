"""Where a prediction is a tie, a short race decides, and what it said is kept.

A race costs time that a run has to win back, and where the model calls a tie there is little to be
won. So a run is raced for only where the race is a small share of it, and never twice: the result
stands beside the machine's calibration, under the workload and the machine's fingerprint.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplace import store
from autoplace.errors import RunError
from autoplace.machine import Machine
from autoplace.planner.explain import describe_placement
from autoplace.planner.plan import Candidate, Placement, Plan
from autoplace.planner.ranking import SAME_SPEED_FRACTION
from autoplace.planner.reasons import changes_learning
from autoplace.planner.schemes import SCHEMES
from autoplace.units import format_percent, format_rate

log = logging.getLogger(__name__)

SECONDS = 2.0  # of measuring each
# Share of a run that its race may cost, and how many times its measuring a race takes: starting
# processes and warming up count as much again.
_RUN_SHARE = 0.02
_OVERHEAD = 2.0

# Schema versions: 1, the first.
_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a race of a close call said.

    Attributes:
        rates: (scheme, placement, measured env steps per second) of each.
        noise_fraction: by how much the halves of the same candidate differed.
        created: when, ISO 8601.
    """

    rates: tuple[tuple[str, Placement, float], ...]
    noise_fraction: float
    created: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "candidates": [
                {
                    "scheme": scheme,
                    "placement": placement.to_json(),
                    "measured_env_steps_per_s": rate,
                }
                for scheme, placement, rate in self.rates
            ],
            "noise_fraction": self.noise_fraction,
            "created": self.created,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Verdict:
        """The inverse of :meth:`to_json`."""
        return cls(
            rates=tuple(
                (
                    row["scheme"],
                    Placement(**row["placement"]),
                    float(row["measured_env_steps_per_s"]),
                )
                for row in data["candidates"]
            ),
            noise_fraction=float(data["noise_fraction"]),
            created=str(data["created"]),
        )


def pays(plan: Plan, total_steps: int) -> bool:
    """Whether a race is a small share of a run of ``total_steps`` env steps."""
    from autoplace.race import MIN_TURNS  # imports torch

    cost_s = sum(
        _OVERHEAD * max(SECONDS, MIN_TURNS * (2 + c.placement.max_policy_lag) * c.iteration_s)
        for c in plan.rivals
    )
    return cost_s <= _RUN_SHARE * total_steps / plan.chosen.env_steps_per_s


def run_race(plan: Plan, progress: Callable[[float], None] = lambda share: None) -> Verdict:
    """Race the rivals of a plan, of which there are some."""
    from autoplace.race import race  # imports torch

    entrants = [(candidate.scheme, candidate) for candidate in plan.rivals]
    result = race(plan, entrants, seconds=SECONDS, progress=progress)
    return Verdict(
        rates=tuple(
            (e.candidate.scheme, e.candidate.placement, e.env_steps_per_s) for e in result.entrants
        ),
        noise_fraction=result.noise_fraction,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def names(candidates: Sequence[Candidate]) -> list[str]:
    """Their schemes, and what tells those apart that have the same."""
    parts = [describe_placement(candidate.placement).split(", ") for candidate in candidates]
    found = []
    for candidate, own in zip(candidates, parts, strict=True):
        alike = [
            other
            for rival, other in zip(candidates, parts, strict=True)
            if rival is not candidate and rival.scheme == candidate.scheme
        ]
        different = [part for part in own if not all(part in other for other in alike)]
        found.append(candidate.scheme + (f" ({', '.join(different)})" if different else ""))
    return found


def _winner(rates: Mapping[Candidate, float]) -> Candidate:
    """The fastest; of those as fast the one with the smallest minibatch, as in a plan."""
    scores = {candidate: candidate.score_at(rate) for candidate, rate in rates.items()}
    fastest = max(scores, key=lambda c: scores[c])
    least = (1 - SAME_SPEED_FRACTION) * scores[fastest]
    return min(
        (c for c in scores if c is fastest or scores[c] >= least),
        key=lambda c: (c.placement.minibatch_rows, -scores[c]),
    )


def decide(plan: Plan, verdict: Verdict) -> Plan:
    """The plan with the winner of the race as its choice; a lead within the noise changes nothing.

    Of those as fast as the fastest the one with the smallest minibatch wins. Every rival must have
    been raced.
    """
    measured = {(scheme, placement): rate for scheme, placement, rate in verdict.rates}
    rates = {c: measured[c.scheme, c.placement] for c in plan.rivals}
    best = _winner(rates)
    margin = best.score_at(rates[best]) / plan.chosen.score_at(rates[plan.chosen]) - 1
    shown = ", ".join(
        f"{name} {format_rate(rate)}"
        for name, rate in zip(names(plan.rivals), rates.values(), strict=True)
    )
    raced = (
        f"raced because the prediction is a tie: {shown} env steps/s measured "
        f"(halves of the same run differ by {format_percent(verdict.noise_fraction)})"
    )
    is_safer = best.placement.minibatch_rows < plan.placement.minibatch_rows
    if margin <= verdict.noise_fraction and not is_safer:
        return dataclasses.replace(plan, raced=raced, reasons=(*plan.reasons, raced))
    entry = next(entry for entry in SCHEMES if entry.name == best.scheme)
    firsts = [best, *(c for c in plan.best_of_schemes.values() if c.scheme != best.scheme)]
    known = {(c.scheme, c.placement) for c in firsts}
    others = (c for c in plan.candidates if (c.scheme, c.placement) not in known)
    new, old = names((best, plan.chosen))
    return dataclasses.replace(
        plan,
        chosen=best,
        candidates=(*firsts, *others),
        runner_up=plan.chosen,
        margin_fraction=max(margin, 0.0),
        bottleneck=best.bottleneck,
        flips=(),
        changes_learning=changes_learning(entry, plan.workload, best.placement),
        reasons=(
            raced,
            f"{new} is predicted to run {format_rate(best.env_steps_per_s)} env steps/s, "
            f"{old} {format_rate(plan.chosen.env_steps_per_s)}",
        ),
        raced=raced,
    )


# --------------------------------------------------------------------------------------------------
# Kept


def kept_verdict(plan: Plan, machine: Machine) -> Verdict | None:
    """What an earlier race on this machine said about all rivals of a plan."""
    row = _read(_path(machine)).get(_key(plan))
    if row is None:
        return None
    try:
        verdict = Verdict.from_json(row)
    except (KeyError, TypeError, ValueError):  # of a version whose placements were others
        return None
    known = {(scheme, placement) for scheme, placement, _ in verdict.rates}
    complete = all((c.scheme, c.placement) in known for c in plan.rivals)
    return verdict if complete else None


def keep_verdict(plan: Plan, machine: Machine, verdict: Verdict) -> None:
    """Keep a verdict. Of two processes that do so at once one may lose its own: it races again.

    Raises:
        RunError: it cannot be written.
    """
    path = _path(machine)
    races = {**_read(path), _key(plan): verdict.to_json()}
    path.parent.mkdir(parents=True, exist_ok=True)
    store.write_json_atomic(path, {"schema_version": _SCHEMA_VERSION, "races": races})


def _path(machine: Machine) -> Path:
    return store.calibration_path(machine).with_suffix(".races.json")


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = store.read_json_object(path, "races", remedy="remove it")
    except RunError as fault:
        log.warning("%s", fault)
        return {}
    races = data.get("races")
    if data.get("schema_version") != _SCHEMA_VERSION or not isinstance(races, dict):
        return {}
    return races


def _key(plan: Plan) -> str:
    text = json.dumps([plan.fingerprint, plan.workload.to_json()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
