"""Scheme ``gpu``: environments on the CPU, policy and learner on an accelerator.

Crossings: one observation copy and one action copy per vector step (and group of environments);
the noise, and then rewards, flags and final observations, once per rollout; the epochs'
permutations once per iteration.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from autoplace import device as devices
from autoplace.device import now
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import make_policy_step
from autoplace.train.schemes.base import Completed, InTurn, Setup
from autoplace.train.vector_steps import VectorSteps


class _Crossing:
    """What one group of environments needs to act on the device."""

    def __init__(self, rollout: Rollout, part: slice, device: str) -> None:
        self.part = part
        self.rollout = rollout.columns(part)
        row, actions = self.rollout.observation_rows[0], self.rollout.action_rows[0]
        self.send = devices.Channel(tuple(row.shape), row.dtype, device).send
        self.receive = devices.Channel(tuple(actions.shape), actions.dtype, device).receive


class GpuScheme(InTurn):
    """The rollout is born on the device; only what the environments answer comes from the host."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        hyper, placement = setup.hyperparameters, setup.placement
        self._setup = setup
        self._device = placement.learn_device
        spec = setup.network.spec
        steps, num_envs = hyper.rollout_steps, hyper.num_envs
        self._rollout = Rollout(spec, rollout_steps=steps, num_envs=num_envs, device=self._device)
        self._outcomes = devices.host_empty((steps, 3, num_envs), pinned_for=self._device)
        self._steps = VectorSteps(
            self._envs, self._outcomes.numpy(), episodes=setup.episodes, stop=setup.stop
        )
        self._crossings = [
            _Crossing(self._rollout, part, self._device) for part in self._steps.groups
        ]
        flat = setup.network.flat.to(self._device)  # host -> device, once a run
        self.learner = setup.make_learner(setup.network.over(flat))
        self._policy_step = make_policy_step(self.learner.network, setup.engines.hear)

    def sample(self, iteration: int) -> None:
        """Fill the rollout, one round trip to the device per vector step and group.

        Raises:
            StopRequested: a stop was asked for between two vector steps.
        """
        setup, observations, timer = self._setup, self._envs.observations, self._setup.timer
        send_s = policy_s = receive_s = 0.0

        def act(t: int, group: int) -> np.ndarray:
            nonlocal send_s, policy_s, receive_s
            crossing = self._crossings[group]
            start_s = now()
            on_device = crossing.send(observations[crossing.part])  # host -> device
            sent_s = now()
            actions = self._policy_step(on_device, noise_rows[group][t], crossing.rollout, t)
            issued_s = now()
            received = crossing.receive(actions)  # device -> host; the only wait of a vector step
            send_s += sent_s - start_s
            policy_s += issued_s - sent_s
            receive_s += now() - issued_s
            return received

        with devices.torch_threads(setup.placement.sample_threads):
            # host -> device, once a rollout
            noise = setup.draws.noise(iteration).to(self._device)
            noise_rows = [noise[:, crossing.part].unbind(0) for crossing in self._crossings]
            spent = self._steps.run(act)
            start_s = now()
            self._send_outcomes()
            timer.add("rollout_to_device", "sampler", now() - start_s)
        timer.add("obs_to_device", "sampler", send_s)
        timer.add("policy_step", "sampler", policy_s)
        timer.add("action_to_host", "sampler", receive_s)
        timer.add("env_step", "sampler", spent.env_s)

    def _send_outcomes(self) -> None:
        """Send what the environments answered, and where they are now."""
        rollout = self._rollout  # host -> device, once a rollout
        for crossing in self._crossings:
            last = crossing.send(self._envs.observations[crossing.part])
            crossing.rollout.observation_rows[-1].copy_(last)
        rollout.outcomes.copy_(self._outcomes, non_blocking=True)
        rollout.note_ends(*self._steps.finals, self._steps.valid_index)
        rollout.final_index = rollout.final_index.to(self._device)
        rollout.final_observations = rollout.final_observations.to(self._device)
        valid = rollout.valid_index
        rollout.valid_index = None if valid is None else valid.to(self._device)
        devices.synchronize(self._device)

    def learn(self, permutations: Tensor, *, learning_rate: float, iteration: int) -> Completed:
        """Learn from the rollout where it is."""
        permutations = permutations.to(self._device)  # host -> device, once an iteration
        update = self.learner.learn(
            self._rollout, permutations, learning_rate=learning_rate, iteration=iteration
        )
        return Completed(update=update, num_transitions=self._rollout.num_transitions)

    def publish(self) -> None:
        """Nothing to do: the weights that sample are those that learned."""
