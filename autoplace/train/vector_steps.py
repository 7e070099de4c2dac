"""The loop over vector steps. Needs no torch.

In one group, acting and stepping take turns. In two (split-half sampling), one half of each
worker's environments steps while the actions of the other half are computed:

    policy   | act A | act B  | act A  | act B  | ...
    workers          | step A | step B | step A | ...

With p seconds for the policy step of a half, E for all environments to step once, and h to hand
actions over and results back, a vector step takes ``p_N + E + h`` in one group (p_N the policy step
of all) and, where every side has cores of its own, ``max(2 p, E, p + E / 2 + h)`` in two: the
policy's lane, the workers' lane, or the way of one half round both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoplace.clock import now
from autoplace.envs.episodes import EpisodeTracker
from autoplace.envs.recorder import OutcomeRecorder
from autoplace.envs.vector import VectorEnv, in_groups
from autoplace.train.interrupt import StopRequest


@dataclass(slots=True)
class Spent:
    """Seconds of one rollout.

    Attributes:
        act_s: in ``act``.
        env_s: in stepping, waiting for and recording the environments.
        row_s: in ``on_row``.
    """

    act_s: float = 0.0
    env_s: float = 0.0
    row_s: float = 0.0


class VectorSteps:
    """Steps environments through a rollout, group by group.

    Attributes:
        groups: the environments of each group.
        finals: index and observations of the truncated episodes of a complete rollout.
    """

    finals: tuple[np.ndarray, np.ndarray]

    def __init__(
        self,
        envs: VectorEnv,
        outcomes: np.ndarray,
        *,
        episodes: EpisodeTracker | None,
        stop: StopRequest,
    ) -> None:
        """Record what the environments answer in ``outcomes``, ``[T, 3, N]``.

        Whole rollouts are told to ``episodes``, if there are any.
        """
        self._outcomes, self._episodes = outcomes, episodes
        self._num_steps = outcomes.shape[0]
        self._observation_size = envs.observations.shape[1]
        self._stop = stop
        self._envs = in_groups(envs)
        self.groups = self._envs.groups
        self._recorder = OutcomeRecorder(outcomes)

    def run(
        self, act: Callable[[int, int], np.ndarray], on_row: Callable[[int], None] | None = None
    ) -> Spent:
        """Step every environment through the whole rollout.

        Args:
            act: from the vector step and the group's number, the actions of that group.
            on_row: called with each vector step as soon as all of it is recorded.

        Raises:
            StopRequested: a stop was asked for between two vector steps.
        """
        envs, steps, spent = self._envs, self._num_steps, Spent()
        groups = [(number, part.start) for number, part in enumerate(self.groups)]
        last = groups[-1][0]
        envs.settle()
        self._recorder.take_finals(self._observation_size)  # of an interrupted rollout
        then_s = now()
        for t in range(steps + 1):
            if t < steps:
                self._stop.check()
            for number, first in groups:
                if t > 0:
                    self._recorder.record(t - 1, envs.step_wait(number), first)
                    if t == steps and number == last:
                        self.finals = self._recorder.take_finals(self._observation_size)
                    stepped_s = now()
                    spent.env_s += stepped_s - then_s
                    then_s = stepped_s
                    if number == last and on_row is not None:
                        on_row(t - 1)
                        then_s = now()
                        spent.row_s += then_s - stepped_s
                if t < steps:
                    actions = act(t, number)
                    acted_s = now()
                    spent.act_s += acted_s - then_s
                    then_s = acted_s
                    envs.step_async(actions, number)
        if self._episodes is not None:  # which keeps its own time
            self._episodes.add_rollout(self._outcomes, self.valid_index)
        return spent

    @property
    def valid_index(self) -> np.ndarray | None:
        """As :attr:`OutcomeRecorder.valid_index`, of a complete rollout."""
        return self._recorder.valid_index
