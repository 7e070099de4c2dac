import concurrent.futures
import dataclasses
import errno
import json
import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoplace import files, store
from autoplace import home as data_home
from autoplace.accelerators import Accelerator
from autoplace.errors import CalibrationError, RunError
from autoplace.machine import Machine, detect_machine
from autoplace.measurement import SCHEMA_VERSION, Calibration, Measurement, Task
from autoplace.workload import EnvSpec, NetworkSpec

MACHINE = Machine(
    usable_cpus=2,
    logical_cpus=2,
    physical_cores=2,
    cpu_quota=None,
    cpu_model="Some CPU",
    memory_bytes=2**33,
    platform="linux",
    arch="x86_64",
    accelerators=(
        Accelerator(device="cuda:0", name="Card", uuid="0a1b", memory_bytes=2**33, usable=True),
        Accelerator(
            device="cuda:1",
            name="Card",
            uuid="2c3d",
            memory_bytes=2**33,
            usable=False,
            reason="2c3d fell off the bus",
        ),
    ),
    versions=(("python", "3.11.7"), ("torch", "2.8.0")),
)


def env_steps(env_id: str, *times_s: float) -> Measurement:
    task = Task(op="env_step", env=EnvSpec.make(env_id), backend="sync", num_envs=8)
    return Measurement(task=task, times_s=times_s or (1e-4, 1.1e-4))


