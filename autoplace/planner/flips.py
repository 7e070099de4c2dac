"""What would flip a choice: the nearest change of one parameter at which another scheme wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autoplace.planner.plan import Flip, Placement
from autoplace.workload import Workload

# The widest change of a parameter that is searched.
FLIP_REACH = 64.0
_BISECTIONS = 5  # of an interval that spans a factor of two: to 2 %

Winner = Callable[[Workload], "str | None"]


def find_flips(
    workload: Workload, scheme: str, placement: Placement, winner: Winner
) -> tuple[Flip, ...]:
    """The nearest flip of each parameter, alone.

    Args:
        workload: what was planned.
        scheme: what was chosen for it.
        placement: likewise.
        winner: the scheme that is chosen for another workload, ``None`` where none can run it.
    """
    found = (
        _find_flip(parameter, start, change, scheme, winner)
        for parameter, start, change in _parameters(workload, placement)
    )
    return tuple(flip for flip in found if flip is not None)


def _find_flip(
    parameter: str,
    start: float,
    change: Callable[[float], Workload | None],
    scheme: str,
    winner: Winner,
) -> Flip | None:
    def winner_at(value: float) -> str | None:
        changed = change(value)
        return None if changed is None else winner(changed)

    for direction in (2.0, 0.5):
        near, factor = start, direction
        while max(factor, 1 / factor) <= FLIP_REACH:
            far = start * factor
            other = winner_at(far)
            if other is None:
                break
            if other != scheme:
                for _ in range(_BISECTIONS):
                    middle = math.sqrt(near * far)
                    found = winner_at(middle)
                    if found is None or found == scheme:
                        near = middle
                    else:
                        far, other = middle, found
                return Flip(
                    parameter=parameter,
                    from_value=start,
                    to_value=float(round(far)),
                    scheme_from=scheme,
                    scheme_to=other,
                )
            near, factor = far, factor * direction
    return None


def _parameters(
    workload: Workload, placement: Placement
) -> Iterator[tuple[str, float, Callable[[float], Workload | None]]]:
    """(name, present value, the workload with another value) of what a flip is searched in."""
    hyper = workload.hyperparameters
    rows = hyper.rollout_rows

    if workload.network.hidden_sizes and not workload.network.factory:

        def hidden(value: float) -> Workload:
            factor = value / max(workload.network.hidden_sizes)
            sizes = tuple(max(1, round(w * factor)) for w in workload.network.hidden_sizes)
            return workload.replace(hidden_sizes=sizes)

        yield "hidden_sizes", float(max(workload.network.hidden_sizes)), hidden

    def minibatch(value: float) -> Workload | None:
        size = round(value)
        return workload.replace(minibatch_rows=size) if 2 <= size <= rows else None

    yield "minibatch_rows", float(placement.minibatch_rows), minibatch

    def num_envs(value: float) -> Workload | None:
        count = round(value)
        if count < 1 or count * hyper.rollout_steps < max(2, hyper.minibatch_rows or 2):
            return None
        return workload.replace(num_envs=count)

    yield "num_envs", float(hyper.num_envs), num_envs
