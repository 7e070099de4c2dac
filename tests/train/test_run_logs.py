"""What a run folder holds to look at: TensorBoard events and the episodes' CSV."""

import csv
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from autoplace.results import stage_seconds
from autoplace.train import StopRequested, episode_log, train
from autoplace.train.tensorboard import SCALARS
from tests.envs.toys import Counter, register
from tests.train.plans import Listener, make_plan

ROOT = Path(__file__).parents[2]


class StopAt(Listener):
    def __init__(self, iteration):
        super().__init__()
        self.iteration = iteration

    def on_iteration(self, report):
        super().on_iteration(report)
        if report.iteration == self.iteration:
            raise StopRequested


def events(folder):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: {event.step: event.value for event in accumulator.Scalars(tag)}
        for tag in accumulator.Tags()["scalars"]
    }


def documented(text):
    """Names in the first column of the tables of a page: | `name` | meaning |."""
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def family(tag):
    group, _, name = tag.partition("/")
    return f"{group}/<stage>" if group in ("time", "predicted") and name != "iteration" else tag


@pytest.mark.parametrize("scheme", ["cpu", "double-buffer"])
def test_every_scalar_is_documented_and_every_documented_one_is_written(tmp_path, scheme):
    plan = make_plan(scheme=scheme)
    listener = Listener()
    result = train(plan, total_steps=160, run_dir=tmp_path, callbacks=[listener])
    lag = 0.8 if scheme == "double-buffer" else 0.0  # 1 but for the first of five rollouts
    assert (result.policy_lag, result.max_policy_lag) == (pytest.approx(lag), round(lag))
    written = events(tmp_path)
    assert {family(tag) for tag in written} == set(SCALARS)
    page = (ROOT / "docs" / "run_folder.md").read_text(encoding="utf-8")
    assert {name for name in documented(page) if "/" in name} == set(SCALARS)
    for tag, meaning in SCALARS.items():
        assert f"| `{tag}` | {meaning} |" in page

    report = listener.reports[2]
    assert set(written["time/iteration"]) == {32, 64, 96, 128, 160}
    for name, seconds in stage_seconds(report.stage_s).items():
        assert written[f"time/{name}"][96] == pytest.approx(seconds)
    assert written["predicted/update"][96] == 1.0  # of the plan made by hand
    assert written["policy_lag/max"] == {
        step: (scheme == "double-buffer" and step > 32) for step in (32, 64, 96, 128, 160)
    }


def test_the_three_throughputs_are_those_of_env_sampling_and_everything(tmp_path):
    listener = Listener()
    train(make_plan(), total_steps=64, run_dir=tmp_path, callbacks=[listener])
    report = listener.reports[1]
    env_s, policy_s = (report.stage_s[name, "sampler"] for name in ("env_step", "policy_step"))
    written = events(tmp_path)
    assert written["speed/env_only"][64] == pytest.approx(32 / env_s, rel=1e-5)
    assert written["speed/sampling"][64] == pytest.approx(32 / (env_s + policy_s), rel=1e-5)
    assert written["speed/all"][64] == pytest.approx(32 / report.iteration_s, rel=1e-5)


def read(folder):
    with (folder / "episodes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_csv_has_a_row_for_every_episode(tmp_path):
    env = register("FourLogged", lambda: Counter(length=4))
    listener = Listener()
    train(make_plan(env), total_steps=64, run_dir=tmp_path, callbacks=[listener])
    rows = read(tmp_path)
    assert tuple(rows[0]) == episode_log.COLUMNS
    page = (ROOT / "docs" / "run_folder.md").read_text(encoding="utf-8")
    assert set(episode_log.COLUMNS) <= documented(page)
    # Both environments end an episode, worth 1 + 2 + 3 + 4, in every fourth vector step.
    assert [(r["env_steps"], r["env"]) for r in rows[:4]] == [
        ("8", "0"), ("8", "1"), ("16", "0"), ("16", "1")
    ]  # fmt: skip
    assert {(r["return"], r["length"]) for r in rows} == {("10", "4")}
    assert len(rows) == 16 and rows[-1]["env_steps"] == "64"
    walls = [float(r["wall_s"]) for r in rows]
    assert walls == sorted(walls)
    assert walls[-1] == pytest.approx(listener.reports[-1].run_wall_s, abs=1e-3)


@pytest.mark.parametrize("scheme", ["cpu", "double-buffer"])
def test_what_a_checkpoint_has_not_seen_is_taken_out_by_a_resume(tmp_path, scheme):
    env = register("FourResumed", lambda: Counter(length=4))
    plan = make_plan(env, scheme=scheme)
    train(plan, total_steps=160, run_dir=tmp_path, callbacks=[StopAt(2)])
    assert [row["env_steps"] for row in read(tmp_path)][-1] == "64"
    path = tmp_path / "episodes.csv"
    # As if the run had gone on and been killed while it wrote.
    path.write_bytes(path.read_bytes() + b"72,1.0,0,10,4\n72,1.0,1")
    train(plan, total_steps=160, run_dir=tmp_path, resume=True)
    steps = [int(row["env_steps"]) for row in read(tmp_path)]
    assert steps == [step for step in range(8, 161, 8) for _ in range(2)]


def test_events_beyond_the_checkpoint_are_hidden_after_a_resume(tmp_path):
    plan = make_plan()
    stop = StopAt(4)
    train(plan, total_steps=320, run_dir=tmp_path, checkpoint_every=64, callbacks=[stop])
    # As if the run had been killed after 128 steps, with its last checkpoint from 64.
    (tmp_path / "checkpoint-64.pt").replace(tmp_path / "checkpoint-latest.pt")
    train(plan, total_steps=320, run_dir=tmp_path, resume=True, callbacks=[StopAt(5)])
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    steps = [event.step for event in accumulator.Scalars("time/iteration")]
    assert steps == [32, 64, 96, 128, 160]
