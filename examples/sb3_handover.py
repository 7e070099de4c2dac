"""Plan with autoplace, train with Stable-Baselines3.

Run: python examples/sb3_handover.py
The same as a script to paste: autoplace plan CartPole-v1 --for sb3
"""

import argparse

import torch
from stable_baselines3 import PPO
from stable_baselines3.common import vec_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

import autoplace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--budget", type=float, default=7.0)
    args = parser.parse_args()

    calibration = autoplace.calibrate(budget_s=args.budget, envs=[args.env])
    plan = autoplace.make_plan(calibration, autoplace.describe(args.env))
    found = plan.for_sb3()
    print(found.to_text())  # what it does differently is at the top

    torch.set_num_threads(found.torch_threads)
    backend = getattr(vec_env, found.vec_env_class)
    env = make_vec_env(found.env, **found.vec_env, vec_env_cls=backend)
    if found.vec_normalize is not None:
        env = vec_env.VecNormalize(env, **found.vec_normalize)
    model = PPO(env=env, **found.ppo)
    model.learn(args.steps)

    if found.vec_normalize is not None:
        env.training = env.norm_reward = False  # the returns of the environment itself
    mean, std = evaluate_policy(model, env, n_eval_episodes=10)
    print(f"\nmean return in Stable-Baselines3: {mean:.1f} (standard deviation {std:.1f})")


if __name__ == "__main__":
    main()
