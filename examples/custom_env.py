"""An environment of your own: a point that has to stay near the origin.

Run: autoplace train examples/custom_env.py:make_env --total-steps 50000
or:  python examples/custom_env.py
"""

import argparse

import gymnasium as gym
import numpy as np

import autoplace


class StayNearOrigin(gym.Env):
    """Accelerate a drifting point; each step costs the squared distance from the origin."""

    def __init__(self, drift=0.1):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._drift = drift

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._position = self.np_random.uniform(-1, 1, 2)
        self._velocity = np.zeros(2)
        return self._observe(), {}

    def step(self, action):
        wind = self._drift * self.np_random.standard_normal(2)
        self._velocity = 0.9 * self._velocity + 0.1 * action + 0.1 * wind
        self._position = self._position + self._velocity
        distance = float(np.square(self._position).sum())
        return self._observe(), -distance, distance > 25.0, False, {}

    def _observe(self):
        return np.concatenate([self._position, self._velocity]).astype(np.float32)


def make_env(drift=0.1):
    """What `autoplace train examples/custom_env.py:make_env` calls, once per environment."""
    return gym.wrappers.TimeLimit(StayNearOrigin(drift), max_episode_steps=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--budget", type=float, default=7.0)
    args = parser.parse_args()

    env = f"{__file__}:make_env"
    calibration = autoplace.calibrate(budget_s=args.budget, envs=[env])
    workload = autoplace.describe(env, calibration=calibration, gamma=0.95)
    plan = autoplace.make_plan(calibration, workload)
    print(plan.explain())
    result = autoplace.train(plan, total_steps=args.steps)
    print(f"\nmean return of the last 100 episodes: {result.mean_return:.1f}")


if __name__ == "__main__":
    main()
