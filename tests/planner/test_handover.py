"""Plans as other trainers' arguments, checked against the real Stable-Baselines3."""

import dataclasses
import json
import types

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common import vec_env as vec_envs
from stable_baselines3.common.env_util import make_vec_env

from autoplace import cli
from autoplace.errors import UsageError
from autoplace.planner.handover import for_sb3
from autoplace.planner.plan import Candidate
from autoplace.ppo.network import ActorCritic
from tests.envs.toys import Spaces, register
from tests.train.plans import make_plan


def build(arguments):
    """A model of SB3's own, as the docstring of the arguments says."""
    envs = make_vec_env(
        arguments.env,
        **arguments.vec_env,
        vec_env_cls=getattr(vec_envs, arguments.vec_env_class),
    )
    if arguments.vec_normalize is not None:
        envs = vec_envs.VecNormalize(envs, **arguments.vec_normalize)
    return PPO(env=envs, **arguments.ppo)


def candidate(scheme="cpu", speed=100.0, **placement):
    base = make_plan().placement
    return Candidate(
        scheme=scheme,
        placement=dataclasses.replace(base, **placement),
        env_steps_per_s=speed,
        iteration_s=1.0,
    )


def plan_of(chosen, *others, **plan):
    return dataclasses.replace(make_plan(**plan), chosen=chosen, candidates=(chosen, *others))


HYPER = {
    "num_envs": 3,
    "rollout_steps": 8,
    "rows": 12,
    "epochs": 3,
    "hidden_sizes": (24, 16),
    "learning_rate": 1e-3,
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "clip_range": 0.1,
    "entropy_coef": 0.01,
    "value_coef": 0.7,
    "max_grad_norm": 0.4,
    "value_clip": 0.3,
    "target_kl": 0.3,
}


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_sb3_gets_every_hyperparameter_and_learns_with_them(env):
    model = build(make_plan(env, **HYPER).for_sb3())
    assert (model.n_envs, model.n_steps, model.batch_size, model.n_epochs) == (3, 8, 12, 3)
    assert (model.gamma, model.gae_lambda) == (0.9, 0.8)
    assert (model.clip_range(1.0), model.clip_range_vf(1.0)) == (0.1, 0.3)
    assert (model.ent_coef, model.vf_coef, model.max_grad_norm) == (0.01, 0.7, 0.4)
    assert model.target_kl == pytest.approx(0.2)  # it stops at 1.5 times that
    assert model.lr_schedule(1.0) == 1e-3 and model.lr_schedule(0.25) == 0.25e-3
    assert isinstance(model.env, vec_envs.VecNormalize) and model.env.gamma == 0.9
    model.learn(24)
    assert model.num_timesteps == 24 and model._n_updates == 3


def test_sb3s_network_is_the_same_as_autoplaces():
    # Symptom: a hand-over that trains another network than the plan was made for.
    plan = make_plan("Pendulum-v1", hidden_sizes=(24, 16))
    policy = build(plan.for_sb3()).policy
    network = ActorCritic(plan.workload.network)
    theirs = sorted(tuple(p.shape) for p in policy.parameters())
    ours = sorted(tuple(p.shape) for p in network.parameters())
    assert theirs == ours
    # The same weights give the same means and values: activations and their order agree.
    linears = [m for m in policy.mlp_extractor.policy_net if isinstance(m, torch.nn.Linear)]
    linears.append(policy.action_net)
    for (weight, bias), linear in zip(network.actor_layers, linears, strict=True):
        linear.weight.data.copy_(weight)
        linear.bias.data.copy_(bias)
    rows = torch.randn(5, 3)
    with torch.no_grad():
        means = policy.get_distribution(rows).distribution.mean
        torch.testing.assert_close(means, network.policy(rows))
    # And both start alike: orthogonal with the same gains, log standard deviations of 0.
    norms = [float(m.weight.data.norm()) for m in linears]
    fresh = build(plan.for_sb3()).policy
    begun = [m for m in fresh.mlp_extractor.policy_net if isinstance(m, torch.nn.Linear)]
    begun.append(fresh.action_net)
    assert [float(m.weight.data.norm()) for m in begun] == pytest.approx(norms, rel=1e-4)
    assert fresh.log_std.tolist() == [0.0]
    adam = build(plan.for_sb3()).policy.optimizer.defaults
    assert (adam["eps"], adam["betas"]) == (1e-5, (0.9, 0.999))


