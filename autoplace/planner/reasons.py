"""What a plan says in sentences, and why some placements are no candidates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autoplace.engines import FP32
from autoplace.measurement import Measurement
from autoplace.planner.choices import MINIBATCH_EFFICIENCY, OWN_DYNAMICS
from autoplace.planner.plan import Candidate, Placement
from autoplace.planner.schemes import Scheme
from autoplace.units import format_percent, format_rate, format_seconds
from autoplace.workload import Workload

_WORTH_SAYING = 0.01  # share of a vector step, or of the rows


def changes_learning(scheme: Scheme, workload: Workload, placement: Placement) -> tuple[str, ...]:
    """Settings that differ from the user's and may change what is learned."""
    changes = []
    lag = placement.max_policy_lag
    if lag:
        age = "one iteration old" if lag == 1 else f"up to {lag} iterations old"
        changes.append(f"{scheme.name} samples with a policy {age}")
    if placement.env_backend in OWN_DYNAMICS:
        changes.append(
            f"{placement.env_backend} steps its own implementation of {workload.env.id}, whose "
            "physics and random numbers differ"
        )
    if placement.num_envs != workload.hyperparameters.num_envs:
        changes.append(
            f"num_envs {placement.num_envs} instead of {workload.hyperparameters.num_envs}"
        )
    if placement.precision != FP32:
        changes.append(f"gradient steps compute in {placement.precision}")
    return tuple(changes)


def assumes(steps: Measurement) -> tuple[str, ...]:
    """What the cost of vector steps takes for granted; ``steps`` are those nearest to the run's."""
    episodes = steps.episodes
    if episodes is None:
        return ()
    fewer = 1 / episodes.steps - 1 / episodes.expected_steps
    saved = steps.task.num_envs * episodes.end_s * fewer / steps.median_s
    if max(saved, steps.expected_valid_fraction - steps.valid_fraction) < _WORTH_SAYING:
        return ()
    return (
        f"episodes of {episodes.expected_steps:,.0f} env steps, between the {episodes.steps:,.0f} "
        f"under random actions and the limit of {episodes.limit:,}; the end of one takes "
        f"{format_seconds(episodes.end_s)}",
    )


def missing_schemes(
    schemes: Sequence[Scheme],
    costed: Collection[str],
    rejected: Sequence[Candidate],
    workload: Workload,
    devices: Sequence[str],
    max_policy_lag: int,
    usable_cpus: int,
) -> list[Candidate]:
    """A rejected candidate for each scheme that had no placement at all, with the reason."""
    seen = {*costed, *(c.scheme for c in rejected)}
    hyper = workload.hyperparameters

    def reason(scheme: Scheme) -> str:
        if scheme.policy_lag > max_policy_lag:
            return (
                f"its policy lag of {scheme.policy_lag} is above --max-policy-lag {max_policy_lag}"
            )
        if scheme.policy_lag and usable_cpus < 2:
            return "sampling and learning at once need two usable CPUs"
        if not scheme.policy_lag and len(devices) < 2:
            return "no accelerator was calibrated on this machine"
        return "no placement has the values that were given"

    return [
        Candidate(
            scheme=scheme.name,
            placement=Placement(
                device="cpu",
                sample_device="cpu",
                learn_device="cpu",
                transfer_interval_steps=hyper.rollout_steps,
                minibatch_rows=hyper.minibatch_rows or min(MINIBATCH_EFFICIENCY),
                num_envs=hyper.num_envs,
            ),
            rejected_because=reason(scheme),
        )
        for scheme in schemes
        if scheme.name not in seen
    ]


def nothing_left(
    rejected: Sequence[Candidate],
    scheme: str,
    given: Mapping[str, object],
    devices: Sequence[str],
) -> str:
    """Why no placement is left, and what to change."""
    if rejected:
        first = rejected[0]
        return (
            f"no placement fits: {first.scheme} {first.rejected_because}: "
            "use fewer or smaller rollouts (--num-envs, --rollout-steps)"
        )
    if scheme in ("hybrid", "gpu") and len(devices) < 2:
        return (
            f"--scheme {scheme} needs an accelerator with timings, and only {devices[0]} has any: "
            "use --scheme cpu, or run `autoplace calibrate` where there is one"
        )
    values = ", ".join(f"{name}={value}" for name, value in given.items())
    return (
        f"no placement has all of {values or 'the given values'} (scheme {scheme}, devices "
        f"{', '.join(devices)}): leave one of them to auto"
    )


def reasons(
    chosen: Candidate,
    runner_up: Candidate | None,
    margin: float,
    is_close: bool,
    bottleneck: str,
    rejected: Sequence[Candidate],
    devices: Sequence[str],
) -> tuple[str, ...]:
    """The choice in sentences, from the numbers it was made from."""
    busy_s = max(s.total_s for s in chosen.stages if s.name == bottleneck)
    lines = [
        f"{chosen.scheme} is predicted to run {format_rate(chosen.env_steps_per_s)} env steps/s",
        f"{bottleneck} takes {format_percent(busy_s / chosen.iteration_s)} of an iteration",
    ]
    if runner_up is not None:
        other = (
            f"{runner_up.scheme} on {runner_up.placement.device}"
            if runner_up.scheme != chosen.scheme
            else "the next placement of the same scheme"
        )
        verdict = "a tie within the model's error" if is_close else "beyond the model's error"
        lines.append(f"{format_percent(margin)} ahead of {other}, {verdict}")
    if len(devices) < 2:
        lines.append("only the CPU has timings, so only its thread counts and sizes were free")
    lines.extend(
        f"{candidate.scheme} was left out: {candidate.rejected_because}"
        for candidate in rejected[:3]
    )
    return tuple(lines)
