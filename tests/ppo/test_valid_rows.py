"""Rows that are no transitions: recorded, and then left out of everything that is learned."""

import numpy as np
import pytest
import torch

from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.recorder import OutcomeRecorder
from autoplace.envs.vector import Step
from autoplace.ppo.batch import Batch, make_batch
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.reward_normalizer import RewardNormalizer
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.update import Updater, restrict
from autoplace.workload import Hyperparameters, NetworkSpec

SPEC = NetworkSpec(observation_size=1, hidden_sizes=(4,), action_size=2)
# One environment whose episodes last 3 steps, the last of them cut off. Both rollouts hold the same
# 6 transitions; the second also has the step that only resets, at row 3.
PLAIN = {
    "observations": [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0],
    "actions": [0, 1, 0, 1, 1, 0],
    "rewards": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "truncated": [0, 0, 1, 0, 0, 1],
    "final_index": [2, 5],
}
WITH_RESET = {
    "observations": [0.0, 1.0, 2.0, 9.0, 0.0, 1.0, 2.0, 9.0],
    "actions": [0, 1, 0, 1, 1, 1, 0],
    "rewards": [1.0, 2.0, 3.0, 0.0, 4.0, 5.0, 6.0],
    "truncated": [0, 0, 1, 0, 0, 0, 1],
    "final_index": [2, 6],
}
VALID = [0, 1, 2, 4, 5, 6]


def rollout(rows, valid=None):
    steps = len(rows["actions"])
    made = Rollout(SPEC, rollout_steps=steps, num_envs=1)
    made.observations[:] = torch.tensor(rows["observations"]).view(-1, 1, 1)
    made.actions[:] = torch.tensor(rows["actions"]).view(-1, 1)
    made.outcomes.zero_()
    made.rewards[:] = torch.tensor(rows["rewards"]).view(-1, 1)
    made.truncated[:] = torch.tensor(rows["truncated"]).view(-1, 1)
    made.final_index = torch.tensor(rows["final_index"])
    made.final_observations = torch.tensor([[3.0], [3.5]])
    made.valid_index = None if valid is None else torch.tensor(valid)
    return made


def hyper(steps, **changes):
    return Hyperparameters(num_envs=1, rollout_steps=steps, **changes)


@pytest.mark.parametrize("normalize_rewards", [False, True])
def test_a_batch_without_the_reset_rows_is_that_of_the_same_transitions(normalize_rewards):
    """Log-probabilities, advantages and returns: no trace, no reward and no value leaks across."""
    network = ActorCritic(SPEC, seed=3)
    batches = []
    for rows, valid in ((PLAIN, None), (WITH_RESET, VALID)):
        normalizer = RewardNormalizer(num_envs=1, gamma=0.9) if normalize_rewards else None
        made = make_batch(
            network, rollout(rows, valid), hyper(len(rows["actions"]), gamma=0.9), normalizer
        )
        batches.append((made, normalizer))
    (plain, before), (masked, after) = batches
    assert plain.num_rows == masked.num_rows == 6
    torch.testing.assert_close(masked.rows, plain.rows)
    if normalize_rewards:
        torch.testing.assert_close(after.state, before.state)  # mean, variance and count
        assert after.state[-1] == 6


def test_a_lost_row_ends_the_trace_where_the_episode_was_last_seen():
    """A_2 of the row before it is r + gamma V(o_3) - V(o_2), and nothing of what follows."""
    gamma, gae_lambda = 0.9, 0.8
    lost = dict(WITH_RESET, truncated=[0, 0, 0, 1, 0, 0, 1], final_index=[6])
    network = ActorCritic(SPEC, seed=3)
    made = rollout(lost, VALID)
    made.final_observations = torch.tensor([[3.5]])
    normalizer = RewardNormalizer(num_envs=1, gamma=gamma)
    make_batch(network, made, hyper(7, gamma=gamma), normalizer)
    assert normalizer.state[-1] == 6
    batch = make_batch(network, made, hyper(7, gamma=gamma, gae_lambda=gae_lambda))
    _, _, _, advantage, _ = batch.split(batch.rows)
    value = network.value(made.observations.view(-1, 1)).detach()
    errors = torch.tensor(lost["rewards"][:3]) + gamma * value[1:4] - value[:3]
    decay = gamma * gae_lambda
    expected = torch.stack(
        [
            errors[0] + decay * errors[1] + decay**2 * errors[2],
            errors[1] + decay * errors[2],
            errors[2],
        ]
    )
    torch.testing.assert_close(advantage[:3], expected)


