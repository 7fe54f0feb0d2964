"""The page of a run: while it goes on, when it has ended, when it was resumed, and when nothing can be written."""

import fcntl
import io
import json
import logging
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.pages import Reader
from thinwire import cli
from thinwire.drift import DriftCheck
from thinwire.exchange.traffic import Traffic
from thinwire.training.clock import Clock
from thinwire.training.config import TrainConfig
from thinwire.training.config_file import as_toml
from thinwire.training.errors import TrainingError
from thinwire.training.evaluation import Score
from thinwire.training.history import History, Sampled, Thinned
from thinwire.training.journal import News
from thinwire.training.logs import read_rows
from thinwire.training.recipes import build
from thinwire.training.reporter import Reporter
from thinwire.training.run_page import rebuild, write_page

STEPS = 40
_RECIPE = build("quickstart", "demo")
CONFIG = replace(
    _RECIPE, schedule=replace(_RECIPE.schedule, steps=STEPS), run=replace(_RECIPE.run, tensorboard=False, out="<out>")
)


class FakeRun:
    """A reporter, and what a loop would tell it."""

    def __init__(self, folder: Path, first_step: int = 0, is_first: bool = True, config: TrainConfig = CONFIG) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(as_toml(config))
        self.method: Any = SimpleNamespace(traffic=Traffic(), drift=DriftCheck(10, "raise"))
        self.clock, self.folder, self.step = Clock(), folder, first_step
        self.reporter = Reporter(config, folder, first_step, is_first, True, Console(file=io.StringIO()))

    def train(self, num_steps: int, replicas: int = 2) -> None:
        for _ in range(num_steps):
            self.step += 1
            self.method.traffic.start_step()
            self.method.traffic.add(1000, replicas)
            self.method.drift.num_checks += self.step % 10 == 0
            news = News(self.step, [5 / self.step], False, replicas)
            self.reporter.news(news, self.method, self.clock, 128, "tokens")
            if self.step % 10 == 0:
                self.reporter.evaluation(self.step, Score(6 / self.step))

    def end(self, error: BaseException | None = None) -> str:
        self.reporter.leave(type(error) if error else None, error, None)
        return self.page

    @property
    def page(self) -> str:
        return (self.folder / "index.html").read_text()


def points(page: str, title: str, series: str) -> list[list[Any]]:
    """What the script knows of a line."""
    (figure,) = re.findall(rf"<figcaption>{title}</figcaption>.*?</figure>", page)
    (text,) = re.findall(r'<script type="application/json">(.*?)</script>', figure)
    return next(one["points"] for one in json.loads(text)["series"] if one["name"] == series)


def state_of(page: str) -> str:
    read = Reader(page)
    assert not read.fetched
    (state,) = [one["class"].split()[1] for one in read.all("span", kind="state") if one["class"]]
    return state


