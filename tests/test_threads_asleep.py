"""Timings wait for threads of this process that are still busy."""

from __future__ import annotations

import types

import pytest

from autoplace import device


@pytest.mark.parametrize(("busy_s", "least_s", "most_s"), [(0.0, 0.0, 0.03), (0.1, 0.1, 0.13)])
def test_it_waits_as_long_as_a_thread_is_busy(
    busy_s: float, least_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waited_s(busy_s, monkeypatch) == pytest.approx((least_s + most_s) / 2, abs=0.016)


def test_it_gives_up_on_a_thread_that_is_busy_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited_s(float("inf"), monkeypatch) == pytest.approx(0.25, abs=0.03)


def waited_s(busy_s: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds that are waited for a thread which loops for so long."""
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    fake = types.SimpleNamespace(
        perf_counter=lambda: now_s, process_time=lambda: min(now_s, busy_s), sleep=sleep
    )
    monkeypatch.setattr(device, "time", fake)
    device.let_threads_sleep()
    return now_s
