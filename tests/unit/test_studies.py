"""Every study, on rows that are made up, and the parts that they share."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli import is_running
from thinwire import cli
from thinwire.options import RECOMMENDED_OPTIONS
from thinwire.studies import questions, recipe, search
from thinwire.studies.q4_why_k import MemoryTrial
from thinwire.studies.questions import STUDIES
from thinwire.studies.results import best_folder, book_of, folder_for, size_in, stored, write_summary
from thinwire.studies.study import SIZES, Claim, Finding, Study, table
from thinwire.studies.trials import Book, Row, Rows, Trial, run_all
from thinwire.studies.tuning import Contender, due, is_below, outcome
from thinwire.training import recipes
from thinwire.training.errors import TrainingError

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "results"
TINY: dict[str, Any] = {"layers": 1, "width": 32, "heads": 1, "mlp_width": 32, "sequence": 16, "batch": 4}
TINY |= {"steps": 2, "warmup_steps": 1, "eval_every": 1, "eval_examples": 4, "lr": 1e-2}


def made_up(trial: Trial, chance: random.Random) -> Row:
    """A row as a training would leave it."""
    loss = chance.uniform(1.0, 2.0)
    row = {"trial": trial.facts, "loss": loss, "accuracy": 0.5, "curve": [[1, loss + 1], [2, loss]], "sent_bytes": 1000}
    return {**row, "parameters": 10_000, "seconds": 1.0, "step_seconds": 0.5, **trial.made_up(chance)}


def test_recipes_that_change_leave_trials_as_they_were() -> None:
    """A row is of what its trial says; what it says nothing of was once the same for all recipes."""
    assert recipes.build("gpt-small", "demo").schedule.schedule == "linear"
    assert Trial("vit", 4, "demo", {"update": "muon"}).config.optim.rest_update == ""
    for name in ("gpt-small", "quickstart"):
        config = Trial(name, 4, "demo", {"lr": 0.1}).config
        assert (config.schedule.schedule, config.optim.balance) == ("cosine", 0.0)
        config = Trial(name, 4, "demo", {"schedule": "linear", "balance": 0.9}).config
        assert (config.schedule.schedule, config.optim.balance) == ("linear", 0.9)


def test_the_recipe_compares_what_is_recommended() -> None:
    (trial,) = {
        one.trial.key: one.trial for one in recipe._contenders(recipe._SHORT, []) if one.name == recipe._RECOMMENDED
    }.values()
    assert RECOMMENDED_OPTIONS.items() <= trial.settings.items()
    assert trial.settings["schedule"] == recipes.build("gpt-small").schedule.schedule


SIZES_OF = [(study, size) for study in STUDIES.values() for size in study.sizes]


@pytest.mark.parametrize(("study", "size"), SIZES_OF, ids=[f"{study.name}-{size}" for study, size in SIZES_OF])
def test_a_study_comes_to_an_end_and_says_something(study: Study, size: str, tmp_path: Path) -> None:
    folder, chance, rows = folder_for(tmp_path, study.name, CPU, size), random.Random(1), list[Row]()
    study.find([], RESULTS)
    for _ in range(20):
        known = {json.dumps(row["trial"], sort_keys=True) for row in rows}
        new = [trial for trial in study.plan(size, rows) if trial.key not in known]
        for trial in new:
            _ = trial.config  # every setting exists
            rows.append(json.loads(json.dumps(made_up(trial, chance))))
        if not new:
            break
    else:
        pytest.fail("it always wants more")
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_summary(study, folder, RESULTS)
    text = (folder / "summary.md").read_text()
    assert study.question in text
    assert "| --- |" in text
    for name in study.draw(rows, RESULTS):
        assert (folder / name).stat().st_size > 5000
        assert f"({name})" in text


def test_rows_of_two_sizes_lie_in_two_folders_and_the_larger_is_read(tmp_path: Path) -> None:
    folders = {size: folder_for(tmp_path, "q3", CPU, size) for size in SIZES}
    assert [folder.name[len("2000-01-01") :] for folder in folders.values()] == ["_cpu", "_cpu_medium", "_cpu_full"]
    assert [size_in(folder) for folder in folders.values()] == list(SIZES)
    on_gpu = {"2000-01-01_h200_small": "small", "2000-01-01_h200_medium": "medium", "2000-01-01_h200": "full"}
    assert [size_in(Path(name)) for name in on_gpu] == list(on_gpu.values())
    best = ["2000-01-02_cpu", "2000-01-01_h200_small", "2000-01-02_cpu_medium", "2000-01-01_h200", "2000-01-02_h200"]
    for name in best:
        (tmp_path / "q3" / name).mkdir(parents=True)
        (tmp_path / "q3" / name / "rows.jsonl").write_text("")
        assert best_folder(tmp_path, "q3") == tmp_path / "q3" / name
    assert folder_for(tmp_path, "q3", CPU, "medium").name == "2000-01-02_cpu_medium"
    assert folder_for(tmp_path, "q3", CPU).name == "2000-01-02_cpu"


_OWNER = """
import sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from thinwire.studies.trials import _begin_worker
import os
if __name__ == "__main__":
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_begin_worker) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes under /proc")
def test_workers_end_with_a_study_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(_OWNER)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        owner.kill()
    for _ in range(100):
        if not is_running(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("it lives on")


def test_what_is_due_is_planned_once_a_row(tmp_path: Path) -> None:
    asked = []

    def plan(rows: Sequence[Row]) -> list[Trial]:
        asked.append(len(rows))
        return [Trial("quickstart", 2, settings={"seed": seed}) for seed in (0, 1)]

    book = Book("q0", Rows(tmp_path / "q0"), plan)
    assert [len(book.due) for _ in range(3)] == [2, 2, 2]
    book.rows.add({"trial": book.due[0].facts, "loss": 1.0})
    assert [len(book.due) for _ in range(3)] == [1, 1, 1]
    assert asked == [0, 1]


def test_what_was_run_is_not_run_again(tmp_path: Path) -> None:
    trials = [Trial("quickstart", 2, settings={**TINY, "seed": seed}) for seed in (0, 1)]
    study = Study("q0", "T", "?", find=lambda rows, _: Finding(f"{len(rows)}"), plan=lambda *_: trials)
    folder = folder_for(tmp_path, "q0", CPU)
    assert list(run_all([book_of(study, "small", folder)], CPU, deadline=0.0)) == []
    assert [len(book.due) for book, _ in run_all([book_of(study, "small", folder)], CPU)] == [1, 0]
    assert list(run_all([book_of(study, "small", folder)], CPU)) == []
    assert best_folder(tmp_path, "q0") == folder
    assert len(stored(tmp_path, "q0")) == 2
    row = Rows(folder).rows[0]
    assert len(row["curve"]) == 2
    assert row["loss"] == row["curve"][-1][1]
    assert row["sent_bytes"] > 0
    assert 0 < row["passes"] < 1
    assert json.loads((folder / "environment.json").read_text())["torch"] == torch.__version__


def test_studies_run_at_once_and_plan_by_their_rows(tmp_path: Path) -> None:
    """Two studies in two processes; each plans its second training by the first one's row."""

    def then_another(rows: Sequence[Row]) -> list[Trial]:
        seeds = (0, 1) if rows else (0,)
        return [Trial("quickstart", 2, settings={**TINY, "steps": 2, "eval_every": 2, "seed": seed}) for seed in seeds]

    folders = {name: tmp_path / name for name in ("one", "other")}
    books = [Book(name, Rows(folder), then_another) for name, folder in folders.items()]
    names = [book.name for book, row in run_all(books, CPU, at_once=2) if row["loss"] is not None]
    assert sorted(names) == ["one", "one", "other", "other"]
    for name, folder in folders.items():
        assert [row["trial"]["settings"]["seed"] for row in Rows(folder).rows] == [0, 1], name


@pytest.mark.parametrize("at_once", [1, 2])
def test_what_several_studies_want_is_trained_once(at_once: int, tmp_path: Path) -> None:
    """Unless one of them measures something of its own."""
    wanted = Trial("quickstart", 2, settings={**TINY, "steps": 2, "eval_every": 2})
    own = MemoryTrial(**vars(wanted))
    trials = {"one": wanted, "other": wanted, "own": own}
    books = [Book(name, Rows(tmp_path / name), lambda _, trial=trial: [trial]) for name, trial in trials.items()]  # type: ignore[misc]
    assert sorted(book.name for book, _ in run_all(books, CPU, at_once)) == ["one", "other", "own"]
    one, other, measured = (Rows(tmp_path / name).rows[0] for name in trials)
    assert [len(Rows(tmp_path / name).rows) for name in trials] == [1, 1, 1]
    assert other in (one, measured)
    assert "memory" in measured


class QuickTrial(Trial):
    """As one that measures something of its own, and is done at once."""

    def run(self, device: torch.device) -> Row:
        return {"trial": self.facts, "loss": 1.0}


def test_a_training_under_way_is_waited_for_though_another_row_was_quicker(tmp_path: Path) -> None:
    slow = Trial("quickstart", 2, settings={**TINY, "steps": 60, "eval_every": 60})
    trials = {"slow": slow, "quick": QuickTrial(**vars(slow))}
    books = [Book(name, Rows(tmp_path / name), lambda _, trial=trial: [trial]) for name, trial in trials.items()]  # type: ignore[misc]
    assert sorted(book.name for book, _ in run_all(books, CPU, at_once=2)) == ["quick", "slow"]
    assert [len(Rows(tmp_path / name).rows) for name in trials] == [1, 1]


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_training_that_cannot_be_built_keeps_no_other_from_being_run(at_once: int, tmp_path: Path) -> None:
    good = Trial("quickstart", 2, settings={**TINY, "steps": 2, "eval_every": 2})
    bad = replace(good, optimizer="topk")
    books = [Book("bad", Rows(tmp_path / "bad"), lambda _: [bad]), Book("good", Rows(tmp_path / "good"), lambda _: [good])]
    with pytest.raises(
        TrainingError, match=r"1 training could not be run, the first one bad, optimizer=topk.*not simulated"
    ):
        list(run_all(books, CPU, at_once))
    assert len(Rows(tmp_path / "good").rows) == 1
    assert not (tmp_path / "bad").exists()


def test_studies_conclude_when_a_training_of_one_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that run alone, after the others, too."""
    good = Trial("quickstart", 2, settings={**TINY, "steps": 2, "eval_every": 2})
    bad = replace(good, optimizer="topk")

    def study(name: str, trial: Trial, alone: bool = False, sizes: Sequence[str] = SIZES) -> Study:
        said = lambda rows, _: Finding(table(("rows",), [(str(len(rows)),)]))  # noqa: E731
        return Study(name, "T", "?", find=said, plan=lambda *_: [trial], alone=alone, sizes=sizes)

    studies = [
        study("good", good),
        study("bad", bad),
        study("last", good, alone=True),
        study("other", good, sizes=("full",)),
    ]
    monkeypatch.setattr(questions, "STUDIES", {one.name: one for one in studies})
    assert cli.run(["study", "run", "all", "--device", "cpu", "--results", str(tmp_path)]) == 1
    assert "1 training could not be run, the first one bad" in capsys.readouterr().err
    for name in ("good", "last"):
        (folder,) = (tmp_path / name).iterdir()
        assert (folder / "summary.md").exists()
    assert not (tmp_path / "other").exists()
    assert cli.run(["study", "run", "other", "--device", "cpu", "--results", str(tmp_path)]) == 1
    assert "--size small: other has the sizes full alone" in capsys.readouterr().err


def test_a_seed_that_failed_is_not_below_others() -> None:
    def rows(losses: Sequence[float | None], optimizer: str) -> list[Row]:
        trial = Trial("quickstart", 2, optimizer)
        contender = Contender("a", trial, 0.1)
        return [{"trial": contender.at(0.1, seed).facts, "loss": loss} for seed, loss in enumerate(losses)]

    known = [*rows([1.0, None, 1.1], "demo"), *rows([1.5, 1.6, 1.7], "adamw")]
    demo, adamw = (outcome(Contender("a", Trial("quickstart", 2, name), 0.1), known) for name in ("demo", "adamw"))
    assert demo is not None
    assert adamw is not None
    assert not is_below(demo, adamw)
    assert demo.words == "1.050 (1.000 to 1.100; 1 failed)"
    assert is_below(replace(demo, num_failed=0), adamw)


def test_a_training_that_fails_is_a_row_without_a_loss() -> None:
    row = Trial("quickstart", 2, settings={**TINY, "update": "sgd", "lr": 1e30, "clip": 0.0, "steps": 4}).run(CPU)
    assert row["loss"] is None


def test_what_is_kept_can_be_less() -> None:
    whole, dropped = (Trial("quickstart", 2, settings=TINY, kept=kept).run(CPU) for kept in (1.0, 0.0))
    assert whole["curve"][0] == dropped["curve"][0]
    assert whole["loss"] != dropped["loss"]


def test_what_was_sent_can_be_put_back_in_part() -> None:
    """After one step the momentum lies between that of DeMo and a plain one, which does not depend on k."""

    def momenta(returned: float, topk: int) -> list[torch.Tensor]:
        simulation = Trial("quickstart", 2, settings={**TINY, "topk": topk}, returned=returned).build(CPU)
        simulation.take_step()
        return [tensor.momentum_CE for tensor in simulation.method.replicas[1].tensors]  # type: ignore[union-attr]

    none, some, all_few, all_many = momenta(0.0, 40), momenta(0.25, 40), momenta(1.0, 40), momenta(1.0, 400)
    for without, part, few, many in zip(none, some, all_few, all_many, strict=True):
        assert without.square().sum() < 0.99 * few.square().sum()
        torch.testing.assert_close(part, 0.75 * without + 0.25 * few, rtol=1e-4, atol=1e-8)
        torch.testing.assert_close(few, many, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(("values", "has_errors"), [("float32", False), ("int4", True), ("sign", True)])
def test_what_a_codec_rounds_away_can_be_dropped(values: str, has_errors: bool) -> None:
    """Then a coefficient that was sent is 0 afterwards, and one that was not is what it would be anyway; as are tensors that
    are so small that a share of every element is sent."""

    def momenta(keeps_errors: bool) -> dict[str, torch.Tensor]:
        settings = {**TINY, "values": values, "topk": 40}
        simulation = Trial("quickstart", 2, settings=settings, keeps_errors=keeps_errors).build(CPU)
        simulation.take_step()
        local = simulation.method.replicas[1]  # type: ignore[union-attr]
        return {name: tensor.momentum_CE for name, tensor in zip(local.names, local.tensors, strict=True)}

    usual, dropped = momenta(True), momenta(False)
    differs = usual.pop("model.embed_tokens.weight") != (embedding := dropped.pop("model.embed_tokens.weight"))
    assert bool(differs.any()) == has_errors
    assert not embedding[differs].any()
    num_kept = 40 * embedding.shape[1] // 64**2
    assert ((embedding == 0).sum(dim=1) >= num_kept).all(), "also what the codec rounds to 0"
    assert len(usual) > 5
    for name, momentum_CE in usual.items():
        assert torch.equal(momentum_CE, dropped[name])


def test_topk_can_change_after_half_of_the_steps() -> None:
    few, more, both = (
        Trial("quickstart", 2, settings={**TINY, "topk": topk}, later_topk=then).run(CPU)
        for topk, then in ((16, 0), (64, 0), (16, 64))
    )
    assert both["sent_bytes"] == pytest.approx((few["sent_bytes"] + more["sent_bytes"]) / 2, abs=1)
    assert len({row["loss"] for row in (few, more, both)}) == 3
    with pytest.raises(TrainingError, match="returned and keeps_errors are for DeMo, not for optimizer=adamw"):
        Trial("quickstart", 2, "adamw", settings=TINY, later_topk=64).build(CPU)
    with pytest.raises(TrainingError, match="later_topk=64 is not simulated where there is a delay or are owners"):
        Trial("quickstart", 2, settings={**TINY, "delay": 1}, later_topk=64).build(CPU)
    with pytest.raises(TrainingError, match="later_topk=64 is for all parameters: leave topk_of out"):
        Trial("quickstart", 2, settings={**TINY, "topk_of": "attn=8"}, later_topk=64).build(CPU)
    with pytest.raises(ValueError, match="returned must be a finite number"):
        Trial("quickstart", 2, settings=TINY, returned=-1.0).build(CPU)


def test_a_rate_is_sought_where_it_may_be_better() -> None:
    """The loss falls with the learning rate: the search goes on beyond the grid, then takes the other seeds."""
    contender = Contender("c", Trial("quickstart", 2), 1.0)
    rows: list[Row] = []
    for wanted in ([1.0, 0.5, 2.0], [4.0], [8.0], [16.0], [32.0], [64.0]):
        trials = due([contender], rows, "full")
        assert [trial.settings["lr"] for trial in trials] == wanted
        rows += [{"trial": trial.facts, "loss": 1 / trial.settings["lr"]} for trial in trials]
    last = due([contender], rows, "full")
    assert [(trial.settings["lr"], trial.settings["seed"]) for trial in last] == [(64.0, 1), (64.0, 2)]
    rows += [{"trial": trial.facts, "loss": 0.1 * trial.settings["seed"]} for trial in last]
    found = outcome(contender, rows)
    assert found is not None
    assert found.rate == 64.0
    assert found.losses == [1 / 64, 0.1, 0.2]
    assert found.tries_words == "8, best at the edge"
    inside = [row | {"loss": abs(row["trial"]["settings"]["lr"] - 1.0)} for row in rows[:3]]
    between = outcome(contender, inside)
    assert between is not None
    assert between.tries_words == "3"
    alone = outcome(contender, inside[:1])
    assert alone is not None
    assert alone.tries_words == "1"
    other = Contender("d", replace(contender.trial, replicas=3), 1.0)
    assert outcome(other, rows) is None


def test_with_one_rate_there_is_nothing_to_wait_for() -> None:
    contender = Contender("c", Trial("quickstart", 2), 1.0)
    trials = due([contender], [], "full", factors=(1.0,))
    assert [(trial.settings["lr"], trial.settings["seed"]) for trial in trials] == [(1.0, 0), (1.0, 1), (1.0, 2)]
    assert (
        due([contender], [{"trial": trial.facts, "loss": 1.0} for trial in trials[:1]], "full", factors=(1.0,)) == trials[1:]
    )


@pytest.mark.parametrize("size", STUDIES["search"].sizes)
def test_what_is_searched_differs_from_what_there_is(size: str) -> None:
    known = search.contenders(size)
    for (method, what), one in known.items():
        base = known[method, "as it is"]
        assert (
            one is base
            or one.trial.config != base.trial.config
            or replace(base.trial, settings={}) != replace(one.trial, settings={})
        ), f"{method}, {what} changes nothing"


def test_a_claim_that_does_not_hold_says_so() -> None:
    assert Claim("a", False).line == "- **does not hold**: a"


def test_the_command_names_studies_and_refuses_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["study", "list", "--results", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert all(study in listed for study in STUDIES)
    assert cli.run(["study", "run", "q99"]) == 1
    assert "there is no study 'q99'; there are all, " in capsys.readouterr().err
