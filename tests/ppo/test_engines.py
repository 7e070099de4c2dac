"""Compiled and recorded steps compute what eager ones do, and every engine is tried first."""

import re
import shutil
import time

import pytest
import torch

from autoplace import device as devices
from autoplace.engines import COMPILE, EAGER, GRAPH, NUMPY, engine_on, passes_engine
from autoplace.errors import EngineError
from autoplace.ppo import graphed, steps
from autoplace.ppo.batch import make_batch
from autoplace.ppo.compiled import CompiledPolicyStep, CompiledUpdater
from autoplace.ppo.distribution import draw_noise
from autoplace.ppo.engine_updater import EngineUpdater
from autoplace.ppo.graphed import GraphPolicyStep, GraphUpdater
from autoplace.ppo.numpy_update import NumpyUpdater
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import make_policy_step, make_updater
from autoplace.ppo.trial import STEPS as TRIED
from autoplace.ppo.update import Updater, draw_permutations
from autoplace.workload import Hyperparameters, ImageSpec, NetworkSpec
from tests.ppo.test_numpy_engine import ENVS, ROWS, STEPS, network_of, recorded, seeded, spec_of
from tests.recording_graph import RecordingGraph

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++", "cl")),
    reason="no C++ compiler",
)
IMAGE = ImageSpec(key="", height=10, width=10, channels=2)
PIXELS = NetworkSpec(
    observation_size=200, hidden_sizes=(8,), action_size=5, action_heads=(2, 3), images=(IMAGE,)
)


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.setattr(graphed.devices, "Graph", RecordingGraph)
    RecordingGraph.made = 0


def after_updates(make, loss, name="choice", iterations=2):
    """Weights, statistics and Adam's state after updates on two rollouts by one updater."""
    hyper = Hyperparameters(num_envs=ENVS, rollout_steps=STEPS, **loss)
    network = network_of(spec_of(name), EAGER)
    acted = network_of(spec_of(name), EAGER)
    with torch.no_grad():
        network.flat[:64] += 0.1
    updater = make(network, hyper, minibatch_rows=ROWS)
    found = []
    for iteration in range(iterations):
        batch = make_batch(network, recorded(acted), hyper, acted=[acted])
        orders = draw_permutations(STEPS * ENVS, hyper.epochs, seeded(iteration)).unbind(0)
        found.append(
            updater.update(batch, orders, learning_rate=1e-3 / (1 + iteration), iteration=1)
        )
    return network.flat, found, updater.optimizer_state()


def assert_same_updates(make, loss, name="choice"):
    flat, stats, state = after_updates(make, loss, name)
    eager_flat, eager_stats, eager_state = after_updates(Updater, loss, name)
    torch.testing.assert_close(flat, eager_flat, rtol=0, atol=4e-6)
    for ours, theirs in zip(stats, eager_stats, strict=True):
        for field in ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm"):
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), abs=5e-5), field
        assert ours.num_minibatches == theirs.num_minibatches
    assert state.keys() == eager_state.keys()
    assert state["step"] == eager_state["step"]
    torch.testing.assert_close(state["exp_avg"], eager_state["exp_avg"], rtol=1e-3, atol=1e-6)


def actions_of(step, spec, num_envs=ENVS):
    rollout = Rollout(spec, rollout_steps=STEPS, num_envs=num_envs)
    noise = draw_noise(
        (STEPS, num_envs, spec.action_size), continuous=spec.continuous, generator=seeded(2)
    )
    observations = torch.randn(STEPS, num_envs, spec.observation_size, generator=seeded(3))
    if spec.images:
        observations = (observations > 0).to(torch.uint8)
    for t in range(STEPS):
        returned = step(observations[t], noise[t], rollout, t)
        assert torch.equal(returned, rollout.actions[t])
    assert torch.equal(rollout.observations[:-1], observations)
    return rollout.actions