DICT = spaces.Dict(
    rgb=spaces.Box(0, 255, (36, 36, 3), np.uint8), compass=spaces.Box(-180, 180, (2,), np.float32)
)


@pytest.mark.parametrize(
    ("space", "policy", "normalized"),
    [
        (spaces.Discrete(6), "MlpPolicy", (6,)),
        (spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))), "MlpPolicy", (5,)),
        (spaces.Box(0, 255, (36, 36, 3), np.uint8), "CnnPolicy", None),
        (DICT, "MultiInputPolicy", ["compass"]),
    ],
)
def test_sb3_runs_the_spaces_that_autoplace_does(space, policy, normalized):
    env = register("Handed", lambda: Spaces(space, spaces.Discrete(2)))
    arguments = make_plan(env, num_envs=2, rollout_steps=4, rows=4).for_sb3()
    assert arguments.ppo["policy"] == policy
    model = build(arguments)
    model.learn(8)
    if isinstance(normalized, tuple):  # one-hot, side by side
        assert model.observation_space.shape == normalized
        assert arguments.vec_normalize["norm_obs"]
    elif normalized is None:
        assert not arguments.vec_normalize["norm_obs"]
    else:
        assert arguments.vec_normalize["norm_obs_keys"] == normalized
    if policy != "MlpPolicy":
        plan = make_plan(env)
        sizes = sum(p.numel() for p in build(plan.for_sb3()).policy.parameters())
        assert sizes == plan.workload.network.num_parameters


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        (spaces.Box(0, 255, (20, 20, 3), np.uint8), "36 pixels and more"),
        (spaces.Box(0, 1, (36, 36, 3), np.uint8), "up to 1"),
        (spaces.Dict(inner=DICT), "'inner.compass' inside of another space"),
    ],
)
def test_what_sb3_cannot_read_is_refused_in_one_line(space, problem):
    env = register("Refused", lambda: Spaces(space, spaces.Discrete(2)))
    with pytest.raises(UsageError, match=problem):
        make_plan(env).for_sb3()


def test_the_best_placement_that_the_trainer_can_run_is_handed_over():
    chosen = candidate("double-buffer", 300.0, learn_threads=2)
    uneven = candidate("cpu", 250.0, learn_threads=2)
    vector = candidate("cpu", 240.0, env_backend="vector")
    halves = candidate("cpu", 235.0, env_backend="process", num_workers=2, num_groups=2)
    workers = candidate("cpu", 230.0, env_backend="process", num_workers=2)
    plain = candidate("cpu", 200.0, sample_threads=2, learn_threads=2)
    slower = candidate("cpu", 190.0)
    plan = plan_of(chosen, uneven, vector, halves, workers, plain, slower)
    sb3 = plan.for_sb3()
    # Workers win by 15 % only, which SB3's one process per environment would eat up.
    assert sb3.candidate is plain and sb3.torch_threads == 2
    assert sb3.vec_env_class == "DummyVecEnv"
    assert "scheme double-buffer" in sb3.differences[0] and "33% below" in sb3.differences[0]
    assert plan.for_cleanrl().candidate is plain
    factory = plan.for_sample_factory()
    assert factory.candidate is chosen and factory.arguments["async_rl"] is True

    faster = dataclasses.replace(workers, env_steps_per_s=260.0)
    sb3 = plan_of(chosen, faster, plain).for_sb3()
    assert sb3.candidate is faster and sb3.vec_env_class == "SubprocVecEnv"
    assert any("one process for each environment" in line for line in sb3.differences)


