"""PPO with a policy lag of one iteration, written out step by step in one thread."""

from __future__ import annotations

import torch

from autoplace.envs import inspect_env, make_vector_env, spawn_seeds
from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.recorder import OutcomeRecorder
from autoplace.ppo.batch import Batch, make_batch
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.reward_normalizer import RewardNormalizer
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.update import Updater
from autoplace.train.draws import Draws
from autoplace.train.loop import learning_rate


def simulate(plan, *, num_iterations, seed=0, lags=None):
    """Weights and statistics after ``num_iterations`` updates.

    ``lags`` holds how many updates each rollout's weights are behind: 0 or 1; if not given, 1 for
    all but the first.
    """
    lags = lags or [0] + [1] * (num_iterations - 1)
    workload = plan.workload
    hyper, spec = workload.hyperparameters, workload.network
    envs = make_vector_env(inspect_env(workload.env), num_envs=hyper.num_envs)
    envs.reset(spawn_seeds(seed, hyper.num_envs))
    draws = Draws(workload, seed)
    learned = ActorCritic(spec, seed=seed, normalize_observations=hyper.normalize_observations)
    updater = Updater(learned, hyper, minibatch_rows=plan.placement.minibatch_rows)
    rewards = None
    if hyper.normalize_rewards:
        rewards = RewardNormalizer(num_envs=hyper.num_envs, gamma=hyper.gamma)
    episodes = EpisodeTracker(hyper.num_envs)

    def sample(k, network):
        rollout = Rollout(spec, rollout_steps=hyper.rollout_steps, num_envs=hyper.num_envs)
        recorder = OutcomeRecorder(rollout.outcomes, episodes)
        act = PolicyStep(network)
        for t, noise in enumerate(draws.noise(k)):
            actions = act(torch.from_numpy(envs.observations), noise, rollout, t)
            recorder.record(t, envs.step(actions.numpy()))
        rollout.observations[-1] = torch.from_numpy(envs.observations)
        found = recorder.take_finals(spec.observation_size)
        rollout.final_index, rollout.final_observations = found
        return rollout

    def learn(k, rollout, acted):
        batch = make_batch(acted, rollout, hyper, rewards)
        rows = batch.rows.clone()
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
    pending = None
    for k, lag in enumerate(lags):
        if pending is not None and lag == 0:
            learn(*pending)
            weights.append(learned.flat.clone())
            pending = None
        acted = learned.over(weights[k - lag].clone())
        rollout = sample(k, acted)  # with lag by W(k - 1), though W(k) will learn from it
        if pending is not None:
            learn(*pending)
            weights.append(learned.flat.clone())
        pending = (k, rollout, acted)
    learn(*pending)
    return learned.flat
