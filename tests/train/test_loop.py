import dataclasses
import logging
import math
import os
import signal

import pytest
import torch

from autoplace.errors import EnvError, UsageError
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.update import NonFiniteUpdateError, Updater
from autoplace.results import compare_stages
from autoplace.train import Callback, StopRequested, load_policy, saving, train
from autoplace.train.checkpoint import load_checkpoint
from autoplace.train.loop import count_iterations, learning_rate
from autoplace.workload import Hyperparameters
from tests.envs.toys import Counter, register
from tests.train.plans import Listener, make_plan


def test_a_run_is_made_of_the_whole_iterations_that_fit():
    listener = Listener()
    result = train(make_plan(), total_steps=110, callbacks=[listener])  # 32 rows each
    assert result.iterations == 3 and result.env_steps == result.call_env_steps == 96
    assert [report.env_steps for report in listener.reports] == [32, 64, 96]
    assert listener.starts[0].num_iterations == 3
    assert listener.results == [result] and not result.interrupted


def test_fewer_steps_than_a_rollout_still_make_one_iteration():
    assert count_iterations(Hyperparameters(), 1) == 1
    with pytest.raises(UsageError, match="--total-steps must be at least 1, got 0"):
        count_iterations(Hyperparameters(), 0)


def test_the_learning_rate_begins_whole_and_ends_at_one_nth():
    hyper = Hyperparameters(learning_rate=0.1)
    assert learning_rate(hyper, 0, 1) == 0.1  # a single iteration trains at the full rate
    assert learning_rate(hyper, 0, 2) == 0.1
    assert learning_rate(hyper, 1, 2) == pytest.approx(0.05)
    assert learning_rate(hyper, 9, 10) == pytest.approx(0.01)
    constant = Hyperparameters(learning_rate=0.1, anneal_learning_rate=False)
    assert learning_rate(constant, 9, 10) == 0.1


def test_reports_carry_the_annealed_learning_rate():
    listener = Listener()
    train(make_plan(learning_rate=0.01), total_steps=64, callbacks=[listener])
    assert [r.update.learning_rate for r in listener.reports] == pytest.approx([0.01, 0.005])


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_the_same_seed_repeats_to_the_bit_and_another_does_not(env):
    flats = []
    for seed in (3, 3, 4):
        listener = Listener()
        train(make_plan(env), total_steps=96, seed=seed, callbacks=[listener])
        flats.append(listener.flat)
    assert torch.equal(flats[0], flats[1])
    assert not torch.equal(flats[0], flats[2])