MEASUREMENTS = (
    Measurement(task=Task(op="matmul", shape=(16, 32, 64), threads=2), times_s=(1e-6, 1.5e-6)),
    Measurement(
        task=Task(
            op="update",
            network=NetworkSpec(observation_size=4, hidden_sizes=(64, 64), action_size=2),
            rows=256,
        ),
        times_s=(2e-3,),
        calls_per_sample=3,
    ),
    Measurement(
        task=Task(op="copy", device="cuda:0", direction="h2d", pinned=True, shape=(256,)),
        times_s=(1e-5,),
    ),
    env_steps("CartPole-v1"),
)
CALIBRATION = Calibration(
    machine=MACHINE,
    measurements=MEASUREMENTS,
    budget_s=60.0,
    spent_s=41.5,
    created="2026-01-02T03:04:05+00:00",
    warnings=("cuda:1 (2c3d) is not usable", "the clock drifted by 3 % — 时钟"),
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("AUTOPLACE_HOME", str(folder))
    return folder


# --------------------------------------------------------------------------------------------------
# The data folder


def not_a_folder(tmp_path: Path) -> Path:
    """A path that nobody, not even root, can make a folder at."""
    (tmp_path / "file").write_text("in the way")
    return tmp_path / "file" / "home"


def test_the_data_folder_is_the_one_that_was_asked_for(home):
    assert store.data_dir() == home
    assert home.is_dir()


def test_an_unwritable_data_folder_is_replaced_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("AUTOPLACE_HOME", str(not_a_folder(tmp_path)))
    monkeypatch.setattr(data_home.tempfile, "gettempdir", lambda: str(tmp_path))
    found = {store.data_dir() for _ in range(3)}
    assert len(found) == 1
    assert found.pop().parent == tmp_path
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "AUTOPLACE_HOME" in record.message
    assert "\n" not in record.message


@pytest.mark.skipif(sys.platform != "linux", reason="homes are elsewhere")
@pytest.mark.parametrize("value", ["nonexistent", None])
def test_a_user_without_a_home_gets_a_temporary_folder_and_imports_make_nothing(tmp_path, value):
    missing = tmp_path / "nonexistent"
    env = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    env["TMPDIR"] = str(tmp_path)
    if value is not None:
        env["HOME"] = str(missing)
    code = (
        "import os, pwd, pathlib; "
        "pwd.getpwuid = lambda uid: (_ for _ in ()).throw(KeyError(uid)); "
        f"from autoplace import store; print(sorted(os.listdir({str(tmp_path)!r}))); "
        "print(store.data_dir())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stderr
    before, folder = done.stdout.splitlines()
    assert before == "[]"
    assert Path(folder).parent == tmp_path
    assert not missing.exists()


def test_a_calibration_in_a_read_only_home_is_read_and_additions_go_elsewhere(
    home, tmp_path, monkeypatch
):
    store.save_calibration(CALIBRATION)
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setattr(data_home, "_is_writable", lambda folder: False)
    monkeypatch.setattr(data_home, "_fallback_dir", lambda wanted: elsewhere)
    assert store.stored_calibration(MACHINE)[0] == CALIBRATION
    store.merge_calibration(MACHINE, [env_steps("Acrobot-v1")])
    found, _ = store.stored_calibration(MACHINE)
    assert found is not None
    assert len(found.measurements) == len(MEASUREMENTS) + 1
    assert len(list((home / "calibrations").glob("*.json"))) == 1
    assert len(list((elsewhere / "calibrations").glob("*.json"))) == 1


# --------------------------------------------------------------------------------------------------
# Writing


def test_a_written_file_replaces_the_old_one_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "deep" / "file.bin"
    store.write_bytes_atomic(path, b"old")
    store.write_bytes_atomic(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file.bin"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), RunError),
        (OSError(errno.EIO, "Input/output error"), RunError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (ValueError("a bug of the caller"), ValueError),
    ],
)
def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path, error, raised):
    path = tmp_path / "file.bin"
    store.write_bytes_atomic(path, b"old")

    def write_half(file):
        file.write(b"ne")
        file.flush()
        raise error

    with pytest.raises(raised):
        store.write_bytes_atomic(path, write_half)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fills_up_at_the_last_moment_is_reported_with_path_and_room(
    tmp_path, monkeypatch, call
):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace")}[call], fail)
    path = tmp_path / "file.json"
    with pytest.raises(CalibrationError) as caught:
        store.write_json_atomic(path, {"a": 1}, fault=CalibrationError)
    message = str(caught.value)
    assert str(path) in message
    assert "No space left on device" in message
    assert "MB free" in message
    assert "\n" not in message
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    with pytest.raises(RunError, match=r"cannot write .*file/home"):
        store.write_json_atomic(not_a_folder(tmp_path) / "a.json", {})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_does_not_know_are_refused(tmp_path, value):
    path = tmp_path / "a.json"
    with pytest.raises(RunError, match="cannot write"):
        store.write_json_atomic(path, {"a": [{"b": value}]})
    assert not path.exists()


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": []},
        {"a": {}, "b": [{}], "c": [{"d": [1, 2]}, {"d": None}], "é": '实验 \\ " \n'},
        {"a": {"b": {"c": {"d": [1.5, -2, True]}}}, "e": [[1, 2], [3]]},
    ],
)
def test_json_comes_back_as_it_went(tmp_path, value):
    store.write_json_atomic(tmp_path / "a.json", value)
    assert store.read_json_object(tmp_path / "a.json", "file") == value


def test_json_is_written_for_reading_and_comparing():
    text = files.format_json({"a": 1, "m": {"x": [1, 2], "é": {}}, "rows": [{"t": 1}, {"t": 2}]})
    assert text == (
        '{\n "a": 1,\n "m": {\n  "x": [1, 2],\n  "é": {}\n },\n'
        ' "rows": [\n  {"t": 1},\n  {"t": 2}\n ]\n}\n'
    )


