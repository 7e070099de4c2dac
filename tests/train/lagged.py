"""PPO with a policy lag, written out step by step in one thread."""

from __future__ import annotations

import copy

import torch

from autoplace.envs import inspect_env, make_vector_env, spawn_seeds
from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.recorder import OutcomeRecorder
from autoplace.ppo.batch import Batch, make_batch
from autoplace.ppo.draws import Draws
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.reward_normalizer import RewardNormalizer
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.update import Updater
from autoplace.train.loop import learning_rate


def simulate(plan, *, num_iterations, versions=None, seed=0):
    """Weights and statistics after ``num_iterations`` updates.

    ``versions`` has for each rollout those of the weights that sample it, each in an equal share of
    the environments; without it the lag is one iteration.
    """
    workload = plan.workload
    hyper, spec = workload.hyperparameters, workload.network
    versions = versions or [(max(0, k - 1),) for k in range(num_iterations)]
    envs = make_vector_env(inspect_env(workload.env), num_envs=hyper.num_envs)
    envs.reset(spawn_seeds(seed, hyper.num_envs))
    draws = Draws(workload, seed)
    learned = ActorCritic(spec, seed=seed, normalize_observations=hyper.normalize_observations)
    updater = Updater(learned, hyper, minibatch_rows=plan.placement.minibatch_rows)
    rewards = None
    if hyper.normalize_rewards:
        rewards = RewardNormalizer(num_envs=hyper.num_envs, gamma=hyper.gamma)
    episodes = EpisodeTracker(hyper.num_envs)

    def shares(count):
        width = hyper.num_envs // count
        return [slice(w * width, (w + 1) * width) for w in range(count)]

    def sample(k, acted):
        rollout = Rollout(spec, rollout_steps=hyper.rollout_steps, num_envs=hyper.num_envs)
        recorder = OutcomeRecorder(rollout.outcomes.numpy())
        parts = [
            (PolicyStep(network), share, rollout.columns(share))
            for network, share in zip(acted, shares(len(acted)), strict=True)
        ]
        for t, noise in enumerate(draws.noise(k)):
            for act, share, part in parts:
                act(torch.from_numpy(envs.observations[share]), noise[share], part, t)
            recorder.record(t, envs.step(rollout.actions[t].numpy()))
        rollout.observations[-1] = torch.from_numpy(envs.observations)
        rollout.note_ends(*recorder.take_finals(spec.observation_size), None)
        episodes.add_rollout(rollout.outcomes.numpy())
        return rollout

    def learn(k, rollout, acted):
        rows = None
        for network, share in zip(acted, shares(len(acted)), strict=True):
            seen_by = make_batch(network, rollout, hyper, copy.deepcopy(rewards)).rows
            rows = seen_by.clone() if rows is None else rows
            by_env = (hyper.rollout_steps, hyper.num_envs, -1)
            rows.view(by_env)[:, share] = seen_by.view(by_env)[:, share]
        make_batch(learned, rollout, hyper, rewards)  # moves the statistics of the rewards on
        seen = rollout.observations[:-1].reshape(len(rows), -1)
        rows[:, : spec.observation_size] = learned.normalize(seen)
        updater.update(
            Batch(rows, spec),
            draws.permutations(k).unbind(0),
            learning_rate=learning_rate(hyper, k, num_iterations),
            iteration=k,
        )
        learned.update_statistics(seen)

    weights = [learned.flat.clone()]  # W(0), W(1), ...
    for k in range(num_iterations):
        acted = [learned.over(weights[version].clone()) for version in versions[k]]
        learn(k, sample(k, acted), acted)
        weights.append(learned.flat.clone())
    return learned.flat
