"""The start of a process that makes environments, and what they hold there."""

from __future__ import annotations

import os

import gymnasium as gym
import numpy as np
import psutil
import pytest

from autoplace import device
from autoplace.errors import EnvError
from autoplace.measure import env_start as measuring
from autoplace.measure.env_start import measure_env_start
from autoplace.measurement import Measurement, env_start
from autoplace.workload import EnvSpec
from tests.emulated.machine import EmulatedMachine
from tests.emulated.spec import CpuSpec, MachineSpec
from tests.envs.toys import register

EACH, ONCE = 4 * 2**20, 24 * 2**20  # bytes


def holding(each: int, once: int) -> str:
    """An environment that holds so much, and whose kind holds so much in each process."""

    class Holding(gym.Env[np.ndarray, int]):
        held: dict[str, np.ndarray] = {}  # noqa: RUF012 - of all, as a library's would be

        def __init__(self) -> None:
            self.observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
            self.action_space = gym.spaces.Discrete(2)
            if "all" not in self.held:
                self.held["all"] = np.ones(once, np.uint8)
            self.own = np.ones(each, np.uint8)

        def reset(self, **_: object) -> tuple[np.ndarray, dict[str, object]]:  # type: ignore[override]
            return np.zeros(1, np.float32), {}

        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
            print("said by an environment")
            return np.zeros(1, np.float32), 0.0, False, False, {}

    return register("Holding", Holding)


def test_what_environments_hold_is_told_from_what_their_process_holds(
    capfd: pytest.CaptureFixture[str],
) -> None:
    env = EnvSpec.make(holding(EACH, ONCE))
    before, start_s = set(psutil.Process().children()), device.now()
    (measured,) = measure_env_start(env)
    elapsed_s = device.now() - start_s
    assert measured.task == env_start(env)
    assert 0 < measured.times_s[0] <= elapsed_s
    assert measured.env_bytes == pytest.approx(EACH, rel=0.1)
    assert measured.process_bytes == pytest.approx(ONCE, rel=0.15)
    assert "said by" not in capfd.readouterr().out
    kept = Measurement.from_json(measured.to_json())
    assert (kept.env_bytes, kept.process_bytes) == (measured.env_bytes, measured.process_bytes)
    left = {p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())}
    assert left <= before


def test_an_environment_that_is_made_only_here_has_no_such_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = os.getpid()

    def only_here() -> gym.Env[np.ndarray, int]:
        if os.getpid() != here:
            raise RuntimeError("another process")
        return gym.make("CartPole-v1").unwrapped

    assert measure_env_start(EnvSpec.make(register("OnlyHere", only_here))) == []
    assert "the memory of AutoplaceTest/OnlyHere-v0 is not known" in caplog.text

    with pytest.raises(EnvError):
        measure_env_start(EnvSpec.make("NoSuchEnv-v0"))


def test_a_virtual_clock_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "inspect_env", lambda _: pytest.fail("made"))
    with EmulatedMachine(MachineSpec(cpu=CpuSpec(cores=2)), dry=True):
        assert measure_env_start(EnvSpec.make("CartPole-v1")) == []