def test_where_nothing_can_be_handed_over_exactly_that_is_said():
    chosen = candidate("hybrid", 300.0, learn_device="cuda:0", device="cuda:0")
    arguments = plan_of(chosen).for_sb3()
    assert arguments.ppo["device"] == "cuda:0"
    assert "none of the placements" in arguments.differences[0]


def test_the_printed_script_trains(monkeypatch):
    plan = make_plan("CartPole-v1", normalize_rewards=False, clip_rewards=True)
    text = for_sb3(plan).to_text().replace("1_000_000", "64")
    steps = []
    original = PPO.learn
    monkeypatch.setattr(
        PPO, "learn", lambda self, **k: steps.append(original(self, **k).num_timesteps)
    )
    exec(compile(text, "handover.py", "exec"), {"__name__": "__main__"})
    assert steps == [64]


def test_rewards_are_clipped_after_the_returns_were_taken():
    plan = make_plan("Pendulum-v1", clip_rewards=True, normalize_rewards=False)
    arguments = plan.for_sb3()
    envs = make_vec_env(arguments.env, **arguments.vec_env)
    envs.reset()
    _, rewards, _, _ = envs.step(np.zeros((2, 1), np.float32))
    assert rewards.tolist() == [-1.0, -1.0]


def test_cleanrl_gets_its_own_units():
    arguments = make_plan(**HYPER).for_cleanrl()
    assert arguments.program == "python cleanrl/ppo.py"
    assert arguments.arguments["num-minibatches"] == 2  # 24 rows by 12
    assert arguments.arguments["vf-coef"] == 1.4  # it halves the squared error
    assert arguments.environment == {"OMP_NUM_THREADS": "1"}
    text = arguments.to_text()
    assert "--no-cuda" in text and "--anneal-lr" in text and "--target-kl=0.3" in text
    assert "hidden layers are 64, 64" in text
    continuous = make_plan("Pendulum-v1").for_cleanrl()
    assert continuous.program.endswith("ppo_continuous_action.py")


def test_cleanrl_refuses_what_none_of_its_scripts_takes():
    env = register("Heads", lambda: Spaces(spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 2])))
    with pytest.raises(UsageError, match="CleanRL's PPO scripts"):
        make_plan(env).for_cleanrl()


def test_sample_factorys_rollouts_fill_whole_minibatches():
    arguments = make_plan(**HYPER).for_sample_factory().arguments
    # gcd(8 steps, 12 rows) = 4: a minibatch is three such trajectories, a dataset six.
    assert (arguments["rollout"], arguments["batch_size"]) == (4, 12)
    assert arguments["num_batches_per_epoch"] == 2
    assert arguments["async_rl"] is False and arguments["serial_mode"] is True


@pytest.mark.parametrize("trainer", ["sb3", "cleanrl", "sample-factory"])
def test_the_command_prints_arguments_as_text_and_json(trainer, monkeypatch):
    planned = types.SimpleNamespace(plan=make_plan())
    monkeypatch.setattr(cli, "planned", lambda *_: planned)
    done = CliRunner().invoke(cli.main, ["plan", "CartPole-v1", "--for", trainer])
    assert done.exit_code == 0 and done.output.startswith("# scheme cpu")
    assert "CartPole-v1" in done.output and "Traceback" not in done.output
    done = CliRunner().invoke(cli.main, ["plan", "CartPole-v1", "--for", trainer, "--json"])
    found = json.loads(done.output)
    assert found["trainer"] == trainer and found["differences"]


def test_an_environments_own_arguments_reach_sb3():
    plan = make_plan("Pendulum-v1")
    env = dataclasses.replace(plan.workload.env, kwargs_json='{"g": 5.0}')
    plan = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, env=env))
    arguments = plan.for_sb3()
    envs = make_vec_env(arguments.env, **arguments.vec_env)
    assert [env.unwrapped.g for env in envs.envs] == [5.0, 5.0]
