"""What the studies of k, chunks, weight decay, bytes and value codecs measure and compute."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.text import Annotation

from thinwire.planner.cost import ring_all_reduce
from thinwire.planner.links import Link
from thinwire.studies import q4_why_k, q5_choice_of_k, q6_weight_decay, q7_bytes, q17_values
from thinwire.studies.figure import Page, line
from thinwire.studies.payloads import plan_of, topk_for_bytes
from thinwire.studies.results import folder_for
from thinwire.studies.settings import text_trial
from thinwire.studies.trials import Trial
from thinwire.studies.tuning import Outcome
from thinwire.training.recipes import build
from thinwire.wire.values import VALUE_CODECS

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"layers": 1, "width": 32, "heads": 1, "mlp_width": 32, "sequence": 16, "batch": 4}
TINY |= {"steps": 4, "warmup_steps": 1, "eval_every": 4, "eval_examples": 4, "lr": 1e-2, "clip": 0.0}


def outcome(loss: float, sent_bytes: int = 1000) -> Outcome:
    return Outcome(0.1, [loss], [{"sent_bytes": sent_bytes, "parameters": 8000, "memory": 1.0}], 3)


@pytest.mark.parametrize("values", VALUE_CODECS)
def test_the_plan_of_a_trial_is_that_of_its_training(values: str) -> None:
    trial = Trial("quickstart", 2, settings={**TINY, "width": 96, "chunk": 32, "topk": 5, "values": values})
    assert plan_of(trial).payload_bytes == trial.build(CPU).method.sent_bytes


def test_no_other_k_comes_nearer_to_equal_bytes() -> None:
    def trial_with(topk: int) -> Trial:
        return Trial("quickstart", 2, settings={"values": "int8", "topk": topk})

    sizes = {topk: plan_of(trial_with(topk)).payload_bytes for topk in range(1, 65)}
    for wanted in (0, sizes[1] + 5, sizes[20], sizes[41] - 1, 10**9):
        found = topk_for_bytes(wanted, trial_with, 64)
        assert abs(sizes[found] - wanted) == min(abs(size - wanted) for size in sizes.values())


@pytest.mark.parametrize("update", ["sign", "muon"])
def test_codecs_of_equal_bytes_have_equal_bytes(update: str) -> None:
    cases = [(update, "bytes", values) for values in ("sign", "sign_scale", "int4", "int8", "bfloat16", "float32")]
    topks = [q17_values.topk_of("full", case) for case in cases]
    assert topks == sorted(topks, reverse=True)
    trials = [text_trial("full", settings={"update": update, "values": case[2]}) for case in cases]
    sized = [replace(one, settings={**one.settings, "topk": topk}) for one, topk in zip(trials, topks, strict=True)]
    sizes = [plan_of(trial).payload_bytes for trial in sized]
    assert max(sizes) < 1.06 * min(sizes)  # a coefficient more or less of 7 in float32 weighs so much


def test_memory_is_the_residual_in_gradients() -> None:
    """With a decay of 0 and k of all, in float32, nothing is kept; with k of 1 nearly all of one gradient."""
    common = {**TINY, "momentum_decay": 0.0, "values": "float32", "chunk": 32}
    nothing = q4_why_k.MemoryTrial("quickstart", 2, settings={**common, "topk": 1024}).run(CPU)
    much = q4_why_k.MemoryTrial("quickstart", 2, settings={**common, "topk": 1}).run(CPU)
    assert nothing["memory"] == 0.0
    assert 0.5 < much["memory"] < 1.0
    assert q4_why_k.MemoryTrial("quickstart", 2, "adamw", TINY).run(CPU)["memory"] is None


def test_memory_is_that_of_a_slow_computation() -> None:
    trial = q4_why_k.MemoryTrial("quickstart", 2, settings={**TINY, "momentum_decay": 0.9})
    simulation = trial.build(CPU)
    kept, gradients = [], []

    def keep(replica: int, local: Any) -> None:
        if replica == 0 and simulation.step >= 2:
            matrices = [one for one in local.tensors if one.parameter.dim() == 2]
            kept.extend(value for one in matrices for value in one.momentum_CE.flatten().tolist())
            gradients.extend(value for one in matrices for value in one.gradient.flatten().tolist())

    simulation.method.watchers.append(keep)  # type: ignore[union-attr]
    for _ in range(4):
        simulation.take_step()
    slow = (sum(value**2 for value in kept) / sum(value**2 for value in gradients)) ** 0.5
    assert trial.run(CPU)["memory"] == pytest.approx(slow, abs=1e-3)


def test_the_cheapest_setting_is_one_that_is_good_enough() -> None:
    found = {
        (64, 4): outcome(1.2, 100),
        (64, 16): outcome(1.015, 300),
        (32, 4): outcome(1.018, 280),
        (64, 64): outcome(1.0, 900),
    }
    assert q5_choice_of_k.cheapest_within(found, 0.01) == (64, 64)
    assert q5_choice_of_k.cheapest_within(found, 0.02) == (32, 4)
    assert q5_choice_of_k.cheapest_within(found, 0.5) == (64, 4)
    assert q5_choice_of_k.frontier(found) == [(64, 4), (32, 4), (64, 16), (64, 64)]
    assert q5_choice_of_k.frontier({**found, (16, 1): outcome(1.3, 290)}) == [(64, 4), (32, 4), (64, 16), (64, 64)]


def test_the_gain_of_twice_the_bytes() -> None:
    found = {(64, 4): outcome(1.3, 100), (64, 16): outcome(1.25, 200), (64, 64): outcome(1.0, 800), (32, 4): outcome(9.0, 1)}
    assert q5_choice_of_k.gain_of_doubling(found) == pytest.approx(0.1)
    assert q5_choice_of_k.gain_of_doubling({(64, 4): outcome(1.0)}) is None


def test_weight_decay_alone_leaves_this_of_a_weight() -> None:
    config = build("quickstart", "adamw")
    config = replace(config, optim=replace(config.optim, lr=0.1, weight_decay=0.5))
    config = replace(config, schedule=replace(config.schedule, steps=4, warmup_steps=2, schedule="constant"))
    weight = 1.0
    for share in (0.5, 1.0, 1.0, 1.0):
        weight -= 0.1 * share * 0.5 * weight
    assert q6_weight_decay.shrinkage(config) == pytest.approx(weight)


def test_bytes_received_are_those_of_all_others() -> None:
    sizes = q7_bytes.bytes_at("small", 32)
    assert sizes.received == {2: sizes.sent, 4: 3 * sizes.sent, 64: 63 * sizes.sent}
    assert sizes.received_with_owners < sizes.received[64]


def test_losses_of_two_sizes_are_not_on_one_line(tmp_path: Path) -> None:
    """Those of q4 and q5 stand beside q7's own rows of the same size."""

    def store(study: str, size: str) -> None:
        contenders = {"q4": q4_why_k.contenders, "q5": q5_choice_of_k.contenders}[study](size)
        folder, loss = folder_for(tmp_path, study, CPU, size), {"small": 3.0, "medium": 2.0}[size]
        folder.mkdir(parents=True)
        rows = [{"trial": one.at(one.rate, 0).facts, "loss": loss, "sent_bytes": 1, "memory": 1.0} for one in contenders]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def losses(size: str) -> set[str]:
        rows = [
            {"trial": trial.facts, "median_step_seconds": 1.0, "parameters": 1} for trial in q7_bytes.STUDY.plan(size, [])
        ]
        text = q7_bytes.STUDY.find(rows, tmp_path).text
        return {loss for loss in ("2.000", "3.000") if loss in text}

    for study, size in (("q4", "small"), ("q4", "medium"), ("q5", "small")):
        store(study, size)
    assert losses("small") == {"3.000"}
    assert losses("medium") == {"2.000"}