@pytest.mark.skipif(sys.platform == "win32", reason="paths are not bytes there")
def test_folders_with_any_name_work_in_a_locale_that_cannot_say_them(tmp_path):
    folder = tmp_path / "résultats" / "实验"
    code = (
        "import sys, pathlib; from autoplace import store; "
        "run = store.create_run_dir(pathlib.Path(sys.argv[1]), env_id='e', seed=0); "
        "store.write_json_atomic(run.config_path, {'run': str(run.path), '\\xe9': '\\u5b9e'}); "
        "store.create_run_dir(env_id='\\u5b9e', seed=0); "
        "run.save_checkpoint(b'weights'); "
        "assert store.read_json_object(run.config_path, 'config')['run'] == str(run.path)"
    )
    env = dict(os.environ, LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads((folder / "config.json").read_bytes())["é"] == "实"
    assert (folder / "checkpoint-latest.pt").read_bytes() == b"weights"


# --------------------------------------------------------------------------------------------------
# Calibrations


def test_a_saved_calibration_comes_back_equal(home):
    path = store.save_calibration(CALIBRATION)
    assert path == home / "calibrations" / f"{MACHINE.key}.json"
    assert store.read_calibration(path) == CALIBRATION
    assert store.load_calibration(path) == CALIBRATION
    assert store.stored_calibration(MACHINE) == (CALIBRATION, None)


def test_each_measurement_has_its_own_line(home):
    lines = store.save_calibration(CALIBRATION).read_text(encoding="utf-8").splitlines()
    assert sum('"task"' in line for line in lines) == len(MEASUREMENTS)


def test_a_calibration_saved_elsewhere_is_not_the_stored_one(tmp_path):
    path = store.save_calibration(CALIBRATION, tmp_path / "other.json")
    assert os.listdir(path.parent) == ["other.json"]
    assert store.stored_calibration(MACHINE)[0] is None


@pytest.mark.parametrize(
    "convert",
    [
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"),
        lambda data: json.dumps(json.loads(data)).encode("ascii"),
    ],
    ids=["BOM", "CRLF", "both", "one ASCII line"],
)
def test_what_editors_do_to_a_calibration_is_accepted(convert):
    path = store.save_calibration(CALIBRATION)
    path.write_bytes(convert(path.read_bytes()))
    assert store.read_calibration(path) == CALIBRATION


def edited(**changes: object) -> bytes:
    return json.dumps({**CALIBRATION.to_json(), **changes}).encode()


def with_task(**changes: object) -> bytes:
    row = MEASUREMENTS[0].to_json()
    return edited(measurements=[{**row, "task": {**row["task"], **changes}}])


def with_times(*times_s: object) -> bytes:
    return edited(measurements=[{**MEASUREMENTS[0].to_json(), "times_s": times_s}])


DAMAGED = {
    "empty": (b"", "is empty"),
    "only blanks": (b" \r\n", "is empty"),
    "cut at byte 50": (edited()[:50], "is not whole JSON"),
    "cut at the end": (edited()[:-1], "is not whole JSON"),
    "not UTF-8": (b'{"schema_version": 1, "origin": "\xe9"}', "is not UTF-8 text"),
    "UTF-16": (edited().decode().encode("utf-16"), "is not UTF-8 text"),
    "a pickle": (b"\x80\x04\x95\x10\x00", "is not UTF-8 text"),
    "a list": (b"[1, 2]", "holds a JSON list"),
    "a number": (b"7", "holds a JSON int"),
    "deep nesting": (b"[" * 100_000, "is not whole JSON"),
    "NaN": (with_times(float("nan")), "NaN is not a JSON number"),
    "no version": (b"{}", "has no schema_version"),
    "version 0": (edited(schema_version=0), "has no schema_version"),
    "a version that is no number": (edited(schema_version="1"), "has no schema_version"),
    "a newer version": (edited(schema_version=SCHEMA_VERSION + 1), "upgrade autoplace"),
    "nothing but a version": (b'{"schema_version": 1}', "'machine' is missing"),
    "a machine that is a list": (edited(machine=[]), "is not one"),
    "a machine without CPUs": (edited(machine={"cpu_model": "x"}), "is missing"),
    "a machine of text": (
        edited(machine={**MACHINE.to_json(), "usable_cpus": "two"}),
        "the usable_cpus 'two' is not a int",
    ),
    "an accelerator that is text": (
        edited(machine={**MACHINE.to_json(), "accelerators": ["Card"]}),
        "is not one",
    ),
    "measurements that are an object": (edited(measurements={"a": 1}), "is not one"),
    "an unknown op": (with_task(op="telepathy"), "is not one"),
    "an unknown field": (with_task(colour="red"), "colour"),
    "threads of text": (with_task(threads="two"), "the threads 'two' is not a int"),
    "threads that are true": (with_task(threads=True), "the threads True is not a int"),
    "a shape of text": (with_task(shape=["a"]), "the shape 'a' is not a int"),
    "no times": (with_times(), "is not one"),
    "a negative time": (with_times(-1.0), "is not one"),
    "times of text": (with_times("soon"), "is not one"),
}


@pytest.mark.parametrize(("data", "problem"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_calibration_is_refused_in_one_line_and_counts_as_none(data, problem):
    path = store.save_calibration(CALIBRATION)
    path.write_bytes(data)
    with pytest.raises(CalibrationError) as caught:
        store.read_calibration(path)
    message = str(caught.value)
    assert problem in message
    assert str(path) in message
    assert "autoplace calibrate" in message
    assert "\n" not in message
    assert len(message) < 300 + len(str(path))
    assert store.stored_calibration(MACHINE) == (None, message)
    # ... and is replaced by the next one.
    store.save_calibration(CALIBRATION)
    assert store.stored_calibration(MACHINE) == (CALIBRATION, None)


def test_times_are_checked_without_assertions_too(monkeypatch):
    bad = dataclasses.replace(CALIBRATION)
    object.__setattr__(bad.measurements[0], "times_s", (0.0,))
    try:
        assert "not positive" in store._time_problem(bad)
    finally:
        object.__setattr__(bad.measurements[0], "times_s", (1e-6, 1.5e-6))


def test_a_calibration_that_does_not_exist_or_is_a_folder_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match="does not exist"):
        store.read_calibration(tmp_path / "none.json")
    with pytest.raises(CalibrationError, match="cannot be read"):
        store.read_calibration(tmp_path)


VERSION_1 = """{
 "schema_version": 1, "origin": "measured", "created": "", "budget_s": 10, "spent_s": 9.5,
 "warnings": [],
 "machine": {"usable_cpus": 1, "logical_cpus": 2, "physical_cores": 1, "cpu_quota": 1.5,
  "cpu_model": "Some CPU", "memory_bytes": 1024, "platform": "linux", "arch": "x86_64",
  "accelerators": [{"device": "xpu:0", "name": "Card", "uuid": "0a", "memory_bytes": 1,
   "usable": true, "reason": ""}],
  "versions": {"torch": "2.8.0"}, "variables": {"OMP_NUM_THREADS": "1"}, "complete": true,
  "fingerprint": "0123", "host_fingerprint": "4567"},
 "measurements": [{"task": {"op": "gae", "shape": [128, 8]}, "times_s": [0.001],
  "calls_per_sample": 1}]
}"""


@pytest.mark.parametrize("text", [VERSION_1])
def test_a_file_of_every_schema_version_is_read(tmp_path, text):
    (tmp_path / "old.json").write_text(text, encoding="utf-8")
    found = store.read_calibration(tmp_path / "old.json")
    assert found.machine.cpu_quota == 1.5
    assert found.machine.variables == (("OMP_NUM_THREADS", "1"),)
    assert found.by_task[Task(op="gae", shape=(128, 8))].median_s == 0.001


def test_a_calibration_of_this_very_machine_is_loaded():
    here = dataclasses.replace(CALIBRATION, machine=detect_machine(accelerators=False))
    store.save_calibration(here)
    assert store.load_calibration() == here


def test_a_machine_without_a_calibration_is_told_to_calibrate():
    with pytest.raises(CalibrationError, match="no calibration yet: run autoplace calibrate"):
        store.load_calibration()


def test_a_calibration_from_before_a_change_names_the_change_and_the_next_step():
    store.save_calibration(CALIBRATION)
    now = dataclasses.replace(MACHINE, cpu_quota=1.0, usable_cpus=1)
    found, reason = store.stored_calibration(now)
    assert found is None
    assert reason is not None
    assert "usable CPUs: was 2, now 1; CPU quota: was none, now 1" in reason
    assert reason.endswith("run autoplace calibrate")


def test_a_machine_described_without_torch_accepts_what_only_torch_could_contradict():
    store.save_calibration(CALIBRATION)
    without_torch = dataclasses.replace(MACHINE, accelerators=(), complete=False)
    assert store.stored_calibration(without_torch)[0] == CALIBRATION
    assert store.stored_calibration(dataclasses.replace(MACHINE, accelerators=()))[0] is None


def test_a_redacted_calibration_holds_no_uuid():
    clean = store.redact(CALIBRATION)
    text = files.format_json(clean.to_json())
    assert "0a1b" not in text
    assert "2c3d" not in text
    assert [card.uuid for card in clean.machine.accelerators] == ["redacted-0", "redacted-1"]
    assert clean.machine.accelerators[1].reason == "redacted-1 fell off the bus"
    assert clean.measurements == CALIBRATION.measurements


# --------------------------------------------------------------------------------------------------
# Merging


def test_merged_measurements_are_added_and_replace_those_of_the_same_task():
    store.save_calibration(CALIBRATION)
    newer, more = env_steps("CartPole-v1", 3e-4), env_steps("Acrobot-v1", 5e-4)
    merged = store.merge_calibration(MACHINE, [newer, more])
    assert merged.measurements == (*MEASUREMENTS[:3], newer, more)
    assert store.stored_calibration(MACHINE) == (merged, None)
    assert merged.created == CALIBRATION.created


@pytest.mark.parametrize("damage", [None, b"", b"{"])
def test_merging_into_nothing_usable_begins_a_calibration(damage):
    if damage is not None:
        store.save_calibration(CALIBRATION).write_bytes(damage)
    merged = store.merge_calibration(MACHINE, [env_steps("CartPole-v1")])
    assert merged.measurements == (env_steps("CartPole-v1"),)
    assert store.stored_calibration(MACHINE) == (merged, None)


def test_merging_under_other_conditions_is_refused_and_changes_nothing():
    path = store.save_calibration(CALIBRATION)
    before = path.read_bytes()
    with pytest.raises(CalibrationError, match=r"CPU quota: was none, now 0\.5"):
        store.merge_calibration(
            dataclasses.replace(MACHINE, cpu_quota=0.5), [env_steps("CartPole-v1")]
        )
    assert path.read_bytes() == before


def test_merging_leaves_out_environments_whose_times_no_longer_hold():
    store.save_calibration(CALIBRATION)
    newer = dict(MACHINE.versions) | {"gymnasium": "9.0"}
    now = dataclasses.replace(MACHINE, versions=tuple(sorted(newer.items())))
    state = store.find_calibration(now)
    assert set(state.stale) == {"env CartPole-v1"}
    assert state.calibration == CALIBRATION
    merged = store.merge_calibration(now, [env_steps("Acrobot-v1")])
    assert merged.measurements == (*MEASUREMENTS[:3], env_steps("Acrobot-v1"))
    assert store.stored_calibration(now) == (merged, None)


def merge_many(home: str, name: str, count: int) -> None:
    os.environ["AUTOPLACE_HOME"] = home
    for index in range(count):
        store.merge_calibration(MACHINE, [env_steps(f"{name}-v{index}")])


def test_two_processes_that_merge_at_once_lose_nothing(home):
    store.save_calibration(CALIBRATION)
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=merge_many, args=(str(home), name, 30)) for name in "AB"]
    for process in others:
        process.start()
    for process in others:
        process.join(60)
    assert [process.exitcode for process in others] == [0, 0]
    found = store.read_calibration(store.calibration_path(MACHINE))
    expected = {env_steps(f"{name}-v{index}").task for name in "AB" for index in range(30)}
    assert set(found.by_task) == expected | set(CALIBRATION.by_task)
    names = {path.suffix for path in (home / "calibrations").iterdir()}
    assert names == {".json", ".lock"}


