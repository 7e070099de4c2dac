"""A learner in a process of its own, as the side that samples knows it.

That side never reads the shared state while the learner is at work: once the learner has answered
and rests, it takes a copy of its own, the *held* state. That is what callbacks see and what is
saved (and with ``double-buffer`` what samples), so it is sound whatever becomes of the learner.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.device import now
from autoplace.device_names import CPU
from autoplace.envs.workers import START_DEADLINE_S
from autoplace.errors import RunError
from autoplace.ppo.rollout import Rollout
from autoplace.processes import ChildProcess, describe_exit, raise_packed
from autoplace.train.learner_process import Answer, Job, Order, StateViews, serve
from autoplace.train.schemes.base import Completed, Lag, Setup

HUNG_AFTER_S = 600.0  # without an answer; an update takes seconds at most
LOOK_S = 0.5  # how often silent processes are looked at
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """An order that was given.

    Attributes:
        sent_s: when.
        num_transitions: env steps in the rollout.
        lag: of the rollout.
    """

    sent_s: float
    num_transitions: int
    lag: Lag


class RemoteLearner:
    """Its held state, and orders to the process.

    Attributes:
        network: over the held state.
        channels: by which it answers.
        processes: that it runs in.
        device: where the held state is.
        version: of the held weights: how many updates of the run made them.
        previous: the network's buffer one version before, ``None`` where there was none.
    """

    is_in_place = False

    def __init__(
        self,
        setup: Setup,
        rollouts: Sequence[Rollout],
        *,
        max_policy_lag: int,
        handoff_lane: str = "sampler",
    ) -> None:
        """Start the process, which ends with the run's resources.

        Args:
            setup: of the run.
            rollouts: in shared memory, to be handed over by their number here.
            max_policy_lag: how many updates old the weights may be that sampled one.
            handoff_lane: which one the hand-overs keep waiting.
        """
        network, hyper, placement = setup.network, setup.hyperparameters, setup.placement
        size, device = StateViews.size(network, hyper), placement.learn_device
        self._timer, self._engines = setup.timer, setup.engines
        self._threads, self._engine = placement.sample_threads, network.engine_here
        self._handoff_lane = handoff_lane
        self._deadline_s = setup.worker_deadline_s or HUNG_AFTER_S
        self._start_deadline_s = max(self._deadline_s, START_DEADLINE_S)
        state = devices.shared_array((size,), pinned_for=device)
        self._shared = devices.shared_tensor(state)
        self._held = torch.zeros(size)
        self.device = CPU
        views = StateViews(network, hyper, self._held)
        self.network = views.network
        self.network.flat.copy_(network.flat)
        self.version = self._first_version = setup.iterations.start
        self.previous = setup.previous if max_policy_lag else None
        self.reward_normalizer = views.reward_normalizer
        self.updater = HeldOptimizer(*views.moments)
        shape = hyper.epochs, hyper.rollout_rows
        permutations = tuple(
            devices.shared_array(shape, "int64", pinned_for=device) for _ in rollouts
        )
        self._permutations = [devices.shared_tensor(shared) for shared in permutations]
        self._rollouts = rollouts
        self._orders, self._answers = devices.message_channel(), devices.message_channel()
        self.channels = (self._answers,)
        self._in_flight: _InFlight | None = None
        self._answer: Answer | None = None  # that has come, but was not taken yet
        self._is_new = True  # whether the learner has not seen the state yet
        job = Job(
            spec=network.spec,
            hyperparameters=hyper,
            minibatch_rows=placement.minibatch_rows,
            precision=placement.precision,
            accumulation_steps=placement.accumulation_steps,
            device=device,
            threads=placement.learn_threads,
            engine=network.engine,
            normalize_observations=network.normalize_observations,
            max_policy_lag=max_policy_lag,
            state=state,
            rollouts=tuple(rollout.shared for rollout in rollouts),
            permutations=permutations,
        )
        self._process = devices.spawn(
            serve, self._orders, self._answers, job, name="autoplace learner"
        )
        self.processes = (self._process,)
        setup.resources.callback(self._close)

    def hand_over(
        self,
        buffer: int,
        permutations: Tensor,
        *,
        versions: tuple[int, ...],
        learning_rate: float,
        iteration: int,
    ) -> None:
        """Let the learner work on a rollout, which must not be touched until it has answered."""
        assert self._in_flight is None, "one order at a time"
        start_s = now()
        rollout = self._rollouts[buffer]
        with devices.torch_threads(self._threads, self._engine):
            self._permutations[buffer].copy_(permutations)
            if self._is_new:
                self._shared.copy_(self._held)
        valid = rollout.valid_index
        self._in_flight = _InFlight(
            sent_s=now(),
            num_transitions=rollout.num_transitions,
            lag=Lag.of(versions, self.version),
        )
        self._orders.put(
            Order(
                buffer=buffer,
                versions=versions,
                learning_rate=learning_rate,
                iteration=iteration,
                finals=(rollout.final_index.numpy(), rollout.final_observations.numpy()),
                valid_index=None if valid is None else valid.numpy(),
                num_steps=self.updater.num_steps if self._is_new else None,
                previous=self.previous.numpy()
                if self._is_new and self.previous is not None
                else None,
                sent_s=self._in_flight.sent_s,
            )
        )
        self._is_new = False
        self._timer.add("handoff", self._handoff_lane, now() - start_s)

    @property
    def is_at_work(self) -> bool:
        """Whether an order was given and is not answered."""
        return self._in_flight is not None and self._answer is None

    def look(self) -> None:
        """Receive the answer, if it has come.

        Raises:
            RunError: the process is gone, or has been silent for too long.
            Exception: whatever went wrong there, with its traceback as the cause.
        """
        in_flight = self._in_flight
        if in_flight is None or self._answer is not None:
            return
        was_alive = self._process.is_alive()
        with contextlib.suppress(queue.Empty):
            answer: Answer = self._answers.get(timeout=0.0)
            if answer.error is not None:
                self._in_flight = None
                raise_packed(answer.error)
            self._answer = answer
            return
        if not was_alive:
            code = getattr(self._process, "exitcode", None)
            raise RunError(
                f"the learner process {describe_exit(code)}: look for a lack of memory, "
                "then go on by --resume"
            )
        is_starting = self.version == self._first_version
        deadline_s = self._start_deadline_s if is_starting else self._deadline_s
        if now() - in_flight.sent_s > deadline_s:
            raise RunError(
                f"the learner process has not answered for {deadline_s:g} s: "
                "it was ended; go on by --resume"
            )

    def wait(self) -> None:
        """Wait for the answer to the order in flight, if there is one; raises as :meth:`look`."""
        self.look()
        while self.is_at_work:
            devices.wait_any([self._answers], [self._process], timeout_s=LOOK_S)
            self.look()

    def take(self) -> Completed | None:
        """Take the state that the last answer left behind; ``None`` where there is no answer."""
        answer, in_flight = self._answer, self._in_flight
        if answer is None or in_flight is None:
            return None
        self._answer = self._in_flight = None
        start_s = now()
        assert answer.update is not None and answer.stage_s is not None
        with devices.torch_threads(self._threads, self._engine):
            if self.previous is None:
                self.previous = torch.empty_like(self.network.flat)
            self.previous.copy_(self.network.flat)
            self._held.copy_(self._shared)
        self.version += 1
        self.updater.num_steps += answer.update.num_minibatches
        for verdict in answer.verdicts:
            self._engines.hear(verdict)
        for (name, lane), seconds in answer.stage_s.items():
            self._timer.add(name, lane, seconds)
        self._timer.add("handoff", self._handoff_lane, now() - start_s)
        return Completed(
            update=answer.update, num_transitions=in_flight.num_transitions, lag=in_flight.lag
        )

    def _close(self) -> None:
        """End the process; an order in flight is dropped."""
        self._orders.put(None)
        if isinstance(self._process, ChildProcess):
            self._process.stop(0.0 if self.is_at_work else _GRACE_S)
        else:
            self._process.join()
        for channel in (self._orders, self._answers):
            if hasattr(channel, "close"):
                channel.close()


class HeldOptimizer:
    """Adam's moments in the held state, as checkpoints know them."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self._moments = {"exp_avg": first, "exp_avg_sq": second}
        self.num_steps = 0

    def optimizer_state(self) -> dict[str, Tensor]:
        """Adam's moments and step count; empty before the first gradient step."""
        if not self.num_steps:
            return {}
        # Clones: the moments are views, and a view would drag the whole state along.
        moments = {name: tensor.clone() for name, tensor in self._moments.items()}
        return {"step": torch.tensor(float(self.num_steps)), **moments}

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of :meth:`optimizer_state`."""
        for name, tensor in self._moments.items():
            tensor.copy_(state[name])
        self.num_steps = int(state["step"].item())
