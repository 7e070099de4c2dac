import logging

import numpy as np
import pytest
import torch

from autoplace.errors import RunError
from autoplace.store import RunDir
from autoplace.train import Callback, StopRequested, load_policy, saving, train
from autoplace.train.checkpoint import load_checkpoint
from tests.envs.toys import Stateless, register
from tests.train.plans import Listener, make_plan


class StopAt(Callback):
    def __init__(self, iteration):
        self.iteration = iteration

    def on_iteration(self, report):
        if report.iteration == self.iteration:
            raise StopRequested


def stopped(folder, plan, *, at=2, total_steps=160, seed=0):
    """A run of 5 iterations that was stopped after ``at`` of them."""
    return train(plan, total_steps=total_steps, seed=seed, run_dir=folder, callbacks=[StopAt(at)])


def test_a_resumed_run_goes_on_with_step_count_learning_rate_and_statistics(tmp_path):
    plan = make_plan(learning_rate=0.01)
    stopped(tmp_path, plan)
    saved = load_checkpoint(tmp_path)
    listener = Listener()
    result = train(plan, total_steps=160, run_dir=tmp_path, resume=True, callbacks=[listener])
    assert listener.starts[0].env_steps == 64 and listener.starts[0].first_iteration == 2
    assert [report.env_steps for report in listener.reports] == [96, 128, 160]
    assert [report.call_env_steps for report in listener.reports] == [32, 64, 96]
    assert [report.update.learning_rate for report in listener.reports] == pytest.approx(
        [0.006, 0.004, 0.002]
    )
    assert result.env_steps == 160 and result.call_env_steps == 96
    assert saved.network["observation_count"].item() == 64
    assert load_checkpoint(tmp_path).network["observation_count"].item() == 160
    assert load_checkpoint(tmp_path).optimizer["step"].item() == 5 * 2 * 2
    assert load_checkpoint(tmp_path).progress.wall_s > saved.progress.wall_s


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("cpu", {}),
        ("cpu", {"engine": "numpy"}),
        ("double-buffer", {"lag": 1}),
        ("double-buffer", {"lag": 1, "engine": "numpy"}),
        ("async", {"lag": 1, "workers": 2}),
    ],
)
def test_where_environments_have_no_memory_a_resumed_run_repeats_the_whole_one_to_the_bit(
    scheme, options, tmp_path
):
    env = register("Stateless", Stateless)
    plan = make_plan(env, scheme=scheme, normalize_rewards=True, **options)
    whole = Listener()
    train(plan, total_steps=160, seed=5, callbacks=[whole])
    stopped(tmp_path, plan, seed=5)
    rest = Listener()
    train(plan, total_steps=160, seed=5, run_dir=tmp_path, resume=True, callbacks=[rest])
    assert torch.equal(rest.flat, whole.flat)
    lags = [[report.policy_lag for report in run.reports] for run in (whole, rest)]
    assert lags[1] == lags[0][2:]


def test_a_resumed_run_resets_its_environments_with_seeds_not_used_before(tmp_path):
    seeds = []

    class Seen(Stateless):
        def reset(self, *, seed=None, options=None):
            if seed is not None:
                seeds.append(seed)
            return super().reset(seed=seed, options=options)

    plan = make_plan(register("Seen", Seen))
    stopped(tmp_path, plan)
    train(plan, total_steps=160, run_dir=tmp_path, resume=True)
    assert len(seeds) == len(set(seeds)) == 4


def test_returns_of_the_last_episodes_are_remembered(tmp_path):
    plan = make_plan()
    result = stopped(tmp_path, plan)
    checkpoint = load_checkpoint(tmp_path)
    returns = [episode_return for episode_return, _ in checkpoint.progress.recent_episodes]
    assert np.mean(returns) == pytest.approx(result.mean_return)


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    plan = make_plan()
    train(plan, total_steps=64, run_dir=tmp_path)
    result = train(plan, total_steps=64, run_dir=tmp_path, resume=True)
    assert (result.iterations, result.env_steps, result.call_env_steps) == (0, 64, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 4}, "--num-envs was 2 and is 4"),
        ({"rollout_steps": 32}, "--rollout-steps was 16 and is 32"),
        ({"hidden_sizes": (9,)}, "network was .*hidden_sizes"),
        ({"env": "Acrobot-v1"}, "environment was .*CartPole"),
    ],
)
def test_what_may_not_change_silently_is_refused(tmp_path, changes, message):
    stopped(tmp_path, make_plan())
    with pytest.raises(RunError, match=message):
        train(make_plan(**changes), total_steps=160, run_dir=tmp_path, resume=True)


