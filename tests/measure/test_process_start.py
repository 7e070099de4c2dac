"""The start of a process, timed."""

from __future__ import annotations

import gc
import logging
import pickle
import subprocess
import sys
import threading

import psutil
import pytest

from autoplace import device
from autoplace.measure import process_start
from autoplace.measure.calibrate import calibrate
from autoplace.measure.order import ORDER
from autoplace.measure.process_start import measure_process_start
from autoplace.measurement import PROCESS_START
from tests.emulated.machine import EmulatedMachine
from tests.emulated.spec import CpuSpec, MachineSpec


def test_a_start_is_timed_until_the_process_is_ready_and_leaves_nothing_behind() -> None:
    before, start_s = set(psutil.Process().children()), device.now()
    (measured,) = measure_process_start(num_samples=1)
    elapsed_s = device.now() - start_s
    assert measured.task == PROCESS_START and measured.num_samples == 1
    # Starting an interpreter and importing take nearly all of the time; sending a message does not.
    assert 0.5 * elapsed_s < sum(measured.times_s) <= elapsed_s
    left = {p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())}
    assert left <= before


def test_an_emulated_calibration_has_the_start_of_its_machine() -> None:
    spec = MachineSpec(cpu=CpuSpec(cores=2, worker_start_s=0.25))
    with EmulatedMachine(spec, dry=True) as machine:
        calibration = calibrate(quick=True, budget_s=5.0, machine=machine.machine())
    assert calibration.by_task[PROCESS_START].median_s == pytest.approx(0.25, rel=0.01)


def test_where_no_process_answers_the_rest_is_calibrated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_start, "DEADLINE_S", 0.0)
    with caplog.at_level(logging.WARNING):
        assert measure_process_start(num_samples=2) == []
    assert "was not timed" in caplog.text


def test_a_process_imports_without_looking_for_garbage_and_collects_it_afterwards() -> None:
    answers = device.message_channel()
    process = device.spawn(_say_of_garbage, answers, name="autoplace test")
    is_collected, num_collections = answers.get(timeout=process_start.DEADLINE_S)
    process.join()
    assert is_collected
    # The oldest generation: importing torch alone would have it looked through several times.
    assert num_collections <= 2


def _say_of_garbage(answers: device.MessageChannel) -> None:
    answers.put((gc.isenabled(), gc.get_stats()[2]["collections"]))


def test_what_is_to_run_meanwhile_has_run_in_another_thread() -> None:
    threads: list[str] = []
    (measured,) = measure_process_start(
        num_samples=1, meanwhile=lambda: threads.append(threading.current_thread().name)
    )
    assert measured.num_samples == 1
    assert threads and threads != [threading.main_thread().name]


def test_a_process_that_answers_messages_reads_them_without_torch() -> None:
    code = (
        "import pickle, sys; order = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "assert order.numbers['version'] == 1.0; print('torch' in sys.modules)"
    )
    message = pickle.dumps(ORDER).hex()
    found = subprocess.run(
        [sys.executable, "-c", code, message], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"
