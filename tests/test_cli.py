"""The command line as a user meets it: texts, JSON keys, exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autoplace import store
from autoplace.cli import main
from autoplace.machine import Machine, detect_machine
from autoplace.measurement import Calibration
from autoplace.planner.plan import Candidate, Plan
from autoplace.race import Raced, RaceResult
from autoplace.sections import section_of
from autoplace.workload import EnvSpec
from tests.synthetic import Truth, env_measurements, make_calibration
from tests.train.plans import make_plan

ENV = EnvSpec.make("CartPole-v1")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of its own, with nothing in it."""
    monkeypatch.setenv("AUTOPLACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def calibrated(home: Path) -> Path:
    """A data folder that holds a calibration of this machine, of known costs."""
    machine = detect_machine()
    calibration = dataclasses.replace(
        make_calibration(Truth(), usable_cpus=machine.usable_cpus), machine=machine
    )
    for name, step_s in (("CartPole-v1", 2e-5), ("Pendulum-v1", 3e-5)):
        calibration = calibration.with_measurements(env_measurements(EnvSpec.make(name), step_s))
    store.save_calibration(calibration)
    return home


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_json(*arguments: str) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_help_and_a_stored_plan_import_neither_torch_nor_what_fits(calibrated: Path) -> None:
    run_json("plan", "CartPole-v1")  # keeps the fitted model
    code = (
        "import sys\n"
        "from autoplace.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'sklearn', 'scipy', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    for arguments in (["--help"], ["plan", "--help"], ["plan", "CartPole-v1", "--json"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_machine_shows_the_keys_that_users_rely_on(home: Path) -> None:
    data = run_json("machine")
    assert set(data) >= {
        "usable_cpus", "physical_cores", "cpu_quota", "cpu_model", "memory_bytes",
        "accelerators", "versions", "fingerprint", "calibration",
    }  # fmt: skip
    assert data["calibration"]["valid"] is False
    assert data["calibration"]["stale_sections"][0]["reason"]
    text = run("machine").stdout
    assert data["cpu_model"] in text
    assert "autoplace calibrate" in text


def test_machine_says_when_its_calibration_holds(calibrated: Path) -> None:
    data = run_json("machine")["calibration"]
    assert (data["valid"], data["stale_sections"]) == (True, [])
    assert Path(data["path"]).is_file()


def test_a_changed_machine_times_what_depends_on_it_again(
    calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoplace.measure import calibrate as measuring

    asked: list[set[str]] = []

    def timed(machine: Machine, sections: Collection[str], **options: object) -> Calibration:
        asked.append(set(sections))
        fresh = make_calibration(Truth(), usable_cpus=machine.usable_cpus)
        kept = [m for m in fresh.measurements if section_of(m.task) in sections]
        return dataclasses.replace(fresh, machine=machine, measurements=tuple(kept))

    monkeypatch.setattr(measuring, "calibrate", timed)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    stale = run_json("machine")["calibration"]["stale_sections"]
    assert {entry["section"] for entry in stale} == {"cpu", "memory"}
    assert "OMP_WAIT_POLICY" in stale[0]["reason"]
    result = run("plan", "CartPole-v1")
    assert "timing cpu, memory again" in result.stderr
    assert run_json("machine")["calibration"] | {"path": ""} == {
        "path": "", "valid": True, "stale_sections": []
    }  # fmt: skip
    assert "again" not in run("plan", "CartPole-v1").stderr
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "timing cpu, memory again" in run("calibrate").stderr
    assert "--force" in run("calibrate").stderr
    assert asked == [{"cpu", "memory"}] * 2


def test_plan_prints_the_same_facts_as_text_and_as_json(calibrated: Path) -> None:
    data = run_json("plan", "CartPole-v1")
    text = run("plan", "CartPole-v1").stdout
    assert f"scheme {data['scheme']}" in text
    assert f"Bottleneck: {data['bottleneck']}" in text
    for stage in data["stages"]:
        assert stage["name"] in text
    lanes: dict[str, float] = {}
    for stage in data["stages"]:
        lanes[stage["lane"]] = lanes.get(stage["lane"], 0.0) + stage["total_s"]
    assert all(total == pytest.approx(data["iteration_s"]) for total in lanes.values())


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "gbk"])
def test_a_terminal_that_lacks_characters_ends_no_command(
    calibrated: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    written, said = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(said, encoding=encoding))
    main(["plan", "CartPole-v1"], standalone_mode=False)
    logging.getLogger("autoplace").warning("résultats/实验")
    sys.stdout.flush()
    sys.stderr.flush()
    text = written.getvalue().decode(encoding, "replace")  # click writes UTF-8 for ASCII
    assert "Bottleneck:" in text and "What would change the choice" in text
    assert "sultats/" in said.getvalue().decode(encoding, "replace")


def test_a_plan_keeps_to_what_a_containers_memory_limit_leaves(
    calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Symptom: planned with the memory of the host, killed by the limit of the container.
    from autoplace.envs import memory_watch

    assert run("plan", "CartPole-v1").exit_code == 0
    monkeypatch.setattr(memory_watch, "memory_left_bytes", lambda: 100 * 2**20)
    refused = run("plan", "CartPole-v1")
    assert refused.exit_code == 2 and "no placement fits" in refused.stderr
    assert "GiB on cpu, of which 0.08 GiB may be used" in refused.stderr


def test_the_hyperparameters_of_flags_reach_the_workload(calibrated: Path) -> None:
    data = run_json(
        "plan", "CartPole-v1", "--hidden-sizes", "32,16", "--epochs", "3", "--num-envs", "4",
        "--rollout-steps", "64", "--gamma", "0.9", "--no-anneal-learning-rate",
        "--minibatch-rows", "64", "--learn-threads", "1",
    )  # fmt: skip
    hyper = data["workload"]["hyperparameters"]
    assert hyper["hidden_sizes"] == [32, 16]
    assert (hyper["epochs"], hyper["num_envs"], hyper["gamma"]) == (3, 4, 0.9)
    assert hyper["anneal_learning_rate"] is False
    assert data["placement"]["minibatch_rows"] == 64
    assert data["placement"]["learn_threads"] == 1


def test_a_preset_is_the_base_and_a_flag_is_put_on_top(calibrated: Path) -> None:
    preset = run_json("plan", "Pendulum-v1", "--preset", "auto")["workload"]["hyperparameters"]
    assert preset["gamma"] == 0.9
    changed = run_json("plan", "Pendulum-v1", "--preset", "auto", "--gamma", "0.95")
    assert changed["workload"]["hyperparameters"]["gamma"] == 0.95
    assert changed["workload"]["hyperparameters"]["epochs"] == preset["epochs"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["plan", "Nope-v1"], 1, "there is no environment 'Nope-v1'"),
        (["plan", "CartPole-v1", "--hidden-sizes", "64,x"], 2, "use for example 64,64"),
        (["plan", "CartPole-v1", "--hidden-sizes", ""], 2, "use for example 64,64"),
        (["plan", "CartPole-v1", "--minibatch-rows", "1"], 2, "at least 2 rows"),
        (["plan", "CartPole-v1", "--minibatch-rows", "many"], 2, "neither a whole number nor auto"),
        (["plan", "CartPole-v1", "--minibatch-rows", "9999"], 2, "at most the rollout"),
        (["plan", "CartPole-v1", "--num-envs", "0"], 2, "--num-envs must be a whole number"),
        (["plan", "CartPole-v1", "--gamma", "2"], 2, "--gamma must be between 0 and 1"),
        (["plan", "CartPole-v1", "--scheme", "magic"], 2, "--scheme is auto or one of"),
        (["plan", "CartPole-v1", "--scheme", "gpu"], 2, "needs an accelerator"),
        (["plan", "CartPole-v1", "--device", "tpu"], 2, "a device is cpu, cuda"),
        (["plan", "CartPole-v1", "--preset", "none"], 2, "--preset is auto or one of"),
        (["plan", "CartPole-v1", "--env-kwargs", "{x"], 2, "--env-kwargs is a JSON object"),
        (["plan", "CartPole-v1", "--env-kwargs", "[1]"], 2, "--env-kwargs is a JSON object"),
        (["plan", "CartPole-v1", "--env-kwargs", '{"a": 1}'], 1, "CartPole-v1 cannot be made"),
        (["plan", "CartPole-v1", "--calibration", "none.json"], 1, "none.json does not exist"),
        (["plan", "CartPole-v1", "--num-envs", "1", "--rollout-steps", "1"], 2, "at least 2 rows"),
        (["train", "CartPole-v1", "--resume"], 2, "--resume goes on with the run in a folder"),
        (["train", "CartPole-v1", "--run-dir", "none", "--resume"], 1, "configuration none"),
        (["train", "CartPole-v1", "--total-steps", "0"], 2, "--total-steps"),
        (["train", "CartPole-v1", "--run-dir", "/dev/null/x"], 1, "/dev/null"),
        (["evaluate", "nowhere"], 1, "nowhere holds no checkpoint"),
        (["calibrate", "--budget", "0"], 2, "--budget is at least 1 second"),
        (["calibrate", "--device", "tpu", "--quick"], 2, "a device is cpu, cuda"),
        (["compare", "CartPole-v1", "--schemes", "magic"], 2, "there is no such scheme"),
        (["compare", "CartPole-v1", "--schemes", "gpu"], 2, "no accelerator was calibrated"),
        (["compare", "CartPole-v1", "--seconds", "0"], 2, "--seconds"),
        (["nonsense"], 2, "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_gives_one_clear_line(
    calibrated: Path, arguments: list[str], exit_code: int, message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == exit_code, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "content", [b"", b'{"schema_version": 1, "mach', b"\xff\xfe\x00", b"[1, 2]"]
)
def test_a_damaged_calibration_file_is_named_in_one_line(
    home: Path, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    result = run("plan", "CartPole-v1", "--calibration", str(path))
    assert result.exit_code == 1
    assert f"calibration {path}" in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.strip()]) == 1


def test_training_writes_a_run_that_resumes_and_evaluates(calibrated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "CartPole-v1", "--run-dir", str(folder), "--seed", "3"]
    first = run(*arguments, "--total-steps", "3072")
    assert first.exit_code == 0, first.output
    assert "env steps/s measured" in first.stdout
    for name in ("policy_step", "env_step", "gae", "update"):
        assert name in first.stdout

    again = run(*arguments, "--total-steps", "3072")
    assert again.exit_code == 1
    assert "--resume" in again.stderr

    resumed = run("train", "CartPole-v1", "--run-dir", str(folder), "--resume",
                  "--total-steps", "5120", "--json")  # fmt: skip
    assert resumed.exit_code == 0, resumed.output
    events = [json.loads(line) for line in resumed.stdout.splitlines()]
    assert [event["event"] for event in events] == ["start", "iteration", "iteration", "end"]
    assert events[0]["env_steps"] == 3072
    assert (events[0]["seed"], events[-1]["seed"]) == (3, 3)
    end = events[-1]
    assert end["env_steps"] == 5120
    assert set(end) >= {"env_steps", "wall_s", "env_steps_per_s", "mean_return", "stage_s"}

    score = run_json("evaluate", str(folder), "--episodes", "3")
    assert set(score) >= {"mean_return", "std_return", "episodes", "deterministic", "env_steps"}
    assert (score["episodes"], score["env_steps"], score["deterministic"]) == (3, 5120, True)
    assert "3 stochastic episodes" in run("evaluate", str(folder), "--episodes", "3",
                                          "--stochastic").stdout  # fmt: skip


def test_a_plan_from_a_file_is_run_as_it_is(calibrated: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(run("plan", "CartPole-v1", "--minibatch-rows", "512", "--json").stdout)
    result = run("train", "CartPole-v1", "--plan", str(path), "--total-steps", "1024",
                 "--run-dir", str(tmp_path / "run"), "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[0])["placement"]["minibatch_rows"] == 512
    other = run("train", "Pendulum-v1", "--plan", str(path))
    assert (other.exit_code, "is for CartPole-v1" in other.stderr) == (2, True)
    path.write_text("{}")
    broken = run("train", "CartPole-v1", "--plan", str(path))
    assert (broken.exit_code, "is not a plan" in broken.stderr) == (2, True)


def test_a_dry_run_shows_the_plan_and_writes_nothing(calibrated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = run("train", "CartPole-v1", "--dry-run", "--run-dir", str(folder))
    assert result.exit_code == 0
    assert "Bottleneck:" in result.stdout
    assert f"It would train into {folder}" in result.stdout
    assert "97 iterations of 1,024 env steps: 99,328 env steps, seed 0" in result.stdout
    assert not folder.exists()
    forecast = run_json("train", "CartPole-v1", "--dry-run", "--total-steps", "5000")["dry_run"]
    assert (forecast["num_iterations"], forecast["env_steps"]) == (4, 4096)
    assert not (calibrated / "runs").exists()


def test_an_environment_without_a_step_time_is_timed_and_kept(calibrated: Path) -> None:
    first = run("plan", "MountainCar-v0")
    assert first.exit_code == 0, first.output
    assert "timing MountainCar-v0" in first.stderr
    second = run("plan", "MountainCar-v0")
    assert "timing" not in second.stderr
    assert second.stdout == first.stdout


@pytest.mark.parametrize("damage", [None, b'{"schema_version": 1, "mach'])
def test_without_a_calibration_that_can_be_read_a_quick_one_is_made_and_said_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    # Symptom: one truncated file in the cache ends every later run.
    from autoplace.measure import calibrate

    if damage is not None:
        path = store.calibration_path(detect_machine())
        path.parent.mkdir(parents=True)
        path.write_bytes(damage)

    def quick(**kwargs: object) -> object:
        assert kwargs["quick"] is True
        return dataclasses.replace(make_calibration(Truth()), machine=detect_machine())

    monkeypatch.setattr(calibrate, "calibrate", quick)
    result = run("plan", "CartPole-v1")
    assert result.exit_code == 0, result.output
    assert "making a quick one now" in result.stderr
    assert damage is None or f"calibration {path}" in result.stderr
    assert run_json("machine")["calibration"]["valid"] is True


def test_a_short_calibration_of_this_machine_can_be_planned_with(
    home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "here.json"
    data = run_json("calibrate", "--quick", "--budget", "4", "--env", "CartPole-v1",
                    "--output", str(path))  # fmt: skip
    assert set(data) == {
        "machine", "fingerprint", "spent_s", "crossovers", "op_error", "warnings"
    }  # fmt: skip
    for crossover in data["crossovers"]:
        assert set(crossover) >= {
            "family", "dtype", "residency", "threads", "size", "low", "high", "slower_below",
            "faster_above",
        }  # fmt: skip
    plan = run_json("plan", "CartPole-v1", "--calibration", str(path))
    assert plan["fingerprint"] == data["fingerprint"]


def test_options_of_spaces_networks_and_updates_reach_the_workload(calibrated: Path) -> None:
    data = run_json(
        "plan", "CartPole-v1", "--value-clip", "0.2", "--target-kl", "0.03", "--clip-rewards"
    )  # fmt: skip
    hyper = data["workload"]["hyperparameters"]
    assert (hyper["value_clip"], hyper["target_kl"], hyper["clip_rewards"]) == (0.2, 0.03, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--value-clip", "0"), "--value-clip must be above 0, got 0"),
        (("--target-kl", "-1"), "--target-kl must be above 0, got -1"),
        (("--network", "nothing.py:make"), "there is no file nothing.py"),
        (("--images", "nhwc"), "--images"),
    ],
)
def test_options_that_cannot_work_end_with_code_2(
    calibrated: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run("plan", "CartPole-v1", *arguments)
    assert result.exit_code == 2 and message in result.output


def test_help_names_what_spaces_and_networks_may_be_told() -> None:
    text = run("train", "--help").output
    for flag in ("--images", "--no-wrappers", "--network FILE.py:FUNCTION", "--value-clip"):
        assert flag in text
    for flag in ("--target-kl", "--clip-rewards", "--no-anneal-learning-rate"):
        assert flag in text


def test_a_game_on_images_is_planned_from_its_own_network_which_is_timed_once(
    calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.envs.catch import Catch
    from tests.envs.toys import register

    monkeypatch.setattr("autoplace.measure.own_network._TIME_LIMIT_S", 0.01)
    env = register("CatchPlanned", Catch)
    small = ("--num-envs", "2", "--rollout-steps", "16", "--minibatch-rows", "16")
    first = run("plan", env, *small, "--json")
    assert "timing the trainer's steps with the network of" in first.stderr
    stages = {s["name"]: s["source"] for s in json.loads(first.stdout)["stages"]}
    assert stages["policy_step"] == stages["update"] == stages["gae"] == "measured"
    again = run("plan", env, *small, "--json")
    assert "timing" not in again.stderr
    seconds = json.loads(first.stdout)["iteration_s"]
    assert json.loads(again.stdout)["iteration_s"] == pytest.approx(seconds, rel=1e-6)


def test_a_comparison_shows_predicted_and_measured_of_every_candidate(calibrated: Path) -> None:
    small = ("--num-envs", "2", "--rollout-steps", "16", "--max-policy-lag", "0")
    arguments = ("compare", "CartPole-v1", *small, "--seconds", "0.1")
    data = run_json(*arguments)
    assert set(data) >= {"candidates", "chosen", "best", "regret_fraction", "noise_fraction"}
    names = [candidate["name"] for candidate in data["candidates"]]
    assert names[0] == data["chosen"] == "cpu"
    assert data["best"] in names
    for candidate in data["candidates"]:
        assert candidate["scheme"] == "cpu"
        assert candidate["predicted_env_steps_per_s"] > 0
        assert candidate["measured_env_steps_per_s"] > 0
        stages = {stage["name"]: stage for stage in candidate["stages"]}
        assert set(stages) >= {"policy_step", "env_step", "gae", "update"}
        assert stages["update"]["predicted_s"] > 0 and stages["update"]["measured_s"] > 0
    text = run(*arguments).stdout
    assert "regret" in text and "halves of the same candidate differ by" in text


def test_a_run_of_another_machine_is_planned_again_and_learns_the_same(
    calibrated: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    begun = run("train", "CartPole-v1", "--run-dir", folder, "--total-steps", "2048",
                "--epochs", "2", "--json")  # fmt: skip
    placement = json.loads(begun.stdout.splitlines()[0])["placement"]
    plan_file = tmp_path / "run" / "plan.json"
    saved = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps({**saved, "fingerprint": "of another machine"}))
    again = run("train", "CartPole-v1", "--run-dir", folder, "--resume", "--dry-run", "--json",
                "--total-steps", "4096", "--scheme", "cpu")  # fmt: skip
    assert again.exit_code == 0, again.output
    plan = json.loads(again.stdout)
    assert plan["scheme"] == "cpu" and plan["fingerprint"] != "of another machine"
    assert plan["placement"]["minibatch_rows"] == placement["minibatch_rows"]
    assert plan["workload"]["hyperparameters"]["epochs"] == 2
    assert (plan["dry_run"]["first_iteration"], plan["dry_run"]["num_iterations"]) == (2, 4)
    assert plan["dry_run"]["env_steps"] == 2048
    resumed = run("train", "CartPole-v1", "--run-dir", folder, "--resume",
                  "--total-steps", "4096", "--json")  # fmt: skip
    assert "planning again: this is not the machine that the run was planned for" in resumed.stderr
    assert json.loads(resumed.stdout.splitlines()[-1])["env_steps"] == 4096
    same = run("train", "CartPole-v1", "--run-dir", folder, "--resume", "--total-steps", "4096")
    assert "planning again" not in same.stderr


def test_a_tie_is_raced_once_and_the_result_kept(
    calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    races = []

    def pretend(plan: Plan, entrants: list[tuple[str, Candidate]], **options: object) -> RaceResult:
        races.append([candidate for _, candidate in entrants])
        speeds = [1.0, 0.5]  # the runner-up is twice as fast
        return RaceResult(
            entrants=tuple(
                Raced(candidate=candidate, name=name, rows=1000, turns_s=(seconds,) * 4)
                for (name, candidate), seconds in zip(entrants, speeds, strict=True)
            )
        )

    monkeypatch.setattr("autoplace.race.race", pretend)
    alone = ("CartPole-v1", "--scheme", "cpu", "--minibatch-rows", "256")

    # A race takes seconds: a run of 1,024 steps is not worth one, nor is a plan that is only shown.
    before = run_json("plan", *alone)
    assert before["is_close"] and before["raced"] == ""
    short = run("train", *alone, "--total-steps", "1024", "--run-dir", str(tmp_path / "short"))
    dry = run("train", *alone, "--total-steps", "1000000000", "--dry-run")
    assert (short.exit_code, dry.exit_code, races) == (0, 0, [])

    after = run_json("plan", *alone, "--race")
    assert len(races) == 1
    assert after["placement"] == before["runner_up"]["placement"] != before["placement"]
    assert after["raced"] in after["reasons"]
    assert run_json("plan", *alone)["placement"] == after["placement"]
    start = json.loads(run("train", *alone, "--total-steps", "1024", "--json", "--run-dir",
                           str(tmp_path / "raced")).stdout.splitlines()[0])  # fmt: skip
    assert start["placement"] == after["placement"]
    trusting = run_json("train", *alone, "--no-race", "--dry-run")
    assert trusting["placement"] == before["placement"]
    assert len(races) == 1

    # Another workload, and a run that is long against a race.
    monkeypatch.setattr("autoplace.close_calls.pays", lambda plan, steps: steps == 2048)
    other = ("CartPole-v1", "--scheme", "cpu", "--minibatch-rows", "128", "--total-steps", "2048")
    trained = run("train", *other, "--run-dir", str(tmp_path / "long"))
    assert trained.exit_code == 0, trained.output
    assert len(races) == 2
    assert "the prediction is a tie: racing cpu (sampling on 1" in trained.stderr
    assert "It was raced because the prediction is a tie" in trained.stdout


def test_a_race_needs_this_machine_and_a_tie(calibrated: Path) -> None:
    stored = next((calibrated / "calibrations").glob("*.json"))
    other = run("plan", "CartPole-v1", "--race", "--calibration", str(stored))
    assert (other.exit_code, "--race runs on this machine" in other.stderr) == (2, True)
    clear = run("plan", "CartPole-v1", "--race", "--minibatch-rows", "256")
    assert clear.exit_code == 0
    assert "not raced: the choice is clear" in clear.stderr


def test_what_is_off_its_prediction_is_told_and_planned_again_for(
    calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoplace.train import self_check

    monkeypatch.setattr(self_check, "FIRST_WINDOW_S", 0.0)
    # The calibration was made up, so this machine is not as it says.
    result = run("train", "CartPole-v1", "--run-dir", str(tmp_path / "run"), "--replan", "--json",
                 "--num-envs", "2", "--rollout-steps", "16", "--total-steps", "640")  # fmt: skip
    assert result.exit_code == 0, result.output
    events = [json.loads(line) for line in result.stdout.splitlines()]
    checks = [event for event in events if event["event"] == "check"]
    assert checks and checks[0]["deviations"]
    assert set(checks[0]["deviations"][0]) >= {
        "name", "lane", "predicted_s", "measured_s", "ratio", "kind", "cause"
    }  # fmt: skip
    assert "self-check: " in result.stderr
    assert events[-1]["env_steps"] == 640
    switches = [event for event in events if event["event"] == "switch"]
    assert events[-1]["switches"] == len(switches)
    (calibrated / "calibrations").rename(calibrated / "gone")
    refused = run("train", "CartPole-v1", "--run-dir", str(tmp_path / "other"), "--replan",
                  "--plan", str(tmp_path / "run" / "plan.json"))  # fmt: skip
    assert refused.exit_code == 2 and "--replan plans with the calibration" in refused.stderr


def test_actions_that_no_policy_can_take_are_refused_before_anything_is_timed(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "arm.py").write_text(
        "import gymnasium as gym\n"
        "class Arm(gym.Env):\n"
        "    observation_space = gym.spaces.Box(-1, 1, (1,))\n"
        "    action_space = gym.spaces.Tuple((gym.spaces.Discrete(2), observation_space))\n"
        "def make_env():\n"
        "    return Arm()\n",
        encoding="utf-8",
    )
    result = run("train", f"{tmp_path / 'arm.py'}:make_env")
    assert result.exit_code == 1 and "acts in Tuple" in result.stderr
    assert "quick" not in result.stderr and not home.exists()  # no calibration was begun


ENV_FILE = """
import gymnasium as gym
import numpy as np

class Car(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 20:
            self.turn()
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def turn(self):
        raise ValueError("no wheels")

def make_env():
    return Car()
"""


@pytest.mark.parametrize("backend", ["sync", "process"])
def test_an_error_of_the_users_environment_is_one_line_and_its_traceback(
    tmp_path: Path, backend: str
) -> None:
    (tmp_path / "car.py").write_text(ENV_FILE, encoding="utf-8")
    env = f"{tmp_path / 'car.py'}:make_env"
    plan = make_plan(env)
    placement = dataclasses.replace(plan.placement, env_backend=backend, num_workers=2)
    chosen = dataclasses.replace(plan.chosen, placement=placement, iteration_s=2.0)
    plan = dataclasses.replace(plan, chosen=chosen, candidates=(chosen,))
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan.to_json()), encoding="utf-8")
    result = run("train", env, "--plan", str(file), "--run-dir", str(tmp_path / "run"))
    assert result.exit_code == 1
    message, _, evidence = result.stderr.partition("\n\n")
    assert message.splitlines()[-1] == (
        f"Error: ValueError from {env}, environment 0, vector step 20: no wheels"
    )
    lines = evidence.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "car.py" in lines[1] and lines[1].endswith("in step")
    assert lines[-1] == "ValueError: no wheels"
    assert "autoplace" not in lines[1].replace(str(tmp_path), "")


def test_supervision_can_be_told_of() -> None:
    text = run("train", "--help").stdout
    assert "--restart-workers" in text and "--worker-deadline SECONDS" in text
    result = run("train", "CartPole-v1", "--worker-deadline", "0")
    assert result.exit_code == 2 and "0.0 is not in the range x>0" in result.stderr


def test_pictures_are_written_where_they_are_asked_for(calibrated: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for command in (["plan", "CartPole-v1"], ["machine"], ["calibrate"]):
        path = tmp_path / f"{command[0]}.svg"
        result = run(*command, "--plot", str(path))
        assert result.exit_code == 0, result.output
        assert path.read_text().startswith("<?xml")
        assert f"drawn to {path}" in result.stderr
    refused = run("plan", "CartPole-v1", "--plot", str(tmp_path / "picture.docx"))
    assert (refused.exit_code, "end the name in .png" in refused.stderr) == (2, True)


def test_a_machine_that_was_not_measured_cannot_be_drawn(home: Path, tmp_path: Path) -> None:
    result = run("machine", "--plot", str(tmp_path / "machine.png"))
    assert result.exit_code == 1
    assert "no calibration yet: run autoplace calibrate" in result.stderr
