"""A network of your own: actor and critic share their first layer.

Run: autoplace train CartPole-v1 --network examples/custom_network.py:make_network
or:  python examples/custom_network.py
"""

import argparse

from torch import nn

import autoplace
from autoplace.measure.own_network import measure_own_network, own_network_tasks


class SharedFirstLayer(nn.Module):
    """Observations ``[B, D]`` -> (policy outputs ``[B, A]``, values ``[B]``)."""

    def __init__(self, spec, width):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(spec.observation_size, width), nn.SiLU())
        self.actor = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.critic = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.head = nn.Linear(width, spec.action_size)
        nn.init.orthogonal_(self.head.weight, gain=0.01)  # begin with nearly equal probabilities

    def forward(self, observations):
        features = self.shared(observations)
        return self.head(self.actor(features)), self.critic(features).squeeze(-1)


def make_network(spec):
    """What `--network examples/custom_network.py:make_network` calls, with the network's sizes."""
    return SharedFirstLayer(spec, width=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--budget", type=float, default=7.0)
    args = parser.parse_args()

    workload = autoplace.describe("CartPole-v1", network_factory=f"{__file__}:make_network")
    calibration = autoplace.calibrate(budget_s=args.budget, envs=["CartPole-v1"])
    # The trainer's own steps are timed with this network, so nobody has to write down its costs.
    # (The command line does so by itself.)
    tasks = own_network_tasks(workload, calibration.devices, calibration.machine.usable_cpus)
    calibration = calibration.with_measurements(measure_own_network(tasks))
    plan = autoplace.make_plan(calibration, workload)
    print(plan.explain())
    result = autoplace.train(plan, total_steps=args.steps)
    print(f"\nmean return of the last 100 episodes: {result.mean_return:.1f}")


if __name__ == "__main__":
    main()
