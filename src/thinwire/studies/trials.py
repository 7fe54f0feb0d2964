"""Trials: single trainings of a study, each a row in a file. Those that are there are not run again."""

import json
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch

from thinwire.bench.environment import commit, environment
from thinwire.core.errors import NonFiniteGradientError, check_float, check_int
from thinwire.exchange.choice import OWNER
from thinwire.local_step import LocalStep
from thinwire.studies.simulation import OnDevice, Simulation, VirtualReplicas
from thinwire.studies.weather import Weather
from thinwire.training.config import DECOUPLED_OPTIMIZERS, TrainConfig
from thinwire.training.config_file import override
from thinwire.training.errors import TrainingError
from thinwire.training.job import Data, load_data
from thinwire.training.models import num_parameters
from thinwire.training.recipes import build
from thinwire.training.wording import count

Row = dict[str, Any]

# What recipes were given later, and trials did not have: a row that does not speak of it is without.
_SINCE: dict[str, Any] = {"balance": 0.0, "schedule": "cosine", "rest_update": ""}


@dataclass(frozen=True)
class Trial:
    """One training: a recipe for R replicas, and what differs from it (`thinwire.training.config`). ``absent`` and ``lost``
    are as in `Weather`, ``apart`` as in `Simulation`. ``kept`` is the share of what was not sent that a replica keeps after
    each step; DeMo keeps all. ``later_topk`` is what ``topk`` becomes after half of the steps; 0 leaves it as it is.
    ``returned`` is the share of what was sent that a replica puts back into its momentum; with DeMo none. ``keeps_errors``
    is whether what the codec rounded away stays there, as it does with DeMo."""

    recipe: str
    replicas: int
    optimizer: str = "demo"
    settings: dict[str, Any] = field(default_factory=dict)
    absent: float = 0.0
    lost: float = 0.0
    kept: float = 1.0
    apart: bool = False
    later_topk: int = 0
    returned: float = 0.0
    keeps_errors: bool = True

    @property
    def facts(self) -> dict[str, Any]:
        """All that it is, for its row."""
        return asdict(self)

    @property
    def key(self) -> str:
        """The same for the same training."""
        return json.dumps(self.facts, sort_keys=True)

    @property
    def all_settings(self) -> dict[str, Any]:
        """Those that differ from what its recipe was when trials were first written down."""
        return {**_SINCE, **self.settings}

    @property
    def config(self) -> TrainConfig:
        """What is trained."""
        return override(build(self.recipe, self.optimizer), self.all_settings, f"a trial of {self.recipe}")

    def build(self, device: torch.device) -> Simulation:
        """The training, before its first step."""
        config = self.config
        self._check(config)
        weather = Weather(self.absent, self.lost, config.run.seed)
        simulation = Simulation(config, self.replicas, device, weather, self.apart, data=_data_of(config, device))
        if isinstance(simulation.method, VirtualReplicas):
            simulation.method.returned, simulation.method.keeps_errors = self.returned, self.keeps_errors
            if self.kept != 1:
                simulation.method.watchers.append(_keeping(self.kept))
        return simulation

    def _check(self, config: TrainConfig) -> None:
        """Refuse at once what could not be done later."""
        check_float("kept", self.kept, 0.0, 1.0)
        check_float("returned", self.returned, 0.0, 1.0)
        check_int("later_topk", self.later_topk, 0)
        is_plain = (self.kept, self.later_topk, self.returned, self.keeps_errors) == (1, 0, 0, True)
        if not is_plain and self.optimizer not in DECOUPLED_OPTIMIZERS:
            what = "kept, later_topk, returned and keeps_errors are"
            raise TrainingError(f"{what} for DeMo, not for optimizer={self.optimizer}")
        if self.later_topk and (config.optim.delay or config.optim.exchange == OWNER):
            raise TrainingError(f"later_topk={self.later_topk} is not simulated where there is a delay or are owners")
        if self.later_topk and config.optim.topk_of:
            raise TrainingError(f"later_topk={self.later_topk} is for all parameters: leave topk_of out")

    def run(self, device: torch.device) -> Row:
        """Train, and return what was measured."""
        return train(self, self.build(device))

    def made_up(self, chance: random.Random) -> Row:
        """What `run` measures beside what every training does, made up, so that a study can be tried without training."""
        return {}