@pytest.mark.parametrize(
    ("engine", "device", "is_plain", "steps_by", "passes_by"),
    [
        (NUMPY, "cpu", True, NUMPY, NUMPY),
        (NUMPY, "cuda:0", True, EAGER, EAGER),
        (COMPILE, "cpu", True, COMPILE, EAGER),
        (COMPILE, "cuda:0", False, COMPILE, EAGER),
        (GRAPH, "cuda:0", False, GRAPH, EAGER),
        (GRAPH, "cpu", True, NUMPY, NUMPY),
        (GRAPH, "cpu", False, EAGER, EAGER),
    ],
)
def test_each_side_of_a_placement_has_the_engine_that_it_can_have(
    engine, device, is_plain, steps_by, passes_by
):
    assert engine_on(engine, device, is_plain=is_plain) == steps_by
    assert passes_engine(engine, device, is_plain=is_plain) == passes_by


# --------------------------------------------------------------------------------------------------
# Recorded


@pytest.mark.parametrize("name", ["choice", "choices", "gaussian"])
@pytest.mark.parametrize("loss", [{}, {"entropy_coef": 0.05, "value_clip": 0.1}])
def test_replayed_gradient_steps_are_the_eager_ones(recording, name, loss):
    assert_same_updates(GraphUpdater, loss, name)
    assert RecordingGraph.made == 2  # with and without the terms of the loss


def test_only_whole_minibatches_are_replayed(recording):
    network = network_of(spec_of("choice"), EAGER)
    hyper = Hyperparameters(num_envs=ENVS, rollout_steps=STEPS)
    batch = make_batch(network, recorded(network), hyper)
    updater = GraphUpdater(network, hyper, minibatch_rows=ROWS)
    updater.minibatch_step(batch, torch.arange(ROWS - 1))
    assert RecordingGraph.made == 0
    updater.minibatch_step(batch, torch.arange(ROWS))
    assert RecordingGraph.made == 1


def test_moments_of_the_callers_own_are_recorded_anew(recording):
    network = network_of(spec_of("choice"), EAGER)
    hyper = Hyperparameters(num_envs=ENVS, rollout_steps=STEPS)
    batch = make_batch(network, recorded(network), hyper)
    updater = GraphUpdater(network, hyper, minibatch_rows=ROWS)
    updater.minibatch_step(batch, torch.arange(ROWS))
    first, second = torch.zeros(network.num_trainable), torch.zeros(network.num_trainable)
    updater.use_moments(first, second, 7)
    updater.minibatch_step(batch, torch.arange(ROWS))
    assert first.abs().max() > 0 and second.max() > 0
    assert updater.optimizer_state()["step"] == 8


@pytest.mark.parametrize("name", ["choice", "choices", "gaussian"])
def test_replayed_policy_steps_choose_the_same_actions(recording, name):
    network = network_of(spec_of(name), EAGER)
    torch.testing.assert_close(
        actions_of(GraphPolicyStep(network), network.spec),
        actions_of(PolicyStep(network), network.spec),
    )
    assert RecordingGraph.made == 1


def test_replayed_policy_steps_follow_the_weights(recording):
    network = network_of(spec_of("gaussian"), EAGER)
    step = GraphPolicyStep(network)
    actions_of(step, network.spec)
    with torch.no_grad():
        network.flat[: network.num_trainable] *= 1.5
    torch.testing.assert_close(
        actions_of(step, network.spec), actions_of(PolicyStep(network), network.spec)
    )


class FakeDevice:
    """A device module that can record, and what was called of it."""

    def __init__(self, fault=None):
        self.calls, self.fault = [], fault
        outer = self

        class Block:
            def __init__(self, *what):
                self.what = what

            def __enter__(self):
                outer.calls.append(self.what)

            def __exit__(self, *error):
                pass

        class Stream:
            def __init__(self, device=None):
                pass

            def wait_stream(self, other):
                outer.calls.append(("wait",))

        class CUDAGraph:
            def replay(self):
                outer.calls.append(("replay",))

        self.Stream, self.CUDAGraph = Stream, CUDAGraph
        self.device = lambda device: Block("device", device.index)
        self.stream = lambda stream: Block("stream")
        self.graph = lambda graph: Block("record", type(graph).__name__)
        self.current_stream = lambda device: Stream()

    def work(self):
        self.calls.append(("work",))
        if self.fault and ("record", "CUDAGraph") in self.calls:
            raise RuntimeError(self.fault)


