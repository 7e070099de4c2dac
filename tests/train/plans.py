"""Plans for tests, made by hand: no machine is measured."""

from __future__ import annotations

from autoplace.envs import inspect_env
from autoplace.planner.plan import Candidate, Placement, Plan, Stage
from autoplace.train import Callback
from autoplace.workload import EnvSpec, Hyperparameters


def make_plan(
    env="CartPole-v1",
    *,
    scheme="cpu",
    device="cpu",
    interval=4,
    rows=None,
    workers=0,
    lag=0,
    engine="eager",
    **hyper,
):
    """A plan for a small workload; ``hyper`` changes the hyperparameters."""
    spec = env if isinstance(env, EnvSpec) else EnvSpec(id=env)
    small = {"num_envs": 2, "rollout_steps": 16, "epochs": 2, "hidden_sizes": (8,)}
    hyperparameters = Hyperparameters(**{**small, **hyper})
    placement = Placement(
        device=device,
        sample_device=device if scheme == "gpu" else "cpu",
        learn_device=device,
        transfer_interval_steps=interval,
        minibatch_rows=rows or 16,
        num_envs=hyperparameters.num_envs,
        num_workers=workers,
        max_policy_lag=lag,
        engine=engine,
    )
    stages = tuple(
        Stage(
            name=name,
            lane=lane,
            start_s=0.0,
            calls=1,
            total_s=1.0,
            low_s=0.0,
            high_s=2.0,
            source="measured",
        )
        for name, lane in (("env_step", "sampler"), ("update", "learner"), ("wait", "sampler"))
    )
    chosen = Candidate(scheme=scheme, placement=placement, stages=stages)
    return Plan(
        workload=inspect_env(spec).workload(hyperparameters),
        fingerprint="test",
        chosen=chosen,
        candidates=(chosen,),
        runner_up=None,
        margin_fraction=0.0,
        is_close=False,
        bottleneck="update",
        flips=(),
        changes_learning=(),
        reasons=(),
    )


class Listener(Callback):
    """Keeps everything that it is told."""

    def __init__(self):
        self.starts, self.reports, self.results = [], [], []

    def on_start(self, start):
        self.starts.append(start)

    def on_iteration(self, report):
        self.reports.append(report)

    def on_end(self, result):
        self.results.append(result)

    @property
    def policy(self):
        return self.starts[-1].snapshot()

    @property
    def flat(self):
        return self.policy.network.flat