def test_a_step_over_a_link_waits_for_its_bytes() -> None:
    link = Link(8e6, 0.0, payload_share=1.0)
    assert q7_bytes.on_link(0.5, ring_all_reduce(1_000_000, 2), link) == pytest.approx(1.5)


def test_the_time_of_a_step_is_measured() -> None:
    row = q7_bytes.StepTime("quickstart", 1, settings={**TINY, "steps": 14, "eval_every": 14}).run(CPU)
    assert 0 < row["median_step_seconds"] < row["seconds"]


def test_names_at_the_ends_of_lines_do_not_stand_on_each_other(tmp_path: Path) -> None:
    page = Page()
    (axes,) = page.panels
    for index in range(5):
        line(axes, [(0, 1.0), (1, 1.0 + 1e-3 * index)], f"line {index}", index)
    line(axes, [(0, 0.0), (1, 0.0)], "far away", 5)
    page.save(tmp_path / "a.png")
    # Of the letters alone, without the line that leads to them.
    boxes = [super(Annotation, text).get_window_extent() for text in axes.texts if isinstance(text, Annotation)]
    assert len(boxes) == 6
    for index, box in enumerate(boxes):
        for other in boxes[:index]:
            assert box.y0 >= other.y1 - 2 or other.y0 >= box.y1 - 2
    order = sorted(range(6), key=lambda index: boxes[index].y0)
    assert [axes.texts[index].get_text() for index in order] == [
        "far away",
        *(f"line {index}" for index in range(5)),
    ]