@pytest.fixture
def fake(monkeypatch):
    def install(module):
        monkeypatch.setattr(devices, "_module", lambda device: module)
        monkeypatch.setattr(devices, "accelerator_devices", lambda: ("cuda:1",))
        return module

    return install


def test_work_is_warmed_up_on_a_side_stream_then_recorded_then_replayed(fake):
    module = fake(FakeDevice())
    graph = devices.Graph("cuda:1", module.work)
    work = ("work",)
    warm = [("device", 1), ("wait",), ("stream",), work, work, work, ("wait",)]
    assert module.calls == [*warm, ("record", "CUDAGraph"), work]
    graph.replay()
    assert module.calls[-1] == ("replay",)
    assert devices.engines_on("cuda:1") == (GRAPH, EAGER)


def test_work_that_cannot_be_recorded_is_one_clear_line(fake):
    module = fake(FakeDevice("operation not permitted when stream is capturing\nmore"))
    with pytest.raises(EngineError, match=r"cuda:1 cannot record its work \(operation not perm"):
        devices.Graph("cuda:1", module.work)
    with pytest.raises(EngineError, match="cpu cannot record its work: use another --engine"):
        devices.Graph("cpu", module.work)
    assert devices.engines_on("cpu") == (EAGER, NUMPY)


# --------------------------------------------------------------------------------------------------
# Compiled


@needs_compiler
def test_compiled_gradient_steps_are_the_eager_ones():
    assert_same_updates(CompiledUpdater, {"entropy_coef": 0.05, "value_clip": 0.1}, "gaussian")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["choice", "choices"])
def test_compiled_gradient_steps_of_choices_are_the_eager_ones(name):
    assert_same_updates(CompiledUpdater, {}, name)


@needs_compiler
def test_compiled_policy_steps_choose_the_same_actions_and_are_shared_by_networks():
    for seed in (0, 1):
        network = network_of(spec_of("choices"), EAGER)
        with torch.no_grad():
            network.flat[: network.num_trainable] += seed
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found = actions_of(CompiledPolicyStep(network), network.spec)
        made = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        torch.testing.assert_close(found, actions_of(PolicyStep(network), network.spec))
        assert made == (1 if seed == 0 else 0)


@needs_compiler
@pytest.mark.slow
def test_a_network_of_images_compiles():
    from autoplace.ppo.network import ActorCritic

    network = ActorCritic(PIXELS, seed=1)
    torch.testing.assert_close(
        actions_of(CompiledPolicyStep(network), PIXELS), actions_of(PolicyStep(network), PIXELS)
    )


# --------------------------------------------------------------------------------------------------
# Tried first


class Odd(EngineUpdater):
    """An engine for tests: eager, and then whatever ``after`` does."""

    engine = COMPILE

    def after(self):
        pass

    def engine_step(self, batch, index, *, measure=False):
        Updater.minibatch_step(self, batch, index, measure=measure)
        self.after()


class Wrong(Odd):
    def after(self):
        with torch.no_grad():
            self._flat[5] += 1e-3  # about one learning rate, in one weight


class Slow(Odd):
    def after(self):
        time.sleep(0.01)


class Broken(Odd):
    def after(self):
        raise RuntimeError("\nno compiler was found\nmuch more")


