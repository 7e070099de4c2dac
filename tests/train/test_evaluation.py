import sys
from typing import ClassVar

import numpy as np
import pytest
import torch

from autoplace.errors import EnvError, UsageError
from autoplace.report import describe_evaluation
from autoplace.train import evaluate, load_policy, train
from tests.envs.toys import Counter, Recorder, register
from tests.train.plans import Listener, make_plan


def trained(folder, env="CartPole-v1", total_steps=320):
    listener = Listener()
    train(make_plan(env), total_steps=total_steps, run_dir=folder, callbacks=[listener])
    return listener.policy


def test_a_loaded_policy_is_the_trained_one_statistics_included(tmp_path):
    policy, loaded = trained(tmp_path), load_policy(tmp_path)
    assert loaded.env_steps == 320
    assert torch.equal(loaded.network.flat, policy.network.flat)
    assert loaded.network.observation_count.item() == 320
    here = evaluate(policy, episodes=5, seed=3)
    there = evaluate(tmp_path, episodes=5, seed=3)
    assert here == there


def test_loading_gives_a_new_policy_and_changes_none_that_is_there(tmp_path):
    # Symptom: `model.load(path)` returns another model, and whoever ignores that plays the old one.
    old = trained(tmp_path / "old", total_steps=64)
    trained(tmp_path / "new", total_steps=320)
    before = old.network.flat.clone()
    new = load_policy(tmp_path / "new")
    assert torch.equal(old.network.flat, before) and not torch.equal(new.network.flat, before)
    assert not hasattr(old, "load")
    said = [describe_evaluation(evaluate(policy, episodes=1)) for policy in (old, new)]
    assert said[0].endswith("after 64 env steps of training")
    assert said[1].endswith("after 320 env steps of training")


def test_evaluation_leaves_the_statistics_as_they_are(tmp_path):
    policy = trained(tmp_path)
    before = policy.network.flat.clone()
    evaluate(policy, episodes=3)
    assert torch.equal(policy.network.flat, before)


def test_evaluation_repeats_with_its_seed(tmp_path):
    policy = trained(tmp_path)
    first, again, other = (evaluate(policy, episodes=6, seed=s).returns for s in (1, 1, 2))
    assert first == again != other


def test_every_environment_runs_its_own_share():
    # 20 episodes on 16 environments: 4 of them run two. Were the first to end taken, an environment
    # with short episodes would give most of them.
    made = []

    def factory():
        made.append(Counter(length=1 if len(made) % 2 else 50))
        return made[-1]

    env = register("Uneven", factory)
    listener = Listener()
    train(make_plan(env), total_steps=32, callbacks=[listener])
    result = evaluate(listener.policy, episodes=20)
    assert result.episodes == 20
    assert sorted(set(result.lengths)) == [1, 50]
    assert result.lengths.count(1) == result.lengths.count(50) == 10


def test_statistics_of_a_result():
    env = register("Three", lambda: Counter(length=3))
    listener = Listener()
    train(make_plan(env), total_steps=32, callbacks=[listener])
    result = evaluate(listener.policy, episodes=2)
    assert result.returns == (6.0, 6.0)
    assert (result.mean_return, result.std_return, result.episodes) == (6.0, 0.0, 2)
    assert result.to_json()["env_steps"] == 32 and result.to_json()["deterministic"] is True
    assert describe_evaluation(result) == (
        "mean return 6.0 (standard deviation 0.0) over 2 deterministic episodes, "
        "after 32 env steps of training"
    )


def test_a_policy_answers_one_observation_or_a_stack_of_them(tmp_path):
    policy = trained(tmp_path)
    stack = np.random.default_rng(0).normal(size=(5, 4))
    actions = policy(stack)
    assert actions.shape == (5,)
    assert [policy(row) for row in stack] == actions.tolist()


def test_actions_are_post_processed_as_in_training(tmp_path):
    env = register("Wide", lambda: Recorder(low=-0.001, high=0.001, shape=(1, 2)))
    policy = trained(tmp_path, env, total_steps=32)
    action = policy(np.zeros(1), deterministic=False)
    assert action.shape == (1, 2) and np.abs(action).max() <= 0.001


def test_sampled_actions_differ_from_the_most_probable_ones(tmp_path):
    policy = trained(tmp_path)
    stack = np.zeros((200, 4))
    assert len(set(policy(stack).tolist())) == 1
    assert len(set(policy(stack, deterministic=False).tolist())) == 2


def test_an_episode_without_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["autoplace.train.evaluation"], "_ENDLESS_STEPS", 50)
    env = register("Forever", lambda: Counter(length=10**9))
    policy = trained(tmp_path, env, total_steps=32)
    with pytest.raises(EnvError, match="give it a time limit"):
        evaluate(policy, episodes=1)


def test_at_least_one_episode_is_asked_for(tmp_path):
    with pytest.raises(UsageError, match="--episodes must be at least 1, got 0"):
        evaluate(tmp_path, episodes=0)


class Shown(Counter):
    """Shows a grey image that darkens with its steps."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, render_mode=None, **options):
        super().__init__(**options)
        self.render_mode = render_mode

    def render(self):
        return np.full((32, 32, 3), 200 - 10 * self.steps, np.uint8)


def test_the_first_of_every_16_episodes_leave_a_video_and_the_returns_are_the_same(tmp_path):
    pytest.importorskip("moviepy")
    env = register("Shown", Shown)
    policy = trained(tmp_path / "run", env, total_steps=32)
    plain = evaluate(policy, episodes=20)
    filmed = evaluate(policy, episodes=20, video_dir=tmp_path / "videos")
    assert filmed == plain
    videos = sorted(file.name for file in (tmp_path / "videos").glob("*.mp4"))
    assert videos == ["policy-episode-0.mp4", "policy-episode-1.mp4"]
    assert all((tmp_path / "videos" / name).stat().st_size > 500 for name in videos)


def test_what_cannot_be_recorded_is_one_clear_line(tmp_path, monkeypatch):
    blind = trained(tmp_path / "blind", register("Blind", Counter), total_steps=32)
    with pytest.raises(EnvError, match=r"cannot be (made|recorded)"):
        evaluate(blind, episodes=1, video_dir=tmp_path / "videos")
    shown = trained(tmp_path / "shown", register("ShownToo", Shown), total_steps=32)
    monkeypatch.setitem(sys.modules, "moviepy", None)
    with pytest.raises(UsageError, match=r"needs moviepy.*pip install 'autoplace\[video\]'"):
        evaluate(shown, episodes=1, video_dir=tmp_path / "videos")