def test_two_that_calibrate_at_once_both_save_and_the_last_one_counts(home):
    # Symptom: two writers share one temporary name; the second finds no file, or half of one.
    both = [dataclasses.replace(CALIBRATION, spent_s=float(spent)) for spent in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(store.save_calibration, both * 20))
    assert len(set(paths)) == 1
    assert store.read_calibration(paths[0]) in both
    assert not list((home / "calibrations").glob("*.tmp"))


def test_a_calibration_that_stays_locked_is_reported_with_the_owner(monkeypatch):
    path = store.save_calibration(CALIBRATION)
    monkeypatch.setattr(store, "_LOCK_WAIT_S", 0.05)
    lock = files.FileLock(path.with_suffix(".lock"))
    assert lock.acquire()
    with pytest.raises(CalibrationError, match=f"process {os.getpid()} has kept"):
        store.merge_calibration(MACHINE, [])
    lock.release()
    store.merge_calibration(MACHINE, [])


@pytest.mark.skipif(sys.platform == "win32", reason="locks are always there")
@pytest.mark.parametrize(("owner", "taken"), [("", True), ("999999999", True), ("own", False)])
def test_without_locks_in_the_file_system_a_living_owner_is_respected(
    tmp_path, monkeypatch, owner, taken
):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "_lock", refuse)
    path = tmp_path / "lock"
    path.write_text(str(os.getpid()) if owner == "own" else owner)
    assert files.FileLock(path).acquire() is taken


