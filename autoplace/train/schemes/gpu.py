"""Scheme ``gpu``: environments on the CPU, policy and learner on an accelerator.

Crossings: one observation copy and one action copy per vector step; the noise, and then rewards,
flags and final observations, once per rollout; the epochs' permutations once per iteration.
"""

from __future__ import annotations

from torch import Tensor

from autoplace import device as devices
from autoplace.device import now
from autoplace.envs.recorder import OutcomeRecorder
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.rollout import Rollout
from autoplace.train.learner import Learner
from autoplace.train.schemes.base import Completed, InTurn, Setup


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
        self._recorder = OutcomeRecorder(self._outcomes, setup.episodes)
        row = self._rollout.observation_rows[0]
        self._inbound = devices.Channel(tuple(row.shape), row.dtype, self._device)
        actions = self._rollout.action_rows[0]
        self._outbound = devices.Channel(tuple(actions.shape), actions.dtype, self._device)
        self.learner = Learner(
            setup.network.over(setup.network.flat.to(self._device)),  # host -> device, once a run
            hyper,
            minibatch_rows=placement.minibatch_rows,
            device=self._device,
            threads=placement.learn_threads,
            timer=setup.timer,
        )
        self._policy_step = PolicyStep(self.learner.network)

    def sample(self, iteration: int) -> None:
        """Fill the rollout, one round trip to the device per vector step.

        Raises:
            StopRequested: a stop was asked for between two vector steps.
        """
        setup, rollout, timer = self._setup, self._rollout, self._setup.timer
        envs, record, stop = self._envs, self._recorder.record, setup.stop
        send, receive = self._inbound.send, self._outbound.receive
        send_s = policy_s = receive_s = env_s = 0.0
        self._recorder.take_finals(rollout.spec.observation_size)  # of an interrupted rollout
        with devices.torch_threads(setup.placement.sample_threads):
            # host -> device, once a rollout
            noise = setup.draws.noise(iteration).to(self._device)
            for t, noise_row in enumerate(noise.unbind(0)):
                stop.check()
                start_s = now()
                observations = send(envs.observations)  # host -> device
                sent_s = now()
                on_device = self._policy_step(observations, noise_row, rollout, t)
                issued_s = now()
                actions = receive(on_device)  # device -> host; the only wait of a vector step
                received_s = now()
                record(t, envs.step(actions))
                stepped_s = now()
                send_s += sent_s - start_s
                policy_s += issued_s - sent_s
                receive_s += received_s - issued_s
                env_s += stepped_s - received_s
            start_s = now()
            self._send_outcomes()
            timer.add("rollout_to_device", "sampler", now() - start_s)
        timer.add("obs_to_device", "sampler", send_s)
        timer.add("policy_step", "sampler", policy_s)
        timer.add("action_to_host", "sampler", receive_s)
        timer.add("env_step", "sampler", env_s)

    def _send_outcomes(self) -> None:
        """Send what the environments answered, and where they are now."""
        rollout = self._rollout  # host -> device, once a rollout
        rollout.observation_rows[-1].copy_(self._inbound.send(self._envs.observations))
        rollout.outcomes.copy_(self._outcomes, non_blocking=True)
        index, observations = self._recorder.take_finals(rollout.spec.observation_size)
        rollout.final_index = index.to(self._device)
        rollout.final_observations = observations.to(self._device)
        valid = self._recorder.valid_index
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
