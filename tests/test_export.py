"""The exported graph computes what the policy does, from raw observations to actions."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from gymnasium import spaces

from autoplace import export
from autoplace.cli import main
from autoplace.errors import RunError, UsageError
from autoplace.train import load_policy, train
from tests.envs.toys import Spaces, register
from tests.train.plans import make_plan

onnxruntime = pytest.importorskip("onnxruntime")

MIXED = spaces.Dict(
    rgb=spaces.Box(0, 255, (36, 40, 3), np.uint8),
    compass=spaces.Box(-180, 180, (1,), np.float64),
    inner=spaces.Dict(gear=spaces.Discrete(5, start=-1), levers=spaces.MultiDiscrete([2, 3])),
)
CASES = {
    "discrete": (spaces.Box(-50.0, 50.0, (3,)), spaces.Discrete(3, start=7)),
    "continuous": (
        spaces.Box(-50.0, 50.0, (2, 2), np.float64),
        spaces.Box(np.float32([-0.01, -np.inf]), np.float32([0.01, np.inf])),
    ),
    "image": (spaces.Box(0, 255, (12, 12, 3), np.uint8), spaces.Discrete(4)),
    "channels-first": (spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.MultiBinary(3)),
    "dict": (MIXED, spaces.MultiDiscrete([[2, 3], [2, 4]], start=[[0, 1], [0, 0]])),
}


def trained(name, run_dir, **plan):
    """A run whose statistics and weights are no longer those that it began with."""
    observations, actions = CASES[name]

    class Ends(Spaces):
        def step(self, action):
            observation, _, _, _, info = super().step(action)
            reward = float(np.sum(action))
            return observation, reward, False, bool(self.np_random.random() < 0.2), info

    env = register("Exported", lambda: Ends(observations, actions))
    train(make_plan(env, learning_rate=0.05, **plan), total_steps=64, run_dir=run_dir)


@pytest.mark.parametrize("name", CASES)
def test_the_graph_gives_the_policys_actions_for_raw_observations(name, tmp_path):
    trained(name, tmp_path)
    result = export.export_onnx(tmp_path, tmp_path / "policy.onnx")
    assert result.parity_rows == 64 and result.parity_error <= 1e-5
    policy = load_policy(tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    kinds = dict(result.inputs)
    # Not the 64 rows that it was made with: any number of others.
    for count in (1, 3):
        samples = [CASES[name][0].sample() for _ in range(count)]
        leaves = policy.description.observations.leaves
        feeds = {
            leaf.key or "observation": np.stack([leaf.of(one) for one in samples])
            for leaf in leaves
        }
        feeds = {key: value.astype(kinds[key]) for key, value in feeds.items()}
        assert feeds.keys() == kinds.keys()
        action = session.run(["action"], feeds)[0]
        expected = np.stack([policy(one) for one in samples])
        assert action.shape == expected.shape
        np.testing.assert_allclose(action, expected, rtol=0, atol=1e-5)
        assert all(CASES[name][1].contains(one) for one in np.asarray(action, expected.dtype))


def test_statistics_and_bounds_are_in_the_graph(tmp_path):
    # Symptom: an exported policy needs a second file with normalisation, or acts out of bounds.
    trained("continuous", tmp_path)
    export.export_onnx(tmp_path, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    network = load_policy(tmp_path).network
    middle = network.observation_mean.numpy().reshape(1, 2, 2)
    spread = 1.0 / network.observation_inverse_std.numpy().reshape(1, 2, 2)
    _, at_10, std = session.run(None, {"observation": middle + 10 * spread})
    action, at_1000, _ = session.run(None, {"observation": middle + 1000 * spread})
    np.testing.assert_allclose(at_1000, at_10, atol=1e-5)  # clamped at 10 standard deviations
    assert abs(at_1000[0, 0]) > 0.01 and abs(action[0, 0]) == np.float32(0.01)
    assert action[0, 1] == at_1000[0, 1]  # unbounded
    np.testing.assert_allclose(std[0], network.log_std.detach().exp().numpy(), atol=1e-6)


def test_a_users_own_network_is_exported(tmp_path):
    trained("image", tmp_path, network_factory="tests/ppo/own_networks.py:Shared")
    result = export.export_onnx(tmp_path, tmp_path / "policy.onnx")
    assert result.parity_error <= 1e-5


def test_a_graph_that_differs_is_refused_and_not_written(tmp_path, monkeypatch):
    trained("discrete", tmp_path)
    one_hot = export.PolicyGraph.forward

    def slightly_off(self, *parts):
        action, logits = one_hot(self, *parts)
        return action, logits + 1e-3

    monkeypatch.setattr(export.PolicyGraph, "forward", slightly_off)
    with pytest.raises(RunError, match=r"differs from the policy by 0\.001"):
        export.export_onnx(tmp_path, tmp_path / "policy.onnx")
    assert not (tmp_path / "policy.onnx").exists()


def test_a_wrong_action_is_refused(tmp_path, monkeypatch):
    trained("discrete", tmp_path)
    monkeypatch.setattr(
        export.PolicyGraph, "_choices", lambda self, logits: logits.argmin(-1) + self._actions.first
    )
    with pytest.raises(RunError, match="differs from the policy"):
        export.export_onnx(tmp_path, tmp_path / "policy.onnx")


def test_without_the_exporters_packages_one_line_says_what_to_install(tmp_path, monkeypatch):
    find = export.importlib.util.find_spec
    monkeypatch.setattr(
        export.importlib.util, "find_spec", lambda name: None if name == "onnx" else find(name)
    )
    with pytest.raises(
        UsageError, match=r"needs the package onnx, .* pip install 'autoplace\[onnx"
    ):
        export.export_onnx(tmp_path, tmp_path / "policy.onnx")


def test_the_command_says_what_it_wrote(tmp_path):
    trained("discrete", tmp_path)
    target = tmp_path / "policy.onnx"
    done = CliRunner().invoke(main, ["export", str(tmp_path), "--output", str(target), "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.output)
    assert result["path"] == str(target) and target.exists()
    assert result["inputs"] == [{"name": "observation", "type": "float32"}]
    assert result["outputs"] == ["action", "logits"] and result["parity_error"] <= 1e-5
    text = CliRunner().invoke(main, ["export", str(tmp_path), "--output", str(target)]).output
    assert "64 observations" in text and "observation" in text