def test_nothing_is_written_without_a_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOPLACE_HOME", str(tmp_path / "home"))
    train(make_plan(), total_steps=64)
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_holds_settings_plan_checkpoint_result_and_events(tmp_path):
    train(make_plan(), total_steps=64, run_dir=tmp_path / "résultats")
    names = {file.name for file in (tmp_path / "résultats").iterdir()}
    assert {"config.json", "plan.json", "checkpoint-latest.pt", "result.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)


def test_each_lane_sums_to_the_iteration_and_stages_have_the_names_of_a_plan():
    listener = Listener()
    result = train(make_plan(), total_steps=128, callbacks=[listener])
    report = listener.reports[-1]
    for lane in ("sampler", "learner"):
        total_s = sum(seconds for (_, of), seconds in report.stage_s.items() if of == lane)
        assert total_s == pytest.approx(report.iteration_s)
    assert set(report.stage_s) == {
        ("policy_step", "sampler"),
        ("env_step", "sampler"),
        ("wait", "sampler"),
        ("gae", "learner"),
        ("update", "learner"),
        ("wait", "learner"),
    }
    assert set(result.stage_s) == set(report.stage_s)
    assert result.env_steps_per_s > 0 and result.iteration_s > 0


def test_predictions_stand_beside_what_was_measured():
    plan = make_plan()
    result = train(plan, total_steps=96)
    rows = compare_stages(plan, result)
    assert [(row.name, row.lane) for row in rows] == [
        ("env_step", "sampler"),
        ("update", "learner"),
        ("wait", "sampler"),
    ]
    assert all(row.inside and 0 < row.measured_s < 2 for row in rows)


def test_no_mean_return_while_no_episode_has_ended(caplog):
    env = register("Endless", lambda: Counter(length=10**9))
    listener = Listener()
    with caplog.at_level(logging.WARNING):
        result = train(make_plan(env), total_steps=32 * 25, callbacks=[listener])
    assert result.mean_return is None
    assert all(report.mean_return is None for report in listener.reports)
    assert listener.reports[-1].longest_running == 16 * 25
    assert "no episode has finished in 20 iterations (the longest has run for 320" in caplog.text


def test_returns_are_sums_of_raw_rewards():
    # Counter pays 1 + 2 + 3 + 4 in an episode of 4 steps; 16 steps of 2 environments are 8 of them.
    env = register("Four", lambda: Counter(length=4))
    listener = Listener()
    train(make_plan(env, normalize_rewards=True), total_steps=32, callbacks=[listener])
    report = listener.reports[0]
    assert (report.mean_return, report.mean_length, report.num_episodes) == (10.0, 4.0, 8)


class StopAfter(Callback):
    def __init__(self, iterations, how):
        self.iterations, self.how = iterations, how

    def on_iteration(self, report):
        if report.iteration == self.iterations:
            self.how()


def raises(kind):
    def how():
        raise kind

    return how


@pytest.mark.parametrize(
    "how",
    [
        raises(StopRequested),
        raises(KeyboardInterrupt),
        lambda: os.kill(os.getpid(), signal.SIGINT),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    ],
    ids=["callback", "KeyboardInterrupt", "SIGINT", "SIGTERM"],
)
def test_an_interrupted_run_is_saved_and_says_so(tmp_path, how):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    result = train(make_plan(), total_steps=320, run_dir=tmp_path, callbacks=[StopAfter(2, how)])
    assert result.interrupted and result.env_steps == 64
    assert load_checkpoint(tmp_path).progress.env_steps == 64
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_interrupt_in_the_middle_of_a_rollout_drops_that_rollout(tmp_path):
    def observe(plain, total_steps):
        if total_steps == 40:  # in the third rollout
            os.kill(os.getpid(), signal.SIGINT)
        return plain

    env = register("Interrupts", lambda: Counter(observe=observe))
    result = train(make_plan(env), total_steps=320, run_dir=tmp_path)
    assert result.interrupted and result.env_steps == 64
    assert load_checkpoint(tmp_path).progress.iteration == 2


def test_an_environment_that_breaks_stops_the_run_with_everything_before_it_saved(tmp_path):
    def observe(plain, total_steps):
        return plain * math.nan if total_steps == 50 else plain

    env = register("Breaks", lambda: Counter(observe=observe))
    with pytest.raises(EnvError, match=r"every observation must be finite, got nan .* 50"):
        train(make_plan(env), total_steps=320, run_dir=tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.progress.iteration == 3  # 48 steps of each environment
    assert checkpoint.build_network().flat.isfinite().all()


def test_weights_that_became_nan_are_never_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "CHECKPOINT_INTERVAL_S", 0.0)
    monkeypatch.setattr(saving, "_CHECKPOINT_SHARE", math.inf)
    # Rewards of 1e38 overflow the squared error of the values.
    env = register("Overflows", lambda: Counter(reward=lambda step: 1e38 if step > 40 else 1.0))
    with pytest.raises(NonFiniteUpdateError, match="loss of iteration 3 is not finite"):
        train(make_plan(env, normalize_rewards=False), total_steps=320, run_dir=tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.progress.iteration == 2
    assert checkpoint.build_network().flat.isfinite().all()
    assert load_policy(tmp_path).env_steps == 64


def test_a_rollout_of_65_rows_in_minibatches_of_64_learns_without_nan():
    listener = Listener()
    plan = make_plan(num_envs=5, rollout_steps=13, rows=64)
    train(plan, total_steps=130, callbacks=[listener])
    assert listener.flat.isfinite().all()
    assert [report.update.num_minibatches for report in listener.reports] == [2, 2]


def test_an_environment_that_changed_since_it_was_planned_is_refused():
    lengths = iter([2, 3])

    def factory():
        env = Counter()
        env.observation_space = type(env.observation_space)(-1, 1, (next(lengths),))
        return env

    plan = make_plan(register("Changes", factory))
    with pytest.raises(EnvError, match="has other sizes than it was planned with"):
        train(plan, total_steps=32)


def test_resuming_needs_a_folder():
    with pytest.raises(UsageError, match="name it by --run-dir"):
        train(make_plan(), total_steps=32, resume=True)


def test_an_unknown_scheme_is_refused():
    names = "cpu, hybrid, gpu, double-buffer, async"
    with pytest.raises(UsageError, match=f"--scheme is one of {names}, got 'tpu'"):
        train(make_plan(scheme="tpu"), total_steps=32)


@pytest.mark.parametrize("engine", ["eager", "numpy"])
def test_a_run_on_the_cpu_makes_no_context_on_a_gpu_that_is_there(monkeypatch, tmp_path, engine):
    # Symptom: a run on the CPU takes hundreds of megabytes of every GPU.
    def begun():
        raise AssertionError("a context was made")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", begun)
    with pytest.raises(AssertionError, match="a context was made"):
        torch.zeros(1, device="cuda")
    train(make_plan(engine=engine), total_steps=96, run_dir=tmp_path)
    assert load_policy(tmp_path).env_steps == 96


def test_each_side_has_the_threads_that_its_plan_says_and_gives_them_back(monkeypatch):
    # Symptom: as many threads as the host has cores, in a container of two.
    seen = {"act": set(), "learn": set()}

    def noting(kind, name, side):
        original = getattr(kind, name)

        def noted(*arguments, **options):
            seen[side].add(torch.get_num_threads())
            return original(*arguments, **options)

        monkeypatch.setattr(kind, name, noted)

    noting(PolicyStep, "__call__", "act")
    noting(Updater, "minibatch_step", "learn")
    before, plan = torch.get_num_threads(), make_plan()
    placement = dataclasses.replace(plan.placement, sample_threads=3, learn_threads=5)
    chosen = dataclasses.replace(plan.chosen, placement=placement)
    train(dataclasses.replace(plan, chosen=chosen, candidates=(chosen,)), total_steps=64)
    assert seen == {"act": {3}, "learn": {5}} and torch.get_num_threads() == before