class NotFinite(Odd):
    def after(self):
        with torch.no_grad():
            self._flat[5] = float("nan")


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Wrong, "it differs from eager by .* % of a gradient step"),
        (NotFinite, "it differs from eager by far more than 100 % of a gradient step"),
        (Slow, "a gradient step takes .*s, an eager one .*s"),
        (Broken, "RuntimeError: no compiler was found"),
    ],
)
def test_an_engine_that_is_wrong_slow_or_broken_is_dropped_and_nothing_is_learned_from_it(
    engine, reason
):
    verdicts = []

    def make(*args, **options):
        return engine(*args, **options, hear=verdicts.append)

    flat, _, state = after_updates(make, {})
    eager_flat, _, eager_state = after_updates(Updater, {})
    assert torch.equal(flat, eager_flat)
    assert torch.equal(state["exp_avg_sq"], eager_state["exp_avg_sq"])
    (verdict,) = verdicts
    assert (verdict.engine, verdict.step) == (COMPILE, "gradient step")
    assert re.search(reason, verdict.dropped_because), verdict


def test_the_numpy_engine_is_kept_and_its_own_steps_count():
    verdicts = []
    tried, _, state = after_updates(
        lambda *args, **options: NumpyUpdater(*args, **options, hear=verdicts.append), {}
    )
    alone, _, alone_state = after_updates(NumpyUpdater, {})
    assert torch.equal(tried, alone) and torch.equal(state["exp_avg"], alone_state["exp_avg"])
    (verdict,) = verdicts
    assert verdict.dropped_because is None
    assert verdict.engine_s > 0 and verdict.eager_s > 0
    assert verdict.to_json()["engine"] == NUMPY


@pytest.mark.parametrize("name", ["choice", "gaussian"])
@pytest.mark.parametrize(("bias", "is_dropped"), [(0.0, False), (0.02, True)])
def test_a_policy_step_that_differs_is_dropped(monkeypatch, name, bias, is_dropped):
    def make_wrong(network):
        wrong = network_of(spec_of(name), EAGER)
        with torch.no_grad():
            wrong.actor_layers[-1][1][0] += bias  # of one output
        return PolicyStep(wrong)

    monkeypatch.setitem(steps._POLICY_STEPS, NUMPY, make_wrong)
    verdicts = []
    network = network_of(spec_of(name), NUMPY)
    step = make_policy_step(network, verdicts.append)
    for _ in range(-(-TRIED // STEPS)):
        actions = actions_of(step, network.spec, num_envs=64)
    torch.testing.assert_close(actions, actions_of(PolicyStep(network), network.spec, num_envs=64))
    (verdict,) = verdicts
    assert (verdict.dropped_because is not None) == is_dropped, verdict
    assert verdict.step == "policy step"


def test_on_a_virtual_clock_steps_are_eager(monkeypatch):
    monkeypatch.setattr(devices, "spawns_processes", lambda: False)
    monkeypatch.setitem(steps._POLICY_STEPS, NUMPY, lambda network: pytest.fail)
    verdicts = []
    network = network_of(spec_of("choice"), NUMPY)
    actions = actions_of(make_policy_step(network, verdicts.append), network.spec)
    assert torch.equal(actions, actions_of(PolicyStep(network), network.spec))
    flat, _, _ = after_updates(lambda *a, **o: Broken(*a, **o, hear=verdicts.append), {})
    assert torch.equal(flat, after_updates(Updater, {})[0])
    reasons = {v.dropped_because for v in verdicts}
    assert len(verdicts) == 2 and reasons == {"a virtual clock cannot see its work"}


def test_where_nobody_hears_an_engine_is_not_tried_and_its_errors_are_raised():
    network = network_of(spec_of("choice"), EAGER)
    hyper = Hyperparameters(num_envs=ENVS, rollout_steps=STEPS)
    batch = make_batch(network, recorded(network), hyper)
    with pytest.raises(RuntimeError, match="no compiler"):
        Broken(network, hyper, minibatch_rows=ROWS).minibatch_step(batch, torch.arange(ROWS))
    assert type(make_policy_step(network)) is PolicyStep
    assert type(make_updater(network, hyper, minibatch_rows=ROWS)) is Updater