def train(trial: Trial, simulation: Simulation, watch: Callable[[], None] | None = None) -> Row:
    """A training to its end. A loss that is no longer a number ends it early; its loss is null then. ``watch`` is called
    after every step."""
    config = trial.config
    curve, accuracy, steps = [], None, config.schedule.steps
    sent_bytes = [simulation.method.sent_bytes]
    ready = time.perf_counter()
    with suppress(NonFiniteGradientError):
        while simulation.step < steps:
            if trial.later_topk and simulation.step == steps // 2 and isinstance(simulation.method, VirtualReplicas):
                simulation.method.set_topk(trial.later_topk)
                sent_bytes.append(simulation.method.sent_bytes)
            simulation.take_step()
            if watch is not None:
                watch()
            if simulation.step % config.run.eval_every == 0 or simulation.step == steps:
                score = simulation.score()
                accuracy = score.accuracy
                if not math.isfinite(score.loss):
                    break
                curve.append([simulation.step, round(score.loss, 6)])
    is_finished = bool(curve) and curve[-1][0] == steps
    seconds = time.perf_counter() - ready
    return {
        "trial": trial.facts,
        "loss": curve[-1][1] if is_finished else None,
        "accuracy": accuracy,
        "curve": curve,
        "sent_bytes": round(statistics.mean(sent_bytes)),
        "parameters": num_parameters(simulation.model),
        "passes": float(f"{simulation.passes:.4g}"),
        "seconds": round(seconds, 2),
        "step_seconds": round(seconds / max(1, simulation.step), 5),
    }


def _keeping(share: float) -> Callable[[int, LocalStep], None]:
    def keep(replica: int, local: LocalStep) -> None:
        for tensor in local.tensors:
            tensor.momentum_CE.mul_(share)

    return keep