def test_a_finished_run(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.reporter.say("a model <b>")
    run.train(STEPS)
    page = run.end()
    read = Reader(page)
    assert state_of(page) == "finished"
    assert read.all("body")[0]["data-refresh"] == "0"
    assert [point[2] for point in points(page, "Loss against steps", "validation")] == ["10", "20", "30", "40"]
    assert [float(point[3]) for point in points(page, "Loss against steps", "training")[:2]] == [5.0, 2.5]
    assert {point[3] for point in points(page, "Bytes per step, of one replica", "sent")} == {"1"}
    assert points(page, "Bytes in all, of one replica", "received")[-1][3] == "40"
    assert "2 replicas took part in every step." in read.within("p")
    assert any("every 100 steps: 4 checks, they held the same each time" in text for text in read.within("p"))
    assert "step 0: a model <b>" in read.within("li")
    assert "<out>" in read.within("dd")


def test_before_the_first_step_nothing_is_said_of_replicas(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.reporter.say("hello")
    assert "There is one replica" not in run.page
    run.train(1, replicas=1)
    run.reporter._page.write()
    assert "There is one replica" in run.page


def test_ranks_of_a_mesh_are_no_replicas(tmp_path: Path) -> None:
    config = replace(CONFIG, launch=replace(CONFIG.launch, mesh="replicate=2,shard=2"))
    run = FakeRun(tmp_path / "run", config=config)
    run.train(STEPS, replicas=4)
    page = run.end()
    assert "4 ranks took part in every step." in Reader(page).within("p")
    assert points(page, "Bytes per step, of one rank", "sent")


def test_the_lowest_loss_is_that_of_all_evaluations(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    for step in range(1, 1001):
        run.reporter.evaluation(step, Score(0.5 if step == 502 else 1.0 + step / 1e6))
    assert "0.5000" in Reader(run.end()).within("dd")


def test_a_state_that_nobody_knows_is_not_shown(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(3)
    run.end()
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text() + json.dumps({"kind": "end", "step": 3, "state": '"><form action=x>', "text": ""}) + "\n")
    rebuild(tmp_path / "run", CONFIG)
    assert state_of(run.page) == "ended"
    assert "<form" not in run.page


def test_what_a_run_before_it_was_resumed_came_to_is_not_shown(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(3)
    (tmp_path / "run" / "sample.txt").write_text("once upon a time")
    run.reporter._page.write()
    assert "once upon" not in run.page
    run.train(STEPS - 3)
    assert "once upon" in run.end()


def test_a_run_that_goes_on_loads_its_page_anew(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(20)
    run.reporter._page.write()
    page = run.page
    assert state_of(page) == "running"
    read = Reader(page)
    assert read.all("body")[0]["data-refresh"] == "5"
    assert read.all("meta", **{"http-equiv": "refresh"})
    assert read.all("progress")[0]["value"] == "20"
    assert "left" in read.within("dt")


def test_pages_are_written_now_and_then_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [1000.0], list[float]()
    monkeypatch.setattr("thinwire.training.run_page.time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(*arguments: object) -> None:
        written.append(now[0])
        now[0] += 0.1

    monkeypatch.setattr("thinwire.training.run_page.write_page", slow)
    run = FakeRun(tmp_path / "run")
    for _ in range(300):
        run.train(1)
        now[0] += 1.0
    assert len(written) > 5
    # At most a two-hundredth of the time, however slow the disk is.
    assert all(later - earlier >= 20.0 for earlier, later in pairwise(written))


def test_a_failed_and_a_stopped_run_say_so(tmp_path: Path) -> None:
    failed = FakeRun(tmp_path / "failed")
    failed.train(5)
    page = failed.end(TrainingError("replica 1 is <gone>\nand more"))
    assert state_of(page) == "failed"
    assert any("replica 1 is <gone>" in text for text in Reader(page).within("p"))
    stopped = FakeRun(tmp_path / "stopped")
    stopped.train(5)
    assert state_of(stopped.end()) == "stopped"
    ended = FakeRun(tmp_path / "ended")
    ended.train(5)
    assert "ended at once by KeyboardInterrupt" in ended.end(KeyboardInterrupt())


def test_a_resumed_run_goes_on_with_the_whole_history(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(25)
    run.end()
    again = FakeRun(tmp_path / "run", first_step=20)
    again.train(STEPS - 20)
    page = again.end()
    assert state_of(page) == "finished"
    steps = [int(point[2]) for point in points(page, "Loss against steps", "training")]
    assert steps == list(range(1, STEPS + 1))
    # 20 steps before and 20 after, and none of those that were taken twice.
    assert points(page, "Bytes in all, of one replica", "sent")[-1][3] == "40"
    times = [point[0] for point in points(page, "Loss against seconds", "training")]
    assert times == sorted(times)


def test_a_stop_stays_in_the_story_of_a_resumed_run(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(20)
    run.end()
    again = FakeRun(tmp_path / "run", first_step=20)
    again.reporter.say("going on after step 20")
    again.train(1)
    notes = Reader(again.end()).within("li")
    assert notes.index("step 20: stopped") < notes.index("step 20: going on after step 20")


def test_a_step_that_was_left_out_is_told_and_not_drawn(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(3)
    run.reporter.news(News(4, [math.nan, 1.0], False, 1), run.method, run.clock, 128, "tokens")
    rows = read_rows(tmp_path / "run" / "log.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2, 3, 5]
    assert [row["text"] for row in rows if row["kind"] == "note"][-1] == "step 4 was left out: its loss is nan"
    rebuild(tmp_path / "run", CONFIG)


def test_replicas_that_come_and_go_are_drawn(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(5, replicas=3)
    run.train(5, replicas=2)
    assert [point[3] for point in points(run.end(), "Replicas that took part", "replicas")] == ["3"] * 5 + ["2"] * 5


def test_a_reporter_that_takes_over_does_not_count_twice(tmp_path: Path) -> None:
    first = FakeRun(tmp_path / "run")
    first.train(10)
    first.reporter.appoint(False, 10)
    second = FakeRun(tmp_path / "run", is_first=False)
    second.train(10)
    second.reporter.appoint(True, 10)
    second.train(5)
    assert points(second.end(), "Bytes in all, of one replica", "sent")[-1][3] == "14"  # those of the first news are lost


def test_only_the_first_replica_writes(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", is_first=False)
    run.train(3)
    run.reporter.leave(None, None, None)
    assert not (tmp_path / "run" / "index.html").exists()


def test_a_page_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run" / "index.html").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "thinwire"):
        run = FakeRun(tmp_path / "run")
        run.train(3)
        run.reporter._page.write()
        run.reporter.leave(None, None, None)
    assert [record.message for record in caplog.records if "is not up to date" in record.message] == [
        caplog.records[0].message
    ]
    assert len([line for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines() if '"step"' in line]) > 3


def test_a_page_is_the_same_when_it_is_built_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(STEPS)
    before = run.end()
    assert cli.run(["page", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "index.html")
    when = re.compile(r"<time.*?</time>")
    assert when.sub("", run.page) == when.sub("", before)


def test_a_killed_run_is_told_from_one_that_goes_on(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(3)
    with (tmp_path / "run" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rebuild(tmp_path / "run", CONFIG)
        assert state_of(run.page) == "running"
    rebuild(tmp_path / "run", CONFIG)
    assert state_of(run.page) == "ended"
    with pytest.raises(TrainingError, match="there is no run to show"):
        rebuild(tmp_path, CONFIG)


def test_a_log_of_before_there_were_pages_can_be_shown(tmp_path: Path) -> None:
    rows = [{"kind": "step", "step": 1, "loss": 5.0}, {"kind": "evaluation", "step": 1, "loss": 4.0, "accuracy": None}]
    rows += [{"kind": "speed", "step": 1, "units_per_second": 2.0, "wait_share": 0.5}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = rebuild(tmp_path, CONFIG).read_text()
    assert state_of(page) == "ended"
    assert points(page, "Loss against steps", "validation")[0][3] == "4"


def test_a_long_run_has_a_page_of_bounded_size(tmp_path: Path) -> None:
    history = History()
    for step in range(1, 60_001):
        history.add({"kind": "step", "step": step, "loss": 3 + math.sin(step / 5000), "lr": 0.1, "replicas": 2})
        if step % 7 == 0:
            totals = {"elapsed": step / 10, "set-up": 1.0, "sent_bytes": step, "received_bytes": step}
            history.add({"kind": "speed", "step": step, "units_per_second": 1.0, "wait_share": None, "totals": totals})
        if step % 50 == 0:
            history.add({"kind": "evaluation", "step": step, "loss": 3.0, "accuracy": 0.5})
            history.add({"kind": "note", "step": step, "text": "a note"})
    write_page(tmp_path, CONFIG, history)
    assert (tmp_path / "index.html").stat().st_size < 600_000
    assert len(history.notes) == 200
    assert history.notes[0][0] == 50
    assert history.notes[-1][0] == 60_000


def test_thinning_keeps_means_ends_and_extremes() -> None:
    thinned, values = Thinned(most=10), [math.sin(7 * step) for step in range(1, 1000)]
    sampled = Sampled(most=10)
    for step, value in enumerate(values, start=1):
        thinned.add(step, value)
        sampled.add({"step": step})
        assert len(thinned.bins) <= 20
        assert sampled.rows[-1] == {"step": step}
        assert len(sampled.rows) <= 21
        assert sampled.rows[0] == {"step": 1}
    assert sum(one.count for one in thinned.bins) == len(values)
    first = 0
    for one in thinned.bins:
        mine = values[first : first + one.count]
        first += one.count
        assert one.step == first
        assert (one.low, one.high) == (min(mine), max(mine))
        assert one.mean == pytest.approx(sum(mine) / len(mine))
    gaps = {later["step"] - earlier["step"] for earlier, later in zip(sampled.rows[:-1], sampled.rows[1:-1], strict=False)}
    assert len(gaps) == 1
