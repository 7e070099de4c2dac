"""What only a real accelerator can show. `AUTOPLACE_TEST_DEVICE` names one; `cpu` is a dry run."""

import os

import numpy as np
import pytest
import torch

from autoplace import device as devices
from autoplace.engines import COMPILE, EAGER, GRAPH
from autoplace.measure.calibrate import calibrate
from autoplace.ppo.batch import make_batch
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import make_policy_step, make_updater
from autoplace.ppo.update import draw_permutations
from autoplace.train import load_policy, train
from autoplace.workload import Hyperparameters, NetworkSpec
from tests.envs.catch import Catch
from tests.envs.toys import register
from tests.train.plans import Listener, make_plan

pytestmark = pytest.mark.gpu
SCHEMES = ("hybrid", "gpu", "double-buffer", "async")


OPTIONS = {"double-buffer": {"lag": 1}, "async": {"lag": 1, "workers": 2}}


@pytest.fixture(scope="module")
def on():
    """The device that the tests run on."""
    found = os.environ.get("AUTOPLACE_TEST_DEVICE") or next(
        iter(devices.accelerator_devices()), None
    )
    if found is None:
        pytest.skip("no accelerator here")
    return devices.require_device(found)


def weights_after(scheme, device, env="CartPole-v1", **plan):
    listener = Listener()
    train(
        make_plan(env, scheme=scheme, device=device, **OPTIONS.get(scheme, {}), **plan),
        total_steps=96,
        callbacks=[listener],
    )
    assert len(listener.reports) == 3
    return listener.flat