class Rows:
    """The rows of one study in one folder, and where they were measured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "rows.jsonl"
        self.rows: list[Row] = [_with_defaults(json.loads(line)) for line in self._lines()]
        self._by_key = {_key_in(row): row for row in self.rows}

    def _lines(self) -> list[str]:
        return self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        """Those that have no row yet, each once."""
        by_key = {trial.key: trial for trial in trials}
        return [trial for key, trial in by_key.items() if key not in self._by_key]

    def find(self, trial: Trial) -> Row | None:
        """That of a training, if it is there."""
        return self._by_key.get(trial.key)

    def add(self, row: Row) -> None:
        """Append a row to the file, in one write; with its commit, since a folder may have rows of several."""
        row = {"commit": _commit(), **row}
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.rows:
            (self.folder / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        self._by_key[_key_in(row)] = row


def _key_in(row: Row) -> str:
    """The `Trial.key` of a row's; of what was no trial, such as a benchmark's, it means nothing."""
    return json.dumps(row.get("trial"), sort_keys=True)


@cache
def _commit() -> str:
    """Once: what is measured is what was imported."""
    return commit()


def _with_defaults(row: Row) -> Row:
    """A row of a time when a trial had fewer fields."""
    defaults = {one.name: one.default for one in fields(Trial) if one.default is not MISSING}
    return {**row, "trial": {**defaults, **row["trial"]}} if "trial" in row else row


@dataclass
class Book:
    """The rows of a study of this name, and what is due next knowing them: ``plan`` is asked again after every row."""

    name: str
    rows: Rows
    plan: Callable[[Sequence[Row]], Sequence[Trial]]
    _planned: tuple[int, list[Trial]] | None = field(default=None, init=False, repr=False)

    @property
    def due(self) -> list[Trial]:
        """What has no row yet."""
        num_rows = len(self.rows.rows)
        # Many books are asked whenever any has a row, and planning reads all rows for every contender.
        if self._planned is None or self._planned[0] != num_rows:
            self._planned = num_rows, self.rows.missing(self.plan(self.rows.rows))
        return self._planned[1]


Failure = tuple[str, Trial, Exception]
"""The study, the training that could not be run, and why."""


def run_all(
    books: Sequence[Book], device: torch.device, at_once: int = 1, deadline: float = math.inf
) -> Iterator[tuple[Book, Row]]:
    """Run what is due, in the order of the books, and yield rows as they come; ``at_once`` in processes of their own. After
    the ``deadline`` (of `time.monotonic`) none is begun. What several books want is trained once. A training that cannot be
    run keeps no other from it; its error is raised in the end."""
    failures: dict[str, Failure] = {}
    yield from (
        _one_by_one(books, device, deadline, failures)
        if at_once == 1
        else _at_once(books, device, at_once, deadline, failures)
    )
    if failures:
        name, trial, first = next(iter(failures.values()))
        what = f"{name}, optimizer={trial.optimizer}, {trial.replicas} replicas, {trial.settings}"
        raise TrainingError(f"{count(len(failures), 'training')} could not be run, the first one {what}: {first}") from first


def _one_by_one(
    books: Sequence[Book], device: torch.device, deadline: float, failures: dict[str, Failure]
) -> Iterator[tuple[Book, Row]]:
    for book in books:
        while due := [trial for trial in book.due if _key_of(trial) not in failures]:
            row = _shared_row(due[0], books)
            if row is None and time.monotonic() >= deadline:
                break
            try:
                row = due[0].run(device) if row is None else row
            except Exception as failure:
                failures[_key_of(due[0])] = (book.name, due[0], failure)
                continue
            book.rows.add(row)
            yield book, row


def _at_once(
    books: Sequence[Book], device: torch.device, at_once: int, deadline: float, failures: dict[str, Failure]
) -> Iterator[tuple[Book, Row]]:
    running: dict[Future[Row], tuple[Book, Trial]] = {}

    def finished() -> Iterator[tuple[Book, Row]]:
        for one in wait(running, return_when=FIRST_COMPLETED).done:
            book, trial = running.pop(one)
            failure = one.exception()
            if isinstance(failure, Exception):
                failures[_key_of(trial)] = (book.name, trial, failure)
                continue
            book.rows.add(one.result())
            yield book, one.result()

    with ProcessPoolExecutor(at_once, get_context("spawn"), initializer=_begin_worker) as pool:
        try:
            while True:
                under_way = {_key_of(trial) for _, trial in running.values()}
                yield from _shared_rows(books, under_way)
                known = {*failures, *under_way}
                waiting = ((book, one) for book in books for one in book.due if _key_of(one) not in known)
                while len(running) < at_once and time.monotonic() < deadline and (found := next(waiting, None)) is not None:
                    book, trial = found
                    running[pool.submit(_run_in_worker, trial, str(device))] = (book, trial)
                    known.add(_key_of(trial))
                if not running:
                    return
                yield from finished()
        finally:  # whatever ended it, what is under way is waited for anyway
            while running:
                with suppress(Exception):
                    list(finished())


def _key_of(trial: Trial) -> str:
    """The same for trainings of which one is enough."""
    return f"{type(trial).__name__} {trial.key}"


def _shared_row(trial: Trial, books: Sequence[Book]) -> Row | None:
    """That of another book; but not for a trial that also measures something of its own."""
    if type(trial) is not Trial:
        return None
    return next((row for book in books if (row := book.rows.find(trial)) is not None), None)


def _shared_rows(books: Sequence[Book], under_way: Container[str]) -> Iterator[tuple[Book, Row]]:
    """Give every book what is due there and another has. What is ``under_way`` brings a row of its own, even if one that
    measures more was quicker."""
    for book in books:
        # What a row makes due may be there, too.
        while found := next(
            (row for one in book.due if _key_of(one) not in under_way and (row := _shared_row(one, books))), None
        ):
            book.rows.add(found)
            yield book, found


def _begin_worker() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """However that ends: a pool's processes wait for ever for one that was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_in_worker(trial: Trial, device: str) -> Row:
    return trial.run(torch.device(device))


_last_data: tuple[object, Data] | None = None


def _data_of(config: TrainConfig, device: torch.device) -> Data:
    """On the device, and kept from trial to trial as long as it stays the same."""
    global _last_data
    key = (config.data, config.model.architecture, device)
    if _last_data is None or _last_data[0] != key:
        _last_data = None  # its room may be needed
        data = load_data(config)
        _last_data = key, replace(data, train=OnDevice(data.train, device))
    return _last_data[1]
