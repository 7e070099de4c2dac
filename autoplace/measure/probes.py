"""What each task runs when it is timed.

The trainer's own steps are timed by running the trainer's own code: the same policy step, batch and
update objects, on tensors of the same shapes. One builder per op, in :data:`BUILDERS`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from autoplace import device
from autoplace.engines import NUMPY, PRECISIONS
from autoplace.interpreter import interpret_when_told, stretch, stretches
from autoplace.measure.acting import (
    ROLLOUT_STEPS,
    SEED,
    host_policy_step,
    seconds_per_call,
    timed_network,
    timed_noise,
)
from autoplace.measure.order import ORDER
from autoplace.measure.timing import Probe, other_work, timed_calls
from autoplace.measurement import Task
from autoplace.ppo.batch import Batch, make_batch
from autoplace.ppo.draws import Draws
from autoplace.ppo.reward_normalizer import RewardNormalizer
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import make_policy_step, make_updater
from autoplace.ppo.update import Updater
from autoplace.processes import echo
from autoplace.workload import FLOAT_BYTES, EnvSpec, Hyperparameters, NetworkSpec, Workload

# Steps that are queued before the device is waited for, as in the trainer's update.
_QUEUED_UPDATES = 8
_STRETCH_S = 2e-5  # of virtual time, which Python does not take by itself
# As in a run, both sides are woken from their sleep; so only a few calls make a sample.
_ASLEEP_S = 1e-3
_HANDOFFS = 5
_CROWDED_MESSAGES = 6
# What runs once per iteration finds the caches as this long of other work, or more, left them.
_APART_S = 1e-2
_EPISODE_STEPS = 200  # of episodes that are counted
_ECHO_TIMEOUT_S = 60.0  # within which another process has started and answered


def build_probe(task: Task) -> Probe:
    """Allocate what ``task`` needs and return it ready to be timed."""
    return BUILDERS[task.op](task)


def _matmul(task: Task) -> Probe:
    m, k, n = task.shape
    generator = torch.Generator().manual_seed(SEED)
    left = torch.randn(m, k, generator=generator)
    right = torch.randn(k, n, generator=generator)
    on = task.device
    if task.engine == NUMPY:
        # As in the layers of a network: the weights are (outputs, inputs).
        x, weight = left.numpy(), right.t().contiguous().numpy()
        y = np.empty((m, n), np.float32)
        return Probe(tasks=(task,), sample=timed_calls(lambda: np.dot(x, weight.T, out=y), on))
    if task.residency == "copied":

        def copied() -> None:
            torch.mm(left.to(on), right.to(on)).to(device.CPU)

        return Probe(tasks=(task,), sample=timed_calls(copied, on, wait_each=True))
    a, b = left.to(on), right.to(on)
    out = torch.empty(m, n, device=on)
    return Probe(
        tasks=(task,),
        sample=timed_calls(lambda: torch.mm(a, b, out=out), on, wait_each=True),
    )


def _elementwise(task: Task) -> Probe:
    x = torch.ones(task.shape[0], device=task.device)
    out = torch.empty_like(x)
    return Probe(
        tasks=(task,),
        sample=timed_calls(lambda: torch.mul(x, 2.0, out=out), task.device, wait_each=True),
    )


def _activation(task: Task) -> Probe:
    x = torch.linspace(-2.0, 2.0, task.shape[0]).to(task.device)
    out = torch.empty_like(x)
    return Probe(
        tasks=(task,),
        sample=timed_calls(lambda: torch.tanh(x, out=out), task.device, wait_each=True),
    )


def _launch(task: Task) -> Probe:
    x = torch.ones(8, device=task.device)
    out = torch.empty_like(x)
    return Probe(
        tasks=(task,),
        sample=timed_calls(lambda: torch.mul(x, 2.0, out=out), task.device, wait_each=True),
    )


def _dispatch(task: Task) -> Probe:
    x = torch.ones(8, device=task.device)
    out = torch.empty_like(x)

    def sample(calls: int) -> tuple[float]:
        device.synchronize(task.device)
        start_s = device.now()
        for _ in range(calls):
            torch.mul(x, 2.0, out=out)
        issued_s = device.now() - start_s
        device.synchronize(task.device)
        return (issued_s / calls,)

    return Probe(tasks=(task,), sample=sample, min_calls=50, max_calls=200)


def _copy(task: Task) -> Probe:
    numbers = max(1, task.shape[0])
    pinned_for = task.device if task.pinned else device.CPU
    host = device.host_empty((numbers,), torch.uint8, pinned_for=pinned_for)
    host.zero_()
    far = torch.zeros(numbers, dtype=torch.uint8, device=task.device)
    source, target = (host, far) if task.direction == "h2d" else (far, host)
    return Probe(
        tasks=(task,),
        sample=timed_calls(
            lambda: target.copy_(source, non_blocking=True), task.device, wait_each=True
        ),
    )


def _once_in_a_while(call: Callable[[], object], on: str) -> Callable[[int], tuple[float]]:
    """A ``sample`` function for what a run does once per iteration, after other work."""

    def sample(calls: int) -> tuple[float]:
        elapsed_s = 0.0
        for _ in range(calls):
            other_work(_APART_S)
            device.synchronize(on)
            start_s = device.now()
            call()
            device.synchronize(on)
            elapsed_s += device.now() - start_s
        return (elapsed_s / calls,)

    return sample


def _handoff(task: Task) -> Probe:
    """A message to a sleeping process and its answer, over and over."""

    def asleep_before(exchange: Callable[[], object]) -> Callable[[int], tuple[float]]:
        def sample(calls: int) -> tuple[float]:
            elapsed_s = 0.0
            for _ in range(calls):
                time.sleep(_ASLEEP_S)
                start_s = device.now()
                exchange()
                elapsed_s += device.now() - start_s
            return (elapsed_s / calls,)

        return sample

    return _exchange(task, 1, asleep_before, _HANDOFFS)


def _hand_over(task: Task) -> Probe:
    # Where all cores are busy most of them wait for a moment and some for long: the mean counts.
    calls = _CROWDED_MESSAGES if task.beside else 1
    return _exchange(task, ORDER, lambda call: _once_in_a_while(call, task.device), calls, calls)


def _exchange(
    task: Task,
    message: object,
    sampler: Callable[[Callable[[], object]], Callable[[int], tuple[float]]],
    max_calls: int,
    min_calls: int = 1,
) -> Probe:
    """``message`` to another process and back."""
    there, back = device.message_channel(), device.message_channel()
    partner = device.spawn(echo, there, back, name="autoplace echo", at_once=True)

    def exchange() -> None:
        there.put(message)
        back.get(timeout=_ECHO_TIMEOUT_S)

    def close() -> None:
        there.put(None)
        partner.join(_ECHO_TIMEOUT_S)

    return Probe(
        tasks=(task,),
        sample=sampler(exchange),
        min_calls=min_calls,
        max_calls=max_calls,
        close=close,
    )


def _crowd(task: Task) -> Probe:
    """As many processes as there are cores, and one more, each at work until all are through."""
    tasks = timed_tasks(task)
    charge = None if device.spawns_processes() else _charge_stretches
    channels = [
        (device.message_channel(), device.message_channel()) for _ in range(task.workers - 1)
    ]
    partners = [
        device.spawn(interpret_when_told, *pair, charge, name="autoplace crowd", at_once=True)
        for pair in channels
    ]

    def together(count: int, processes: int) -> float:
        others = channels[: processes - 1]
        start_s = device.now()
        for orders, _ in others:
            orders.put(count)
        stretches(count, charge)
        for _, answers in others:
            answers.get(timeout=_ECHO_TIMEOUT_S)
        return device.now() - start_s

    def sample(_: int) -> list[float]:
        return [together(each.shape[0], each.workers) for each in tasks]

    def close() -> None:
        for orders, _ in channels:
            orders.put(None)
        for partner in partners:
            partner.join(_ECHO_TIMEOUT_S)

    return Probe(tasks=tasks, sample=sample, max_calls=1, close=close)


def _charge_stretches(count: int) -> None:
    device.charge(seconds=count * _STRETCH_S)


def _interpreter(task: Task) -> Probe:
    def call() -> None:
        stretch()
        device.charge(seconds=_STRETCH_S)

    return Probe(tasks=(task,), sample=timed_calls(call, task.device))


def _observations(spec: NetworkSpec, rows: int) -> np.ndarray:
    generator = np.random.default_rng(SEED)
    if spec.images:
        pixels = generator.integers(2, size=(rows, spec.observation_size), dtype=np.uint8)
        pixels[:, : FLOAT_BYTES * spec.vector_size] = 0  # any bytes would do but those of a NaN
        return pixels
    return generator.standard_normal((rows, spec.observation_size), dtype=np.float32)


def _policy_step(task: Task) -> Probe:
    """The policy step, from observations on the host to actions on the host.

    On an accelerator its three parts are told apart as the trainer's clock sees them: observations
    sent, work issued, actions waited for.
    """
    spec = task.network
    assert spec is not None
    on = task.device
    observations = _observations(spec, task.rows)
    if on == device.CPU:
        act = host_policy_step(spec, observations, task.engine, standardized=task.standardized)
        return Probe(tasks=(task,), sample=lambda calls: (seconds_per_call(act, calls),))

    rollout = Rollout(spec, rollout_steps=ROLLOUT_STEPS, num_envs=task.rows, device=on)
    step = make_policy_step(timed_network(spec, on, task.engine, standardized=task.standardized))
    noise = timed_noise(spec, ROLLOUT_STEPS, task.rows, on)
    noise_rows = noise.unbind(0)
    first_actions = rollout.actions[0]
    row = rollout.observations[0]
    inbound = device.Channel(tuple(row.shape), row.dtype, on)
    outbound = device.Channel(tuple(first_actions.shape), first_actions.dtype, on)

    def sample_parts(calls: int) -> Sequence[float]:
        device.synchronize(on)
        sent_s = issued_s = received_s = 0.0
        for call in range(calls):
            t = call % ROLLOUT_STEPS
            start_s = device.now()
            on_device = inbound.send(observations)
            after_send_s = device.now()
            actions = step(on_device, noise_rows[t], rollout, t)
            after_issue_s = device.now()
            outbound.receive(actions)
            end_s = device.now()
            sent_s += after_send_s - start_s
            issued_s += after_issue_s - after_send_s
            received_s += end_s - after_issue_s
        return sent_s / calls, issued_s / calls, received_s / calls

    return Probe(tasks=timed_tasks(task), sample=sample_parts)


def timed_tasks(task: Task) -> tuple[Task, ...]:
    """The tasks that the probe of a task times: of a policy step elsewhere, each of its parts.

    Of a crowd, fewer stretches too, each for one process less beside that.
    """
    if task.op == "crowd":
        counts = [task.shape[0] >> shift for shift in (6, 3, 0) if task.shape[0] >> shift >= 256]
        return tuple(
            dataclasses.replace(task, shape=(count,), workers=workers)
            for count in counts
            for workers in (task.workers - 1, task.workers)
        )
    if task.op != "policy_step" or task.device == device.CPU:
        return (task,)
    return tuple(_with_op(task, op) for op in ("obs_to_device", "policy_step", "action_to_host"))


def _with_op(task: Task, op: str) -> Task:
    return Task(
        op=op,
        device=task.device,
        threads=task.threads,
        network=task.network,
        rows=task.rows,
        engine=task.engine,
        standardized=op == "obs_to_device" or task.standardized,
    )


def _gae(task: Task) -> Probe:
    spec = task.network
    assert spec is not None
    steps, envs = task.shape
    rollout = Rollout(spec, rollout_steps=steps, num_envs=envs, device=task.device)
    rows = torch.from_numpy(_observations(spec, (steps + 1) * envs))
    rollout.observations.copy_(rows.view(rollout.observations.shape))
    rollout.actions.zero_()
    rollout.outcomes.zero_()
    network = timed_network(spec, task.device, task.engine, standardized=task.standardized)
    hyper = Hyperparameters(num_envs=envs, rollout_steps=steps, hidden_sizes=spec.hidden_sizes)
    normalizer = None
    if task.scaled_rewards:
        normalizer = RewardNormalizer(num_envs=envs, gamma=hyper.gamma, device=task.device)
    recorded = torch.flatten(rollout.observations[:-1], 0, 1)

    def call() -> None:
        make_batch(network, rollout, hyper, normalizer)
        network.update_statistics(recorded)

    return Probe(tasks=(task,), sample=_once_in_a_while(call, task.device), max_calls=1)


def _bookkeeping(task: Task) -> Probe:
    """What is drawn and counted once per iteration, wherever the rest of it happens."""
    from autoplace.envs.episodes import EpisodeTracker  # imports gymnasium

    steps, envs, actions, epochs = task.shape
    workload = Workload(
        env=EnvSpec.make("none"),
        network=NetworkSpec(observation_size=1, hidden_sizes=(), action_size=actions),
        hyperparameters=Hyperparameters(num_envs=envs, rollout_steps=steps, epochs=epochs),
        action_bytes=0,
    )
    draws, episodes = Draws(workload, SEED), EpisodeTracker(envs)
    outcomes = np.zeros((steps, 3, envs), np.float32)
    rows = np.arange(steps * envs).reshape(steps, envs)
    outcomes[:, 1] = rows % _EPISODE_STEPS == 0  # spread over environments and time
    iteration = 0

    def call() -> None:
        nonlocal iteration
        draws.noise(iteration)
        episodes.add_rollout(outcomes)
        draws.permutations(iteration)
        iteration += 1
        episodes.take_ended(iteration * steps * envs)

    return Probe(tasks=(task,), sample=_once_in_a_while(call, task.device), max_calls=1)


def _learning(task: Task, num_minibatches: int) -> tuple[Updater, Batch, list[torch.Tensor]]:
    """What takes gradient steps, a rollout so many minibatches long, and the rows of each."""
    spec = task.network
    assert spec is not None
    on, rows = task.device, task.rows
    num_rows = num_minibatches * rows
    images = torch.from_numpy(_observations(spec, num_rows)).to(on) if spec.images else None
    column = 0 if spec.images else spec.observation_size
    generator = torch.Generator().manual_seed(SEED)
    values = torch.randn(num_rows, column + spec.action_columns + 3, generator=generator)
    if not spec.continuous:
        choices = torch.tensor(spec.action_heads or (spec.action_size,))
        actions = torch.arange(num_rows).unsqueeze(1) % choices
        values[:, column : column + spec.action_columns] = actions
    batch = Batch(values.to(on), spec, images)
    hyper = Hyperparameters(
        num_envs=4,
        rollout_steps=rows,
        hidden_sizes=spec.hidden_sizes,
        learning_rate=1e-9,  # weights stay as they are, however often it is timed
    )
    precision = next(name for name, dtype in PRECISIONS.items() if dtype == task.dtype)
    updater = make_updater(
        timed_network(spec, on, task.engine), hyper, minibatch_rows=rows, precision=precision
    )
    indices = torch.split(torch.randperm(num_rows, generator=generator).to(on), rows)
    return updater, batch, list(indices)


def _update(task: Task) -> Probe:
    """One gradient step: rows gathered from a rollout four minibatches long."""
    updater, batch, indices = _learning(task, 4)
    count = 0

    def step() -> None:
        nonlocal count
        updater.minibatch_step(batch, indices[count % len(indices)])
        count += 1

    queued = _QUEUED_UPDATES if device.is_accelerator(task.device) else 1
    return Probe(tasks=(task,), sample=timed_calls(step, task.device), min_calls=queued)


def _first_update(task: Task) -> Probe:
    """A whole update of one gradient step."""
    updater, batch, indices = _learning(task, 1)
    learning_rate = updater.hyperparameters.learning_rate

    def call() -> None:
        updater.update(batch, indices, learning_rate=learning_rate, iteration=0)

    return Probe(tasks=(task,), sample=_once_in_a_while(call, task.device), max_calls=1)


def _weights_to_host(task: Task) -> Probe:
    spec = task.network
    assert spec is not None
    network = timed_network(spec, task.device)
    host = device.host_empty(network.flat.shape, pinned_for=task.device)
    return Probe(
        tasks=(task,),
        sample=timed_calls(lambda: host.copy_(network.flat), task.device, wait_each=True),
    )


BUILDERS: dict[str, Callable[[Task], Probe]] = {
    "matmul": _matmul,
    "elementwise": _elementwise,
    "activation": _activation,
    "dispatch": _dispatch,
    "launch": _launch,
    "handoff": _handoff,
    "hand_over": _hand_over,
    "crowd": _crowd,
    "interpreter": _interpreter,
    "copy": _copy,
    "policy_step": _policy_step,
    "bookkeeping": _bookkeeping,
    "gae": _gae,
    "update": _update,
    "first_update": _first_update,
    "weights_to_host": _weights_to_host,
}


def probe_bytes(task: Task) -> float:
    """Roughly what a probe of ``task`` allocates, to keep away from what does not fit."""
    if task.op == "matmul":
        m, k, n = task.shape
        return FLOAT_BYTES * float(m * k + k * n + m * n)
    if task.op in ("elementwise", "activation", "copy"):
        return 2.0 * FLOAT_BYTES * task.shape[0]
    if task.network is None:
        return 0.0
    spec = task.network
    rows = task.rows if task.op != "gae" else task.shape[0] * task.shape[1]
    outputs = spec.activation_size
    return FLOAT_BYTES * (
        8.0 * spec.num_parameters + rows * (6.0 * outputs + 8.0 * spec.observation_size)
    )
