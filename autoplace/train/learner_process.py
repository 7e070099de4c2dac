"""The process that learns, and what goes to and fro.

Both sides share host memory: the rollouts with the order of their minibatches, and the *state*,

    [weights and observation statistics | Adam's first moment | second moment | reward statistics]

one float32 vector, so that it crosses to an accelerator and back in one copy. On the CPU the
learner works in the shared state itself.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from autoplace import device as devices
from autoplace.device import MessageChannel, now
from autoplace.device_names import CPU, is_accelerator
from autoplace.engines import Verdict, engine_on
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.reward_normalizer import RewardNormalizer
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.update import UpdateStats
from autoplace.processes import pack_error
from autoplace.shared_array import SharedArray
from autoplace.train.learner import Learner
from autoplace.train.stage_timer import Key, StageTimer
from autoplace.train.versions import Versions
from autoplace.workload import Hyperparameters, NetworkSpec


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a learner is made from, as it crosses to its process.

    Attributes:
        spec: of the network.
        hyperparameters: how PPO learns.
        minibatch_rows: of one gradient step.
        precision: of its passes.
        accumulation_steps: backward passes that make one gradient step.
        device: where it learns.
        threads: intra-op threads of torch.
        engine: of the placement.
        normalize_observations: whether the network standardises observations.
        max_policy_lag: how many updates old the weights may be that sampled a rollout.
        state: the shared state.
        rollouts: (observations, actions, outcomes) of each buffer.
        permutations: ``[epochs, T N]`` of each buffer.
    """

    spec: NetworkSpec
    hyperparameters: Hyperparameters
    minibatch_rows: int
    precision: str
    accumulation_steps: int
    device: str
    threads: int
    engine: str
    normalize_observations: bool
    max_policy_lag: int
    state: SharedArray
    rollouts: tuple[tuple[SharedArray, ...], ...]
    permutations: tuple[SharedArray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A rollout that is handed over.

    Attributes:
        buffer: which of the rollouts.
        versions: of the weights that sampled it, each in an equal share of the environments; a
            version is the number of updates that made it.
        learning_rate: Adam's step size.
        iteration: counted from 1; the update turns version ``iteration - 1`` into the next.
        finals: index and observations of truncated episodes.
        valid_index: rows that are transitions, ``None`` where all are.
        num_steps: gradient steps so far, where the state is new to the learner.
        previous: the network's buffer one version before, where that is new to it too.
        sent_s: when it was sent.
    """

    buffer: int
    versions: tuple[int, ...]
    learning_rate: float
    iteration: int
    finals: tuple[np.ndarray, np.ndarray]
    valid_index: np.ndarray | None
    num_steps: int | None
    previous: np.ndarray | None
    sent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of an order.

    Attributes:
        update: what the update said.
        stage_s: seconds of the learner's stages.
        verdicts: on engines that were tried.
        error: what went wrong instead, with its traceback.
    """

    update: UpdateStats | None = None
    stage_s: dict[Key, float] | None = None
    verdicts: tuple[Verdict, ...] = ()
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


def serve(orders: MessageChannel, answers: MessageChannel, job: Job) -> None:
    """Learn from what is handed over until the order is ``None``."""
    server: _Server | None = None
    with contextlib.ExitStack() as stack:
        while True:
            order: Order | None = orders.get()
            if order is None:
                return
            try:
                if server is None:
                    engine = engine_on(job.engine, job.device, is_plain=job.spec.is_plain)
                    stack.enter_context(devices.torch_threads(job.threads, engine))
                    server = _Server(job)
                answer = server.learn(order)
            except Exception as error:
                answer = Answer(error=pack_error(error))
            answers.put(answer)


class _Server:
    """The learner itself, on the job's device. Owns every crossing between it and the host."""

    def __init__(self, job: Job) -> None:
        hyper, self._device = job.hyperparameters, job.device
        self._is_remote = is_accelerator(job.device)
        self._timer = StageTimer()
        self._verdicts: list[Verdict] = []
        steps, num_envs = hyper.rollout_steps, hyper.num_envs
        self._shared = devices.shared_tensor(job.state)
        self._permutations = [devices.shared_tensor(shared) for shared in job.permutations]
        self._host = tuple(
            Rollout(job.spec, rollout_steps=steps, num_envs=num_envs, shared=shared)
            for shared in job.rollouts
        )
        tensors = [t for r in self._host for t in (r.observations, r.actions, r.outcomes)]
        for tensor in (self._shared, *self._permutations, *tensors):
            devices.page_lock(tensor, job.device)
        self._state = (
            torch.empty_like(self._shared, device=job.device) if self._is_remote else self._shared
        )
        plain = ActorCritic(
            job.spec, normalize_observations=job.normalize_observations, engine=job.engine
        )
        views = StateViews(plain, hyper, self._state)
        self._learner = Learner(
            views.network,
            hyper,
            minibatch_rows=job.minibatch_rows,
            precision=job.precision,
            accumulation_steps=job.accumulation_steps,
            device=job.device,
            threads=job.threads,
            timer=self._timer,
            hear=self._verdicts.append,
        )
        self._learner.reward_normalizer = views.reward_normalizer
        self._moments = views.moments
        self._versions = Versions(views.network, job.max_policy_lag)
        self._on_device = (
            Rollout(job.spec, rollout_steps=steps, num_envs=num_envs, device=job.device)
            if self._is_remote
            else None
        )

    def learn(self, order: Order) -> Answer:
        """Carry one order out."""
        self._timer.add("handoff", "learner", max(0.0, now() - order.sent_s))
        learning = self._learner
        if order.num_steps is not None:
            if self._is_remote:
                self._state.copy_(self._shared)  # host -> device, once a run
            learning.updater.use_moments(*self._moments, order.num_steps)
            self._versions.keep(order.iteration - 1, learning.network.flat)
            if order.previous is not None:
                self._versions.keep(order.iteration - 2, torch.from_numpy(order.previous))
        rollout, permutations = self._bring(order)
        update = learning.learn(
            rollout,
            permutations,
            learning_rate=order.learning_rate,
            iteration=order.iteration,
            acted=[self._versions[version] for version in order.versions],
        )
        self._versions.keep(order.iteration, learning.network.flat)
        if self._is_remote:
            start_s = now()
            # device -> host, once an iteration; a blocking copy is its own wait
            self._shared.copy_(self._state)
            self._timer.add("weights_to_host", "learner", now() - start_s)
        verdicts, self._verdicts[:] = tuple(self._verdicts), []
        return Answer(update=update, stage_s=self._timer.take(), verdicts=verdicts)

    def _bring(self, order: Order) -> tuple[Rollout, Tensor]:
        host, permutations = self._host[order.buffer], self._permutations[order.buffer]
        host.note_ends(*order.finals, order.valid_index)
        valid = host.valid_index
        there = self._on_device
        if there is None:
            return host, permutations
        start_s = now()
        there.copy_steps_from(host, 0, host.rollout_steps)  # host -> device, once an iteration
        there.observation_rows[-1].copy_(host.observation_rows[-1], non_blocking=True)
        moved = permutations.to(self._device, non_blocking=True)
        there.valid_index = None if valid is None else valid.to(self._device)
        if host.final_index.shape[0] or there.final_index.shape[0]:
            there.final_index = host.final_index.to(self._device)
            there.final_observations = host.final_observations.to(self._device)
        devices.synchronize(self._device)
        self._timer.add("rollout_to_device", "learner", now() - start_s)
        return there, moved