def test_another_seed_is_refused(tmp_path):
    stopped(tmp_path, make_plan())
    with pytest.raises(RunError, match="--seed was 0 and is 1"):
        train(make_plan(), total_steps=160, seed=1, run_dir=tmp_path, resume=True)


def test_other_changes_are_said(tmp_path, caplog):
    stopped(tmp_path, make_plan())
    with caplog.at_level(logging.WARNING):
        train(make_plan(gamma=0.5), total_steps=320, run_dir=tmp_path, resume=True)
    assert "resumed with gamma 0.5, the run began with 0.99" in caplog.text
    assert "was to reach 160 steps and is now to reach 320" in caplog.text


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 cut short", b"not an archive at all"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, damage, caplog):
    plan = make_plan()
    stopped(tmp_path, plan, at=1)
    train(plan, total_steps=160, run_dir=tmp_path, resume=True, callbacks=[StopAt(3)])
    (tmp_path / "checkpoint-latest.pt").write_bytes(damage)
    result = train(plan, total_steps=160, run_dir=tmp_path, resume=True)
    assert result.env_steps == 160 and result.call_env_steps == 128  # from 32 on
    assert load_policy(tmp_path).env_steps == 160


def test_a_folder_without_a_readable_checkpoint_is_one_clear_line(tmp_path):
    plan = make_plan()
    with pytest.raises(RunError, match="holds no checkpoint"):
        load_policy(tmp_path)
    stopped(tmp_path, plan)
    for file in tmp_path.glob("checkpoint*"):
        file.write_bytes(b"rubbish")
    with pytest.raises(RunError, match=r"no checkpoint in .* can be read"):
        train(plan, total_steps=160, run_dir=tmp_path, resume=True)


def test_a_folder_with_a_run_in_it_is_not_overwritten(tmp_path):
    train(make_plan(), total_steps=64, run_dir=tmp_path)
    with pytest.raises(RunError, match="--resume"):
        train(make_plan(), total_steps=64, run_dir=tmp_path)


def test_a_checkpoint_is_saved_every_so_often(tmp_path, monkeypatch):
    saved = []
    save = RunDir.save_checkpoint

    def counting(self, content):
        saved.append(1)
        return save(self, content)

    monkeypatch.setattr(RunDir, "save_checkpoint", counting)
    monkeypatch.setattr(saving, "CHECKPOINT_INTERVAL_S", 0.0)
    monkeypatch.setattr(saving, "_CHECKPOINT_SHARE", float("inf"))
    train(make_plan(), total_steps=96, run_dir=tmp_path)
    assert len(saved) == 4  # each of 3 iterations, and the end


def test_a_resume_elsewhere_is_said_in_one_line(tmp_path, caplog):
    stopped(tmp_path, make_plan())
    caplog.clear()
    train(make_plan(scheme="double-buffer"), total_steps=160, run_dir=tmp_path, resume=True)
    assert [record.getMessage() for record in caplog.records] == [
        "resumed with scheme double-buffer (was cpu): placed anew, the learning goes on unchanged, "
        "with the random draws it would have had"
    ]
    caplog.clear()
    train(make_plan(scheme="double-buffer"), total_steps=192, run_dir=tmp_path, resume=True)
    assert "placed anew" not in caplog.text


def test_another_minibatch_is_said_to_change_learning(tmp_path, caplog):
    stopped(tmp_path, make_plan(rows=16))
    train(make_plan(rows=32), total_steps=160, run_dir=tmp_path, resume=True)
    assert "this changes learning: minibatch rows 32 instead of 16" in caplog.text
