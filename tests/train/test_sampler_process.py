"""By which weights a sampler acts."""

import queue
from types import SimpleNamespace

import pytest

from autoplace.train.sampler_process import _Sampler
from autoplace.train.stage_timer import StageTimer


class Told:
    """A channel by which versions come: those that are there, then one at each wait."""

    def __init__(self, there, later):
        self.there, self.later = list(there), list(later)

    def get(self, timeout=None):
        if self.there:
            return self.there.pop(0)
        if timeout == 0.0:
            raise queue.Empty
        return self.later.pop(0)


@pytest.mark.parametrize(
    ("lag", "iteration", "there", "later", "version"),
    [
        (1, 7, [5, 6], [], 6),
        (1, 7, [5], [6], 6),  # waits: 5 would be 2 behind
        (1, 7, [6, 7], [], 6),  # never chance: the lag is 1 though 7 is there
        (3, 7, [4], [], 4),
        (3, 7, [3], [4, 5], 4),  # no longer than it must
        (3, 7, [4, 5, 6], [], 6),
        (3, 7, [6, 7], [], 6),
        (0, 7, [6], [7], 7),
        (1, 2, [2], [], 2),  # the first rollout after a resume: there is no older version
        (3, 3, [2], [], 2),
    ],
)
def test_a_sampler_takes_the_newest_version_that_is_allowed(lag, iteration, there, later, version):
    sampler = object.__new__(_Sampler)
    sampler._job = SimpleNamespace(oldest=2, max_policy_lag=lag)
    sampler._versions, sampler._timer = Told(there, later), StageTimer()
    sampler._newest = sampler._version = -1
    sampler._find_version(iteration)
    assert sampler._version == version
