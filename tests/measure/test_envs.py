"""Which step times of an environment are taken."""

from __future__ import annotations

from autoplace.measure.envs import part_sizes


def test_parts_are_timed_as_sampler_processes_would_step_them() -> None:
    assert part_sizes(8, 1) == (8,)
    assert part_sizes(8, 2) == (8, 4)  # one process and the learner, or two processes
    assert part_sizes(16, 8) == (4, 2)  # seven do not divide 16, four do
    assert part_sizes(7, 4) == (7,)
