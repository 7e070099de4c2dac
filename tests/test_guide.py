"""The comparison with a published guide runs and speaks to each of its statements."""

from __future__ import annotations

import pytest

from calibration import guide


@pytest.mark.slow
def test_every_statement_of_the_guide_gets_an_answer() -> None:
    on_machine = guide.Guide(num_envs=8, rollout_steps=512, env_step_s=1e-4)
    rows = [row for part in guide.PARTS for row in part(on_machine)]
    assert len({claim for claim, _, _ in rows}) == 11
    assert {answer for _, _, answer in rows} == {"yes", "no"}


@pytest.mark.slow
def test_of_the_schemes_that_take_turns_the_gpu_wins_for_all_networks_beyond_some_width() -> None:
    on_machine = guide.Guide(num_envs=8, rollout_steps=512, env_step_s=1e-4)
    winners = [
        guide._ranking(on_machine, guide.IN_TURNS, hidden=hidden)[0][0]
        for hidden in (64, 128, 256, 512, 1024)
    ]
    assert winners == sorted(winners, key=["cpu", "hybrid", "gpu"].index)
    assert winners[0] == "cpu" and winners[-1] == "gpu"
