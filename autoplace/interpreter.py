"""Python as environments are made of it: what keeps a core busy, and what is timed beside that."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from typing import Any

import numpy as np


def stretch() -> float:
    """Some twenty microseconds of small numbers, lists, calls and arrays."""
    state, constants = [0.1, 0.2, 0.3, 0.4], {"gravity": 9.8, "step": 0.02}
    for _ in range(10):
        force = math.cos(state[0]) * constants["gravity"] + math.sin(state[1])
        state = [state[1], state[2] + constants["step"] * force, state[3], 0.5 * force]
        observation = np.array(state, dtype=np.float32)
    return float(observation[0])


def keep_busy(orders: Any, answers: Any, work: Callable[[], object]) -> None:  # noqa: ANN401
    """Repeat ``work`` from every first order to the next, each of which is sent back.

    An order of ``None`` ends it; ``orders`` and ``answers`` are channels of any clock.
    """
    while (order := orders.get()) is not None:
        answers.put(order)
        order = None
        while True:
            work()
            try:
                order = orders.get(timeout=0.0)
            except queue.Empty:
                continue
            break
        if order is None:
            return
        answers.put(order)


def stretches(count: int, charge: Callable[[int], object] | None) -> None:
    """So many of them; a virtual clock is told of them instead."""
    if charge is not None:
        charge(count)
        return
    for _ in range(count):
        stretch()


def interpret_when_told(
    orders: Any,  # noqa: ANN401 - channels of any clock
    answers: Any,  # noqa: ANN401
    charge: Callable[[int], object] | None,
) -> None:
    """As many stretches as every order says, which then is sent back; ``None`` ends it."""
    while (count := orders.get()) is not None:
        stretches(count, charge)
        answers.put(count)


def keep_interpreting(orders: Any, answers: Any, charge: Callable[[], None] | None) -> None:  # noqa: ANN401
    """Keep a core busy with stretches of Python, which a virtual clock has to be told of."""

    def work() -> None:
        for _ in range(50):
            stretch()
        if charge is not None:
            charge()

    keep_busy(orders, answers, work)