# --------------------------------------------------------------------------------------------------
# Run folders


def test_a_new_run_gets_a_folder_named_after_what_it_trains(home):
    first = store.create_run_dir(env_id="ALE/Pong-v5", seed=3)
    second = store.create_run_dir(env_id="ALE/Pong-v5", seed=3)
    assert first.path.parent == home / "runs"
    assert first.path.name.startswith("ALE-Pong-v5-seed3-")
    assert first.path != second.path


@pytest.mark.parametrize("env_id", ["../../etc:make", "módulo:Env-v0", "///", "a" * 300])
def test_no_environment_id_leads_out_of_the_runs_folder(home, env_id):
    with store.create_run_dir(env_id=env_id, seed=0) as run:
        assert run.path.resolve().parent == (home / "runs").resolve()
        assert run.path.is_dir()


def test_two_trainings_into_one_folder_are_refused_until_the_first_ends(tmp_path):
    folder = tmp_path / "run"
    first = store.create_run_dir(folder, env_id="CartPole-v1", seed=0)
    with pytest.raises(RunError, match=f"process {os.getpid()} is training into"):
        store.create_run_dir(folder, env_id="CartPole-v1", seed=1)
    first.close()
    store.create_run_dir(folder, env_id="CartPole-v1", seed=1).close()


