"""Replicas that drift apart are found, named and, if so wished, repaired."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training import build, flat, train_step
from thinwire import AgreementError, DeMo, DriftError
from thinwire.drift import hash_of, split
from thinwire.exchange.loopback import LoopbackTransport, run_replicas


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (255,), (256,), (257,), (40, 50), (0, 3)])
def test_any_bit_changes_the_hash(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    before = hash_of(tensor)
    assert torch.equal(hash_of(tensor.clone()), before)
    words = tensor.view(-1).view(torch.uint8)
    for _ in range(20 if len(words) else 0):
        place, bit = int(torch.randint(len(words), ())), 1 << int(torch.randint(8, ()))
        words[place] ^= bit
        assert (hash_of(tensor) != before).any()
        words[place] ^= bit
    swapped = tensor.clone().view(-1)
    if tensor.numel() > 1 and swapped[0] != swapped[-1]:
        swapped[[0, -1]] = swapped[[-1, 0]]
        assert (hash_of(swapped) != before).any()
    assert torch.equal(hash_of(tensor), before)


def test_the_majority_is_right_and_among_equals_the_lowest() -> None:
    rows = torch.tensor([[1], [2], [2], [3]], dtype=torch.uint8)
    assert split(rows) == ([1, 2], [0, 3])
    assert split(rows[:2]) == ([0], [1])
    assert split(rows[1:3]) == ([0, 1], [])


def run(kind: str, **options: Any) -> list[tuple[Tensor, list[str], int, bool]]:
    """Four replicas, of which number 2 has a bit of its parameters or moments flipped after the sixth step."""

    def work(transport: LoopbackTransport) -> tuple[Tensor, list[str], int, bool]:
        model = build()
        settings = {"chunk": 16, "topk": 8, "dense_below": 60, "check_drift_every": 3, "update": "adamw", **options}
        optimizer = DeMo(model.named_parameters(), lr=1e-2, transport=transport, **settings)
        messages = []
        for step in range(8):
            try:
                train_step(model, optimizer, step, transport.replica)
            except DriftError as error:
                messages.append(f"{step}: {error}")
                break
            if step == 5 and transport.replica == 2:
                weight = model.wide.weight
                tensor = weight.data if kind == "parameter" else optimizer.state[weight]["second_moment"]
                tensor.view(-1).view(torch.int32)[77] ^= 0 if kind == "none" else 1
        same = not messages and optimizer.check_drift()
        return flat(model), messages, optimizer.drift.num_differences, same

    return run_replicas(work, 4)


def test_a_flipped_bit_is_an_error_at_the_next_check_on_all() -> None:
    words = "after step 6 replicas [2] hold other parameters than replicas [0, 1, 3], first of all in "
    for kind, where in {"parameter": "wide.weight (", "moment": "wide.weight (second_moment) ("}.items():
        for _, messages, num_differences, _ in run(kind):
            (message,) = messages
            assert message.startswith(f"6: {words}{where}")
            assert num_differences == 0  # it was raised before it was counted
            assert "(1 of 18 tensors)" in message


def test_a_flipped_bit_is_repaired(caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = run("none", on_drift="repair")
    for kind in ("parameter", "moment"):
        with caplog.at_level(logging.WARNING, logger="thinwire"):
            everyone = run(kind, on_drift="repair")
        assert "they were given the majority's" in caplog.text
        for found, messages, num_differences, same in everyone:
            assert (messages, num_differences, same) == ([], 1, True)
            assert torch.equal(found, everyone[0][0])
    assert [num_differences for _, _, num_differences, _ in undisturbed] == [0] * 4


def test_warnings_let_training_go_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        everyone = run("parameter", on_drift="warn")
    assert all(not messages and not same for _, messages, _, same in everyone)
    assert "replicas [2] hold other parameters" in caplog.text
    assert not torch.equal(everyone[2][0], everyone[0][0])


@pytest.mark.parametrize("differs", ["step", "plan"])
def test_replicas_that_differ_say_so_also_where_a_check_is_due(differs: str) -> None:
    """One goes on from another step, or has another topk, when its opinion would be that a check is due, or is not."""

    def work(transport: LoopbackTransport) -> str:
        model, options = build(), {"lr": 1e-2, "transport": transport, "check_drift_every": 2, "chunk": 16, "topk": 8}
        optimizer = DeMo(model.parameters(), **options)  # type: ignore[arg-type]
        for step in range(2):
            train_step(model, optimizer, step, transport.replica)
        if differs == "plan" and transport.replica == 0:
            optimizer.param_groups[0]["topk"] = 16
        if differs == "step":
            saved = optimizer.state_dict()
            optimizer = DeMo(model.parameters(), **options)  # type: ignore[arg-type]
            if transport.replica == 0:
                optimizer.load_state_dict(saved)
        with pytest.raises(AgreementError) as caught:
            train_step(model, optimizer, 3, transport.replica)
        return str(caught.value)

    words = "replica 0 has [step: 2], replica 1 has [step: 0]" if differs == "step" else "topk"
    assert all(words in message for message in run_replicas(work, 2))


@pytest.mark.parametrize("option", ["delay", "look_ahead", "sync_parameters"])
def test_options_that_all_must_share_are_compared(option: str) -> None:
    def work(transport: LoopbackTransport) -> None:
        options = {"delay": 1, "look_ahead": False, "sync_parameters": True}
        options[option] = [options[option], not options[option]][transport.replica]
        options["look_ahead"] &= bool(options["delay"])
        options["delay"] = int(options["delay"])
        with pytest.raises(AgreementError, match=rf"replica 0 has \[{option}: "):
            DeMo(build().parameters(), transport=transport, **options)  # type: ignore[arg-type]

    run_replicas(work, 2, timeout_seconds=5)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"check_drift_every": -1}, "check_drift_every must be an integer >= 0"), ({"on_drift": "no"}, "on_drift='no'")],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeMo([torch.nn.Parameter(torch.zeros(3))], **options)
