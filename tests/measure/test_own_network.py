"""Trainer steps of networks that no calibration times by itself."""

import pytest

from autoplace.cost_model import fit_cost_model
from autoplace.measure.own_network import measure_own_network, own_network_tasks
from autoplace.measure.probes import build_probe
from autoplace.measurement import Task
from autoplace.workload import EnvSpec, Hyperparameters, ImageSpec, NetworkSpec, Workload
from tests.synthetic import GPU, Truth, make_calibration

IMAGE = ImageSpec(key="", height=10, width=10, channels=2)
SPEC = NetworkSpec(
    observation_size=200, hidden_sizes=(8,), action_size=5, action_heads=(2, 3), images=(IMAGE,)
)


def workload(network=SPEC, **changes):
    return Workload(
        env=EnvSpec(id="E"),
        network=network,
        hyperparameters=Hyperparameters(
            **{"num_envs": 2, "rollout_steps": 64, "hidden_sizes": (8,), **changes}
        ),
        action_bytes=16,
    )


def test_the_steps_of_a_network_of_images_are_listed_per_device_and_thread_count():
    tasks = own_network_tasks(workload(), ("cpu", GPU), 2)
    assert all(task.network == SPEC for task in tasks)
    assert [(t.op, t.device, t.threads, t.rows or t.shape) for t in tasks] == [
        *(
            (op, "cpu", threads, size)
            for threads in (1, 2)
            for op, size in (
                ("policy_step", 2), ("update", 64), ("update", 128), ("gae", (64, 2)),
            )
        ),
        ("policy_step", GPU, 1, 2),
        ("update", GPU, 1, 64),
        ("update", GPU, 1, 128),
        ("gae", GPU, 1, (64, 2)),
        ("weights_to_host", GPU, 1, ()),
    ]  # fmt: skip


def test_the_users_minibatch_alone_is_timed_and_perceptrons_never_are():
    (one,) = {t.rows for t in own_network_tasks(workload(minibatch_rows=32), ("cpu",), 1)} - {0, 2}
    assert one == 32
    plain = NetworkSpec(observation_size=4, hidden_sizes=(8,), action_size=2)
    assert own_network_tasks(workload(plain), ("cpu", GPU), 2) == []


@pytest.mark.parametrize("op", ["policy_step", "update", "gae"])
def test_the_trainers_own_steps_run_on_images_as_probes(op):
    (task,) = (t for t in own_network_tasks(workload(minibatch_rows=16), ("cpu",), 1) if t.op == op)
    probe = build_probe(task)
    assert probe.tasks == (task,) and all(seconds > 0 for seconds in probe.sample(2))
    probe.close()


def test_what_was_timed_is_what_is_predicted_and_perceptrons_cost_what_they_did(monkeypatch):
    monkeypatch.setattr("autoplace.measure.own_network._TIME_LIMIT_S", 0.02)
    calibration = make_calibration(Truth(), quick=True)
    mlp = Task(
        op="update",
        rows=100,
        network=NetworkSpec(observation_size=9, hidden_sizes=(40, 40), action_size=3),
    )
    before = fit_cost_model(calibration).predict([mlp])[mlp].seconds
    measured = measure_own_network(own_network_tasks(workload(), ("cpu",), 1))
    model = fit_cost_model(calibration.with_measurements(measured))
    assert model.predict([mlp])[mlp].seconds == pytest.approx(before, rel=0.01)
    timed = next(m for m in measured if m.task.op == "update")
    costs = model.predict([timed.task])
    assert costs[timed.task].source == "measured"
    assert costs[timed.task].seconds == timed.median_s


def test_a_network_of_images_that_was_never_timed_is_predicted_from_its_arithmetic():
    model = fit_cost_model(make_calibration(Truth()))
    small = Task(op="update", network=SPEC, rows=64)
    atari = ImageSpec(key="", height=84, width=84, channels=4)
    large = Task(
        op="update",
        rows=64,
        network=NetworkSpec(
            observation_size=atari.size, hidden_sizes=(8,), action_size=6, images=(atari,)
        ),
    )
    costs = model.predict([small, large])
    assert costs[small].source == costs[large].source == "extrapolated"
    # Three passes of 18.6 Mflop a row at 40 Gflop/s and no overhead are the least it can take.
    flops = sum(2 * n * i * o for n, i, o in large.network.matmuls())
    assert costs[large].seconds > 0.5 * 3 * 64 * flops / 4e10
    assert costs[large].seconds > 5 * costs[small].seconds


def test_the_probe_of_a_users_own_network_runs_that_network():
    from autoplace.ppo.factory import own_network_spec
    from tests.ppo.test_factory import own

    spec = own_network_spec(
        NetworkSpec(observation_size=4, hidden_sizes=(64, 64), action_size=2), own("Shared")
    )
    tasks = own_network_tasks(workload(spec, minibatch_rows=16), ("cpu",), 1)
    assert [t.op for t in tasks] == ["policy_step", "update", "gae"]
    for task in tasks:
        probe = build_probe(task)
        assert probe.sample(2)[0] > 0
    assert fit_cost_model(make_calibration(Truth())).predict(tasks)[tasks[1]].seconds > 0