def test_the_folder_of_a_process_that_died_is_taken_over(tmp_path):
    code = (
        "import os, sys, pathlib; from autoplace import store; "
        "run = store.create_run_dir(pathlib.Path(sys.argv[1]), env_id='e', seed=0); "
        "run.save_checkpoint(b'weights'); (run.path / '.autoplace-1-a.tmp').touch(); "
        "print(os.getpid(), flush=True); sys.stdin.read(); os._exit(9)"
    )
    folder = tmp_path / "run"
    command = [sys.executable, "-c", code, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        pid = int(other.stdout.readline())
        with pytest.raises(RunError, match=f"process {pid} is training into"):
            store.resume_run_dir(folder)
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(30) == 9
    with store.resume_run_dir(folder) as run:
        assert not list(run.path.glob("*.tmp"))
        assert [path.read_bytes() for path in store.latest_checkpoint(folder)] == [b"weights"]


def test_an_earlier_run_is_never_overwritten(tmp_path):
    with store.create_run_dir(tmp_path, env_id="CartPole-v1", seed=0) as run:
        run.save_checkpoint(b"weights")
    with pytest.raises(RunError, match="--resume"):
        store.create_run_dir(tmp_path, env_id="CartPole-v1", seed=0)
    with store.resume_run_dir(tmp_path) as run:
        assert run.config_path == tmp_path / "config.json"
        assert run.plan_path == tmp_path / "plan.json"


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_a_checkpoint_cannot_be_resumed(tmp_path, exists):
    folder = tmp_path if exists else tmp_path / "none"
    with pytest.raises(RunError, match="no checkpoint to resume from"):
        store.resume_run_dir(folder)


def test_a_run_folder_that_cannot_be_made_is_reported(tmp_path):
    with pytest.raises(RunError, match="cannot write"):
        store.create_run_dir(not_a_folder(tmp_path), env_id="CartPole-v1", seed=0)


def test_a_plan_is_read_from_its_file_and_from_its_run(tmp_path):
    plan = {"scheme": "cpu", "stages": [{"name": "gae"}]}
    store.save_plan(tmp_path / "mine.json", plan)
    assert store.read_plan(tmp_path / "mine.json") == plan
    with store.create_run_dir(tmp_path / "run", env_id="CartPole-v1", seed=0) as run:
        store.save_plan(run.plan_path, plan)
        store.write_json_atomic(run.config_path, {"seed": 0})
    assert store.read_run_plan(run.path) == plan
    assert store.read_run_config(run.path) == {"seed": 0}


@pytest.mark.parametrize("read", [store.read_run_plan, store.read_run_config])
@pytest.mark.parametrize("data", [None, b"", b"{", b"[]", b"\xff"])
def test_a_run_folder_with_a_damaged_file_is_refused_in_one_line(tmp_path, read, data):
    for name in ("plan.json", "config.json"):
        if data is not None:
            (tmp_path / name).write_bytes(data)
    with pytest.raises(RunError) as caught:
        read(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert str(caught.value).endswith("name the folder of a run that autoplace train made")
    assert "\n" not in str(caught.value)


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in store.latest_checkpoint(folder)]


def test_the_checkpoint_before_the_latest_is_kept(tmp_path):
    with store.create_run_dir(tmp_path, env_id="CartPole-v1", seed=0) as run:
        assert contents(tmp_path) == []
        for content in (b"1", b"2", b"3"):
            run.save_checkpoint(content)
    assert contents(tmp_path) == [b"3", b"2"]
    assert (tmp_path / "checkpoint-latest.pt").read_bytes() == b"3"
    assert (tmp_path / "checkpoint-previous.pt").read_bytes() == b"2"


@pytest.mark.parametrize("step", range(4))
def test_a_save_that_is_cut_off_anywhere_leaves_a_whole_checkpoint(tmp_path, monkeypatch, step):
    run = store.create_run_dir(tmp_path, env_id="CartPole-v1", seed=0)
    run.save_checkpoint(b"1")
    run.save_checkpoint(b"2")
    real, calls = Path.replace, iter(range(9))

    def stop_at_step(source, target):
        if next(calls) == step:
            raise KeyboardInterrupt
        return real(source, target)

    def write(file):
        file.write(b"3")
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop_at_step)
    with pytest.raises(KeyboardInterrupt):
        run.save_checkpoint(write)
    monkeypatch.undo()
    found = contents(tmp_path)
    whole = {0: [b"2", b"1"], 1: [b"3", b"2", b"1"], 2: [b"3", b"2"], 3: [b"2", b"1"]}
    assert found == whole[step]
    run.save_checkpoint(b"4")
    assert contents(tmp_path)[0] == b"4"
    assert len(contents(tmp_path)) == 2


def test_an_empty_checkpoint_is_no_candidate(tmp_path):
    (tmp_path / "checkpoint-latest.pt").touch()
    (tmp_path / "checkpoint-previous.pt").write_bytes(b"1")
    assert contents(tmp_path) == [b"1"]


def test_the_store_needs_no_torch():
    code = "import sys; from autoplace import store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
