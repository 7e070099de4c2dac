"""What would flip a choice: the nearest change of one parameter at which another one wins.

A choice is a scheme and the device that learns; a mere change of threads or workers is no flip.
Each parameter is searched alone, upwards and downwards, over a wide range and then by bisection. A
flip counts only if the choice does not come back a little beyond: near-ties go back and forth. Few
sampler threads and chunk lengths are looked at, for they hardly decide between choices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

from autoplace.planner.plan import Flip, Placement
from autoplace.planner.schemes import Axes
from autoplace.workload import Workload

_STEP = 4.0  # factor between the values that are looked at first
_STEPS = 3  # of them, upwards and downwards
_BISECTIONS = 6  # of an interval that spans such a factor: to 2 %
_BEYOND = 1.12  # times a flip's value, where its winner must still lead


class Choice(NamedTuple):
    """What wins."""

    scheme: str
    learn_device: str


class Change(NamedTuple):
    """What is planned instead.

    ``env_extra_s`` are seconds by which each step of one environment takes longer, or shorter.
    """

    workload: Workload
    total_steps: int | None
    env_extra_s: float = 0.0


# What is chosen after each of several changes, ``None`` where nothing can run it.
Winners = Callable[[Sequence[Change]], "list[Choice | None]"]
# A search for one flip: it asks for what is chosen after a change until it has found it.
_Search = Generator[Change, "Choice | None", "Flip | None"]
_Asking = Generator[Change, "Choice | None", "Choice | None"]
_Bisection = Generator[Change, "Choice | None", "tuple[float, Choice]"]


def find_flips(
    workload: Workload,
    choice: Choice,
    placement: Placement,
    env_step_s: float,
    winners: Winners,
    total_steps: int | None = None,
) -> tuple[Flip, ...]:
    """The nearest flip of each parameter, alone, in either direction.

    All are searched in step, so that what they ask for is costed together.

    Args:
        workload: what was planned.
        choice: what was chosen for it.
        placement: likewise.
        env_step_s: seconds that a step of one environment takes.
        winners: what is chosen after changes.
        total_steps: of the run; ``None`` where its length is of no account.
    """
    searches = [
        _find_flip(parameter, start, factor, change, choice)
        for parameter, start, change in _parameters(workload, placement, env_step_s, total_steps)
        for factor in (_STEP, 1 / _STEP)
    ]
    found: dict[int, Flip | None] = {}
    answers: dict[int, Choice | None] = dict.fromkeys(range(len(searches)))
    while answers:
        asked: dict[int, Change] = {}
        for index, answer in answers.items():
            step = _go_on(searches[index], answer)
            if isinstance(step, Change):
                asked[index] = step
            else:
                found[index] = step
        answers = dict(zip(asked, winners(list(asked.values())), strict=True)) if asked else {}
    return tuple(flip for _, flip in sorted(found.items()) if flip is not None)


def _go_on(search: _Search, answer: Choice | None) -> Change | Flip | None:
    """What a search asks for next, or what it has found."""
    try:
        return search.send(answer)
    except StopIteration as end:
        found: Flip | None = end.value
        return found


def few_placements(axes: Axes, placement: Placement) -> Axes:
    """The axes with only those values that a search for flips looks at."""

    def some(values: tuple[int, ...], chosen: int) -> tuple[int, ...]:
        return tuple(v for v in values if v in (min(values), chosen, max(values)))

    longest = max(axes.transfer_intervals)
    intervals = (placement.transfer_interval_steps, longest)
    return dataclasses.replace(
        axes,
        sample_threads=some(axes.sample_threads, placement.sample_threads),
        transfer_intervals=tuple(v for v in axes.transfer_intervals if v in intervals),
    )


def _find_flip(
    parameter: str,
    start: float,
    factor: float,
    change: Callable[[float], Change | None],
    choice: Choice,
) -> _Search:
    def winner_at(value: float) -> _Asking:
        changed = change(value)
        return None if changed is None else (yield changed)

    near = start
    for _ in range(_STEPS):
        far = near * factor
        other = yield from winner_at(far)
        if other is None:
            return None
        if other != choice:
            edge, other = yield from _bisected(near, far, choice, other, winner_at)
            beyond = edge * _BEYOND ** math.copysign(1, factor - 1)
            lasting = yield from winner_at(beyond)
            if lasting != choice:
                other = other if lasting is None else lasting
                break
            far = beyond  # a near-tie that goes back and forth: look further
        near = far
    else:
        return None
    return Flip(
        parameter=parameter,
        from_value=start,
        to_value=edge if parameter == "env_step_s" else float(round(edge)),
        scheme_from=choice.scheme,
        scheme_to=other.scheme,
        device_from=choice.learn_device,
        device_to=other.learn_device,
    )


def _bisected(
    near: float,
    far: float,
    choice: Choice,
    other: Choice,
    winner_at: Callable[[float], _Asking],
) -> _Bisection:
    """The value next to ``near`` at which another than ``choice`` wins, and which one that is."""
    for _ in range(_BISECTIONS):
        middle = math.sqrt(near * far)
        found = yield from winner_at(middle)
        if found is None or found == choice:
            near = middle
        else:
            far, other = middle, found
    return far, other


def _parameters(
    workload: Workload, placement: Placement, env_step_s: float, total_steps: int | None
) -> Iterator[tuple[str, float, Callable[[float], Change | None]]]:
    """(name, present value, what another value changes) of all that flips are searched in."""
    hyper, network = workload.hyperparameters, workload.network

    if network.hidden_sizes and not network.factory:

        def hidden(value: float) -> Change:
            factor = value / max(network.hidden_sizes)
            sizes = tuple(max(1, round(w * factor)) for w in network.hidden_sizes)
            return Change(workload.replace(hidden_sizes=sizes), total_steps)

        yield "hidden_sizes", float(max(network.hidden_sizes)), hidden

    def minibatch(value: float) -> Change | None:
        size = round(value)
        if not 2 <= size <= hyper.rollout_rows:
            return None
        return Change(workload.replace(minibatch_rows=size), total_steps)

    yield "minibatch_rows", float(placement.minibatch_rows), minibatch

    def num_envs(value: float) -> Change | None:
        count = round(value)
        if count < 1 or count * hyper.rollout_steps < max(2, hyper.minibatch_rows or 2):
            return None
        return Change(workload.replace(num_envs=count), total_steps)

    yield "num_envs", float(hyper.num_envs), num_envs

    if network.is_plain:

        def observation(value: float) -> Change:
            size = max(1, round(value))
            wider = dataclasses.replace(network, observation_size=size)
            return Change(workload.replace(network=wider), total_steps)

        yield "observation_size", float(network.observation_size), observation

    def env_step(value: float) -> Change:
        return Change(workload, total_steps, value - env_step_s)

    yield "env_step_s", env_step_s, env_step

    if total_steps is not None:
        yield "total_steps", float(total_steps), lambda value: Change(workload, round(value))
