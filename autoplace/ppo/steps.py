"""The trainer's steps by the engine of the network that they are for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autoplace.engines import COMPILE, EAGER, FP32, GRAPH, NUMPY, Verdict
from autoplace.ppo.compiled import CompiledPolicyStep, CompiledUpdater
from autoplace.ppo.engine_updater import EngineUpdater
from autoplace.ppo.graphed import GraphPolicyStep, GraphUpdater
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.numpy_policy_step import NumpyPolicyStep
from autoplace.ppo.numpy_update import NumpyUpdater
from autoplace.ppo.policy_step import PolicyStep
from autoplace.ppo.rollout import Rollout
from autoplace.ppo.trial import STEPS, Hear, Trial
from autoplace.ppo.update import Updater
from autoplace.workload import Hyperparameters

Act = Callable[[Tensor, Tensor, Rollout, int], Tensor]
_POLICY_STEPS: dict[str, Callable[[ActorCritic], Act]] = {
    EAGER: PolicyStep,
    NUMPY: NumpyPolicyStep,
    COMPILE: CompiledPolicyStep,
    GRAPH: GraphPolicyStep,
}
_UPDATERS: dict[str, type[EngineUpdater]] = {
    NUMPY: NumpyUpdater,
    COMPILE: CompiledUpdater,
    GRAPH: GraphUpdater,
}
# Noise that tells choices apart which are equally likely, and hides no difference in the policy.
_TILT = 1e-5


def make_policy_step(network: ActorCritic, hear: Hear | None = None) -> Act:
    """What samples actions, see :meth:`autoplace.ppo.policy_step.PolicyStep.__call__`.

    Args:
        network: that acts, by its engine.
        hear: told what came of the first steps, each compared with an eager one; without it none
            is, and the engine's errors are raised.
    """
    step = _POLICY_STEPS[network.engine_here](network)
    if hear is None or network.engine_here == EAGER:
        return step
    return TriedPolicyStep(step, network, hear)


def make_updater(
    network: ActorCritic,
    hyperparameters: Hyperparameters,
    *,
    minibatch_rows: int,
    precision: str = FP32,
    accumulation_steps: int = 1,
    hear: Hear | None = None,
) -> Updater:
    """What takes gradient steps, see :class:`autoplace.ppo.update.Updater`.

    ``hear`` is as in :func:`make_policy_step`.
    """
    engine = network.engine_here
    if engine != EAGER:
        assert (precision, accumulation_steps) == (FP32, 1)
        return _UPDATERS[engine](network, hyperparameters, minibatch_rows=minibatch_rows, hear=hear)
    return Updater(
        network,
        hyperparameters,
        minibatch_rows=minibatch_rows,
        precision=precision,
        accumulation_steps=accumulation_steps,
    )


def step_over(
    step: Act, observations: Tensor, noise: Tensor, rollout: Rollout
) -> Callable[[int], object]:
    """A policy step as a function of the row, for a whole rollout on the host.

    Args:
        step: from :func:`make_policy_step`.
        observations: ``[N, D]`` that are overwritten from row to row.
        noise: ``[T, N, A]``.
        rollout: written.
    """
    if isinstance(step, TriedPolicyStep):
        step = step.settled
    if isinstance(step, NumpyPolicyStep):
        return step.over(observations, noise, rollout)
    noise_rows = noise.unbind(0)
    return lambda t: step(observations, noise_rows[t], rollout, t)


class TriedPolicyStep:
    """The policy step of an engine, whose first calls are compared with the eager one's."""

    def __init__(self, step: Act, network: ActorCritic, hear: Hear) -> None:
        """Try ``step`` of a network and tell ``hear`` what came of it."""
        self._step, self._eager = step, PolicyStep(network)
        self._trial = Trial(network.engine_here, "policy step", str(network.flat.device), hear)
        self._settle()

    def __call__(self, observations: Tensor, noise: Tensor, rollout: Rollout, t: int) -> Tensor:
        """Write row ``t`` of ``rollout`` and return its actions."""
        if not self._trial.is_over:
            self._try(observations, noise, rollout, t)
        return self._step(observations, noise, rollout, t)

    @property
    def settled(self) -> Act:
        """Itself while the trial goes on, then what came of it."""
        return self._step if self._trial.is_over else self

    def _try(self, observations: Tensor, noise: Tensor, rollout: Rollout, t: int) -> None:
        trial, eager, engine = self._trial, self._eager, self._step
        quiet = _TILT * torch.arange(noise.shape[1], device=noise.device).expand_as(noise)
        eager_s = trial.timed(lambda: eager(observations, noise, rollout, t))
        expected = eager(observations, quiet, rollout, t).clone()
        try:
            engine_s = trial.timed(lambda: engine(observations, noise, rollout, t))
            found = engine(observations, quiet, rollout, t)
        except Exception as error:  # whatever a compiler or a driver raises
            trial.fail(error)
        else:
            trial.add(eager_s, engine_s, _difference(expected, found))
        self._settle()

    def _settle(self) -> None:
        if self._trial.is_dropped:
            self._step = self._eager


def passes_trial(network: ActorCritic, *, num_rows: int, hear: Hear) -> bool:
    """Whether the engine of a network has passed its trial, on observations that are made up.

    For steps of other processes, which have no eager ones to compare with.

    Args:
        network: on the host.
        num_rows: observations of a step.
        hear: as in :func:`make_policy_step`.
    """
    spec, verdicts = network.spec, list[Verdict]()
    generator = torch.Generator().manual_seed(0)
    rollout = Rollout(spec, rollout_steps=STEPS, num_envs=num_rows)
    step = make_policy_step(network, verdicts.append)
    for t in range(STEPS):
        observations = torch.randn(num_rows, spec.observation_size, generator=generator)
        noise = torch.randn(num_rows, spec.action_size, generator=generator)
        if not verdicts:
            step(observations, noise, rollout, t)
    for verdict in verdicts:
        hear(verdict)
    return all(verdict.dropped_because is None for verdict in verdicts)


def _difference(expected: Tensor, found: Tensor) -> float:
    """The share of choices that differ, or the distance of means over their size."""
    if not expected.is_floating_point():
        return float((expected != found).float().mean())
    size = float(torch.linalg.vector_norm(expected))
    apart = float(torch.linalg.vector_norm(found - expected))
    return apart / size if size else 0.0
