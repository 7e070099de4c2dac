"""Scheme ``hybrid``: sampling on the CPU, learning on an accelerator.

Crossings: rollout chunks leave page-locked memory while sampling goes on; the epochs' permutations
follow in one copy; the weights come back once per iteration.
"""

from __future__ import annotations

from torch import Tensor

from autoplace import device as devices
from autoplace.device import now
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.steps import make_policy_step
from autoplace.train.sampler import HostSampler
from autoplace.train.schemes.base import Completed, InTurn, Setup


class HybridScheme(InTurn):
    """Two copies of the network, two of the rollout, and a stream for what goes between them."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        hyper, placement = setup.hyperparameters, setup.placement
        self._draws = setup.draws
        self._device = placement.learn_device
        self._interval = placement.transfer_interval_steps
        self._timer = setup.timer

        spec = setup.network.spec
        steps, num_envs = hyper.rollout_steps, hyper.num_envs
        self._host = Rollout(spec, rollout_steps=steps, num_envs=num_envs, pinned_for=self._device)
        self._on_device = Rollout(spec, rollout_steps=steps, num_envs=num_envs, device=self._device)
        self._copies = devices.CopyStream(self._device)

        # Weights come back into page-locked memory, which the sampling network lives in.
        flat = devices.host_empty(setup.network.flat.shape, pinned_for=self._device)
        self._sampling_network = setup.network.over(flat.copy_(setup.network.flat))
        self._sampler = HostSampler.of(setup, self._envs, self._host)
        self._policy_step = make_policy_step(self._sampling_network, setup.engines.hear)
        learned = setup.network.flat.to(self._device)  # host -> device, once a run
        self.learner = setup.make_learner(setup.network.over(learned))

    def sample(self, iteration: int) -> None:
        """Fill the rollout; its chunks leave for the device meanwhile."""
        noise = self._draws.noise(iteration)
        self._sampler.sample(
            self._policy_step, noise, chunk_steps=self._interval, on_chunk=self._send
        )

    def _send(self, start: int, stop: int) -> None:
        host, on_device = self._host, self._on_device
        last = stop == host.rollout_steps
        with self._copies.after_current():  # host -> device, without waiting
            on_device.copy_steps_from(host, start, stop)
            if last:
                on_device.observation_rows[-1].copy_(host.observation_rows[-1], non_blocking=True)
                valid = host.valid_index
                on_device.valid_index = None if valid is None else valid.to(self._device)
                if host.final_index.shape[0] or on_device.final_index.shape[0]:
                    # Rare and of any number, so from ordinary memory: the host waits for these.
                    on_device.final_index = host.final_index.to(self._device)
                    on_device.final_observations = host.final_observations.to(self._device)

    def learn(self, permutations: Tensor, *, learning_rate: float, iteration: int) -> Completed:
        """Learn from the rollout once all of it has arrived."""
        permutations = permutations.to(self._device)  # host -> device, once an iteration
        self._copies.join()  # what the device does next comes after the copies...
        self._copies.synchronize()  # ...and the learner's wait for them is no part of its stages
        update = self.learner.learn(
            self._on_device, permutations, learning_rate=learning_rate, iteration=iteration
        )
        return Completed(update=update, num_transitions=self._host.num_transitions)

    def publish(self) -> None:
        """Bring the weights and the statistics back to the network that samples."""
        start_s = now()
        # device -> host, once an iteration; a blocking copy is its own wait
        self._sampling_network.flat.copy_(self.learner.network.flat)
        self._timer.add("weights_to_host", "learner", now() - start_s)