def test_the_rows_of_a_recorded_step_that_only_resets_are_known():
    recorder = OutcomeRecorder(np.zeros((3, 3, 2), np.float32))
    flags = np.zeros(2, np.bool_)
    for t, valid in enumerate((None, np.array([True, False]), np.array([False, False]))):
        recorder.record(
            t, Step(np.zeros((2, 1)), np.zeros(2), flags, flags, [], np.zeros((0, 1)), valid)
        )
    recorder.take_finals(1)
    assert recorder.valid_index.tolist() == [0, 1, 2]  # t N + env
    recorder.record(0, Step(np.zeros((2, 1)), np.zeros(2), flags, flags, [], np.zeros((0, 1))))
    recorder.take_finals(1)
    assert recorder.valid_index is None


def test_episodes_count_neither_the_step_nor_the_reward_of_a_reset():
    episodes = EpisodeTracker(1)
    over, running = np.array([True]), np.array([False])

    def add(flag, reward, ended, valid=None):
        step = Step(
            np.zeros((1, 1)), np.array([reward]), flag, running, ended, np.zeros((0, 1)), valid
        )
        episodes.add(step)

    add(running, 1.0, [])
    add(over, 1.0, [0])
    add(running, 7.0, [], np.array([False]))
    add(running, 1.0, [], np.array([True]))
    add(over, 1.0, [0])
    assert episodes.recent == [(2.0, 2), (2.0, 2)]
    assert episodes.num_skipped == 1


def test_an_episode_that_is_lost_counts_as_none():
    episodes = EpisodeTracker(2)
    no, first = np.zeros(2, np.bool_), np.array([True, False])

    def add(terminated, truncated, ended, valid=None):
        episodes.add(
            Step(
                np.zeros((2, 1)), np.ones(2), terminated, truncated, ended, np.zeros((0, 1)), valid
            )
        )

    add(no, no, [])
    add(no, first, [], ~first)
    add(no, no, [])
    add(np.ones(2, np.bool_), no, [0, 1])
    assert episodes.recent == [(2.0, 2), (4.0, 4)]
    assert episodes.num_skipped == 1


def test_a_restricted_permutation_keeps_its_order_and_every_row():
    orders = torch.tensor([[4, 0, 3, 1, 2], [2, 4, 3, 1, 0]])
    assert restrict(orders, 3).tolist() == [[0, 1, 2], [2, 1, 0]]
    assert restrict(orders[0], 3).tolist() == [0, 1, 2]
    order = torch.randperm(1000)
    assert sorted(restrict(order, 700).tolist()) == list(range(700))


class Seen(Updater):
    """Notes the rows of every minibatch."""

    def minibatch_step(self, batch, index, **options):
        self.seen = [*getattr(self, "seen", []), index.tolist()]
        super().minibatch_step(batch, index, **options)


def test_minibatches_cover_the_valid_rows_and_have_sizes_to_match():
    network = ActorCritic(SPEC, seed=0)
    updater = Seen(network, hyper(9, epochs=2), minibatch_rows=3)
    batch = Batch(torch.rand(7, 5), SPEC)
    batch.rows[:, 1] = 0.0  # the actions
    order = [torch.randperm(9), torch.randperm(9)]
    stats = updater.update(batch, order, learning_rate=1e-3, iteration=1)
    # 7 rows in threes: a rest of one row, which cannot be normalised, joins the one before it.
    assert [len(rows) for rows in updater.seen] == [3, 4, 3, 4]
    assert sorted(updater.seen[0] + updater.seen[1]) == list(range(7))
    assert stats.num_minibatches == 4


@pytest.mark.parametrize("num_rows", [0, 1])
def test_a_rollout_of_nothing_but_resets_changes_no_weight(num_rows):
    network = ActorCritic(SPEC, seed=0)
    before = network.flat.clone()
    updater = Updater(network, hyper(4), minibatch_rows=2)
    batch = Batch(torch.rand(num_rows, 5), SPEC)
    stats = updater.update(batch, [torch.randperm(4)], learning_rate=1e-3, iteration=1)
    assert stats.num_minibatches == 0
    assert torch.equal(network.flat, before)
