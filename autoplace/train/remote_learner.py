"""A learner in a process of its own, which works while the next rollout is sampled.

Both sides share host memory: two rollouts with the order of their minibatches, and the *state*,

    [weights and observation statistics | Adam's first moment | second moment | reward statistics]

one float32 vector, so that it crosses to an accelerator and back in one copy. On the CPU the
learner works in the shared state itself. The sampling side never reads it while the learner is at
work: at each hand-over, when the learner rests, it takes a copy of its own, the *held* state. That
is what samples, what callbacks see and what is saved, so it is sound whatever becomes of the
learner.
"""

from __future__ import annotations

import contextlib
import queue
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.device import MessageChannel, now
from autoplace.device_names import CPU, is_accelerator
from autoplace.errors import RunError
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.reward_normalizer import RewardNormalizer
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.update import UpdateStats
from autoplace.processes import ChildProcess, describe_exit, pack_error, raise_packed
from autoplace.results import StageKey
from autoplace.train.learner import Learner
from autoplace.train.stage_timer import StageTimer
from autoplace.workload import Hyperparameters, NetworkSpec

HUNG_AFTER_S = 600.0  # without an answer; an update takes seconds at most
_LOOK_S = 0.5  # how often a silent learner is looked at
_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a learner is made from, as it crosses to its process.

    Attributes:
        spec: of the network.
        hyperparameters: how PPO learns.
        minibatch_rows: of one gradient step.
        device: where it learns.
        threads: intra-op threads of torch.
        state: the shared state.
        rollouts: (observations, actions, outcomes) of each buffer, shared.
        permutations: ``[epochs, T N]`` of each buffer, shared.
    """

    spec: NetworkSpec
    hyperparameters: Hyperparameters
    minibatch_rows: int
    device: str
    threads: int
    state: Tensor
    rollouts: tuple[tuple[Tensor, Tensor, Tensor], ...]
    permutations: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A rollout that is handed over.

    Attributes:
        buffer: which of the rollouts.
        learning_rate: Adam's step size.
        iteration: counted from 1, for messages.
        finals: index and observations of truncated episodes, ``None`` where there are none.
        valid_index: rows that are transitions, ``None`` where all are.
        num_steps: gradient steps so far, where the state is new to the learner.
        sent_s: when it was sent.
    """

    buffer: int
    learning_rate: float
    iteration: int
    finals: tuple[np.ndarray, np.ndarray] | None
    valid_index: np.ndarray | None
    num_steps: int | None
    sent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of an order.

    Attributes:
        update: what the update said.
        stage_s: seconds of the learner's stages.
        error: what went wrong instead, with its traceback.
    """

    update: UpdateStats | None = None
    stage_s: dict[StageKey, float] | None = None
    error: tuple[BaseException, str] | None = None


class StateViews:
    """The parts of a state vector, as the algorithm knows them."""

    def __init__(
        self, network: ActorCritic, hyperparameters: Hyperparameters, state: Tensor
    ) -> None:
        weights, moments = network.flat.numel(), network.num_trainable
        self.network = network.over(state[:weights])
        first, second, rewards = torch.split(
            state[weights:], [moments, moments, state.numel() - weights - 2 * moments]
        )
        self.moments = first, second
        self.reward_normalizer: RewardNormalizer | None = None
        if hyperparameters.normalize_rewards:
            self.reward_normalizer = RewardNormalizer(
                num_envs=hyperparameters.num_envs, gamma=hyperparameters.gamma, device=CPU
            )
            self.reward_normalizer.state = rewards

    @staticmethod
    def size(network: ActorCritic, hyperparameters: Hyperparameters) -> int:
        """Floats of a state vector."""
        rewards = hyperparameters.num_envs + 3 if hyperparameters.normalize_rewards else 0
        return network.flat.numel() + 2 * network.num_trainable + rewards


# --------------------------------------------------------------------------------------------------
# The side that samples


class RemoteLearner:
    """The learner as the sampling side knows it: its held state, and orders to the process.

    Attributes:
        network: over the held state; the one that samples.
        device: where the held state is.
    """

    is_in_place = False

    def __init__(
        self,
        network: ActorCritic,
        hyperparameters: Hyperparameters,
        rollouts: tuple[Rollout, ...],
        *,
        minibatch_rows: int,
        device: str,
        threads: int,
    ) -> None:
        size = StateViews.size(network, hyperparameters)
        self._shared = devices.shared_empty((size,), pinned_for=device)
        self._held = torch.zeros(size)
        self.device = CPU
        views = StateViews(network, hyperparameters, self._held)
        self.network = views.network
        self.network.flat.copy_(network.flat)
        self.reward_normalizer = views.reward_normalizer
        self.updater = HeldOptimizer(*views.moments)
        self._permutations = tuple(
            devices.shared_empty(
                (hyperparameters.epochs, hyperparameters.rollout_rows),
                torch.int64,
                pinned_for=device,
            )
            for _ in rollouts
        )
        self._rollouts = rollouts
        self._orders, self._answers = devices.message_channel(), devices.message_channel()
        self._sent_s: float | None = None  # when the order in flight was sent
        self._is_new = True  # whether the learner has not seen the state yet
        job = Job(
            spec=network.spec,
            hyperparameters=hyperparameters,
            minibatch_rows=minibatch_rows,
            device=device,
            threads=threads,
            state=self._shared,
            rollouts=tuple((r.observations, r.actions, r.outcomes) for r in rollouts),
            permutations=self._permutations,
        )
        normalizes = network.normalize_observations
        self._process = devices.spawn(
            serve, self._orders, self._answers, job, normalizes, name="autoplace learner"
        )

    def hand_over(
        self, buffer: int, permutations: Tensor, *, learning_rate: float, iteration: int
    ) -> None:
        """Let the learner work on a rollout, which must not be touched until it has answered."""
        assert self._sent_s is None, "one order at a time"
        rollout = self._rollouts[buffer]
        self._permutations[buffer].copy_(permutations)
        if self._is_new:
            self._shared.copy_(self._held)
        finals = None
        if rollout.final_index.shape[0]:
            finals = rollout.final_index.numpy(), rollout.final_observations.numpy()
        valid = rollout.valid_index
        self._sent_s = now()
        self._orders.put(
            Order(
                buffer=buffer,
                learning_rate=learning_rate,
                iteration=iteration,
                finals=finals,
                valid_index=None if valid is None else valid.numpy(),
                num_steps=self.updater.num_steps if self._is_new else None,
                sent_s=self._sent_s,
            )
        )
        self._is_new = False

    def wait(self) -> Answer | None:
        """Wait for the order in flight, if there is one.

        Raises:
            RunError: the process is gone, or has been silent for too long.
            Exception: whatever went wrong there, with its traceback as the cause.
        """
        if self._sent_s is None:
            return None
        answer = self._receive()
        self._sent_s = None
        if answer.error is not None:
            raise_packed(answer.error)
        return answer

    def take_state(self, update: UpdateStats) -> None:
        """Copy the state that the last answer left behind."""
        self._held.copy_(self._shared)
        self.updater.num_steps += update.num_minibatches

    def _receive(self) -> Answer:
        assert self._sent_s is not None
        while True:
            was_alive = self._process.is_alive()
            with contextlib.suppress(queue.Empty):
                answer: Answer = self._answers.get(timeout=_LOOK_S if was_alive else 0.0)
                return answer
            if not was_alive:
                code = getattr(self._process, "exitcode", None)
                raise RunError(
                    f"the learner process {describe_exit(code)}: look for a lack of memory, "
                    "then go on by --resume"
                )
            if now() - self._sent_s > HUNG_AFTER_S:
                raise RunError(
                    f"the learner process has not answered for {HUNG_AFTER_S:.0f} s: "
                    "it was ended; go on by --resume"
                )

    def close(self) -> None:
        """End the process; an order in flight is dropped."""
        process = self._process
        with contextlib.suppress(OSError):
            self._orders.put(None)
        if isinstance(process, ChildProcess):
            process.stop(_GRACE_S if self._sent_s is None else 0.0)
        else:
            process.join()
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


# --------------------------------------------------------------------------------------------------
# The side that learns


def serve(
    orders: MessageChannel, answers: MessageChannel, job: Job, normalize_observations: bool
) -> None:
    """Learn from what is handed over until the order is ``None``."""
    server: _Server | None = None
    while True:
        order: Order | None = orders.get()
        if order is None:
            return
        try:
            if server is None:
                server = _Server(job, normalize_observations)
            answer = server.learn(order)
        except Exception as error:
            answer = Answer(error=pack_error(error))
        answers.put(answer)


class _Server:
    """The learner itself, on the job's device. Owns every crossing between it and the host."""

    def __init__(self, job: Job, normalize_observations: bool) -> None:
        hyper, self._device = job.hyperparameters, job.device
        self._is_remote = is_accelerator(job.device)
        self._shared = job.state
        self._timer = StageTimer()
        for tensor in (job.state, *job.permutations, *(t for r in job.rollouts for t in r)):
            devices.page_lock(tensor, job.device)
        self._state = (
            torch.empty_like(job.state, device=job.device) if self._is_remote else job.state
        )
        plain = ActorCritic(job.spec, normalize_observations=normalize_observations)
        views = StateViews(plain, hyper, self._state)
        self._learner = Learner(
            views.network,
            hyper,
            minibatch_rows=job.minibatch_rows,
            device=job.device,
            threads=job.threads,
            timer=self._timer,
        )
        self._learner.reward_normalizer = views.reward_normalizer
        self._moments = views.moments
        # The weights that sample while an update is in progress are those from before it.
        self._acted, self._acting = (
            plain.over(torch.empty_like(views.network.flat)) for _ in range(2)
        )
        steps, num_envs = hyper.rollout_steps, hyper.num_envs
        self._host = tuple(
            Rollout(job.spec, rollout_steps=steps, num_envs=num_envs, tensors=tensors)
            for tensors in job.rollouts
        )
        self._on_device = (
            Rollout(job.spec, rollout_steps=steps, num_envs=num_envs, device=job.device)
            if self._is_remote
            else None
        )
        self._permutations = job.permutations

    def learn(self, order: Order) -> Answer:
        """Carry one order out."""
        self._timer.add("handoff", "learner", max(0.0, now() - order.sent_s))
        learning = self._learner
        if order.num_steps is not None:
            if self._is_remote:
                self._state.copy_(self._shared)  # host -> device, once a run
            learning.updater.use_moments(*self._moments, order.num_steps)
            self._acted.flat.copy_(learning.network.flat)
        rollout, permutations = self._bring(order)
        self._acting.flat.copy_(learning.network.flat)  # these sample the next rollout meanwhile
        update = learning.learn(
            rollout,
            permutations,
            learning_rate=order.learning_rate,
            iteration=order.iteration,
            acted=self._acted,
        )
        self._acted, self._acting = self._acting, self._acted
        if self._is_remote:
            start_s = now()
            # device -> host, once an iteration; a blocking copy is its own wait
            self._shared.copy_(self._state)
            self._timer.add("weights_to_host", "learner", now() - start_s)
        return Answer(update=update, stage_s=self._timer.take())

    def _bring(self, order: Order) -> tuple[Rollout, Tensor]:
        host, permutations = self._host[order.buffer], self._permutations[order.buffer]
        index, finals = order.finals if order.finals is not None else (None, None)
        valid = None if order.valid_index is None else torch.from_numpy(order.valid_index)
        width = host.spec.observation_size
        host.final_index = torch.empty(0, dtype=torch.int64)
        host.final_observations = torch.empty(0, width)
        if index is not None and finals is not None:
            host.final_index = torch.from_numpy(index)
            host.final_observations = torch.from_numpy(finals)
        host.valid_index = valid
        there = self._on_device
        if there is None:
            return host, permutations
        start_s = now()
        there.copy_steps_from(host, 0, host.rollout_steps)  # host -> device, once an iteration
        there.observation_rows[-1].copy_(host.observation_rows[-1], non_blocking=True)
        moved = permutations.to(self._device, non_blocking=True)
        there.valid_index = None if valid is None else valid.to(self._device)
        if index is not None or there.final_index.shape[0]:
            there.final_index = host.final_index.to(self._device)
            there.final_observations = host.final_observations.to(self._device)
        devices.synchronize(self._device)
        self._timer.add("rollout_to_device", "learner", now() - start_s)
        return there, moved