@pytest.mark.parametrize("scheme", ["hybrid", "gpu"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_scheme_in_turns_learns_what_the_cpu_does(scheme, env, on):
    torch.testing.assert_close(
        weights_after(scheme, on, env), weights_after("cpu", "cpu", env), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("scheme", OPTIONS)
def test_an_overlapping_scheme_learns_what_it_does_on_the_cpu(scheme, on):
    ours, theirs = weights_after(scheme, on), weights_after(scheme, "cpu")
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


# --------------------------------------------------------------------------------------------------
# Engines


@pytest.fixture
def recorder(on):
    """A device that records its work."""
    if not devices.has_graphs(on):
        pytest.skip(f"{on} records no work")
    return on


def steps_by(engine, on, spec, iterations=2):
    """Actions and weights after updates by one engine: recorded anew for each kind of step."""
    hyper = Hyperparameters(num_envs=8, rollout_steps=16, hidden_sizes=spec.hidden_sizes)
    plain = ActorCritic(spec, seed=1, normalize_observations=True, engine=engine)
    network = plain.over(plain.flat.to(on))
    rollout = Rollout(spec, rollout_steps=16, num_envs=8, device=on)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(16, 8, spec.action_size, generator=generator).to(on)
    seen = torch.randn(17, 8, spec.observation_size, generator=generator).to(on)
    act = make_policy_step(network)
    updater = make_updater(network, hyper, minibatch_rows=32)
    actions = []
    for iteration in range(iterations):
        for t in range(16):
            act(seen[t], noise[t], rollout, t)
        rollout.observations[-1].copy_(seen[-1])
        rollout.outcomes.zero_()
        rollout.rewards.copy_(seen[:16, :, 0])
        actions.append(rollout.actions.cpu().clone())
        orders = draw_permutations(128, 2, torch.Generator().manual_seed(iteration)).to(on)
        batch = make_batch(network, rollout, hyper)
        updater.update(batch, orders.unbind(0), learning_rate=1e-3, iteration=1)
    return actions, network.flat.cpu(), updater.optimizer_state()["step"].item()


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("engine", [GRAPH, COMPILE])
def test_steps_of_an_engine_are_the_eager_ones(engine, continuous, on):
    if engine == GRAPH and not devices.has_graphs(on):
        pytest.skip(f"{on} records no work")
    if engine == COMPILE and continuous:
        pytest.skip("one kind is enough, compilation is slow")
    spec = NetworkSpec(
        observation_size=6, hidden_sizes=(32, 32), action_size=3, continuous=continuous
    )
    (actions, flat, count), (eager_actions, eager_flat, eager_count) = (
        steps_by(name, on, spec) for name in (engine, EAGER)
    )
    assert count == eager_count == 2 * 2 * 4
    torch.testing.assert_close(actions[0], eager_actions[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(flat, eager_flat, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_replays_its_steps_and_learns_what_an_eager_one_does(scheme, recorder):
    listener = Listener()
    plan = make_plan(scheme=scheme, device=recorder, engine=GRAPH, **OPTIONS.get(scheme, {}))
    result = train(plan, total_steps=96, callbacks=[listener])
    failed = [v for v in result.engines if v.dropped_because and " takes " not in v.dropped_because]
    assert not failed
    assert any(v.engine == GRAPH for v in result.engines)
    eager = weights_after(scheme, recorder)
    torch.testing.assert_close(listener.flat, eager, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_images_are_learned_from_on_the_device(scheme, on):
    env = register("CatchOnDevice", Catch)
    flat = weights_after(scheme, on, env)
    assert flat.isfinite().all()


def test_a_run_of_the_device_is_loaded_without_it(on, tmp_path):
    listener = Listener()
    train(
        make_plan(scheme="gpu", device=on), total_steps=64, run_dir=tmp_path, callbacks=[listener]
    )
    policy = load_policy(tmp_path)
    assert policy.network.flat.device.type == "cpu"
    torch.testing.assert_close(policy.network.flat, listener.flat)
    assert policy(np.zeros(4, np.float32)) in (0, 1)


def test_what_is_sent_arrives_and_comes_back(on):
    channel = devices.Channel((4, 3), torch.float32, on)
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    sent = channel.send(array)
    assert sent.device.type == torch.device(on).type
    assert np.array_equal(channel.receive(sent * 2), 2 * array)


def test_copies_on_the_side_stream_are_whole_when_joined(on):
    host = devices.host_empty((1 << 22,), pinned_for=on)
    assert host.is_pinned() == devices.can_pin(on)
    stream = devices.CopyStream(on)
    far = torch.empty(host.shape, device=on)
    for value in range(8):
        stream.synchronize()  # the host buffer is free again
        host.fill_(value)
        with stream.after_current():
            far.copy_(host, non_blocking=True)
        stream.join()
        assert float(far.sum()) == value * host.numel()


def test_shared_memory_is_page_locked_where_that_is_possible(on):
    tensor = devices.shared_tensor(devices.shared_array((1 << 16,), pinned_for=on))
    locked = devices.page_lock(tensor, on)
    assert locked == on.startswith("cuda")
    assert torch.equal(tensor.fill_(3.0).to(on).cpu(), tensor)


def test_the_device_timer_sees_work_that_the_host_has_only_issued(on):
    if not devices.is_accelerator(on):
        pytest.skip("the CPU has no events")
    timer = devices.DeviceTimer(on)
    a = torch.randn(4096, 4096, device=on)
    torch.mm(a, a)
    devices.synchronize(on)
    start_s = devices.now()
    timer.start()
    for _ in range(50):
        torch.mm(a, a)
    timer.stop()
    issued_s = devices.now() - start_s
    worked_s = timer.elapsed_s()
    assert issued_s < worked_s < 1.1 * (devices.now() - start_s)


def test_memory_is_known_and_given_back(on):
    if not devices.is_accelerator(on):
        pytest.skip("of accelerators")
    free, total = devices.memory_bytes(on)
    assert 0 < free <= total
    block = torch.empty(1 << 26, dtype=torch.uint8, device=on)
    del block
    devices.empty_cache(on)


def test_a_quick_calibration_times_the_device_and_nothing_impossible(on):
    result = calibrate(devices=sorted({"cpu", on}), quick=True, budget_s=10)
    timed = {m.task.device for m in result.measurements}
    assert on in timed and "cpu" in timed
    rates = [
        2.0 * np.prod([float(side) for side in m.task.shape]) / m.median_s
        for m in result.measurements
        if m.task.op == "matmul" and m.task.device == on and m.task.residency != "copied"
    ]
    assert rates and max(rates) < 2e15  # no chip multiplies float32 that fast
