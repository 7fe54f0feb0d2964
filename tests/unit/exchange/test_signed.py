"""Signed messages: what was changed, replayed or written without the key does not pass."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training import build, flat, train, train_step
from thinwire import AgreementError, DeMo, ExchangeError, PayloadError
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.exchange.signed import SignedTransport
from thinwire.exchange.transport import Done, SoloTransport, Transport, all_gather

KEY = b"a key of the run, long enough"
OTHER_KEY = b"another key, also long enough"

Meddle = Callable[[str, Tensor], None]


class Meddling:
    """A wire on which somebody changes what replica 0 receives: ``meddle`` gets the name of the exchange, and all rows or
    the tensor of a broadcast."""

    def __init__(self, inner: Transport, meddle: Meddle) -> None:
        self._inner, self._received = inner, meddle
        self.replica, self.num_replicas = inner.replica, inner.num_replicas

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Any:
        pending: Any = self._inner.start_all_gather_(messages_RB, what)
        wait = pending.wait

        def wait_and_meddle() -> None:
            wait()
            self._meddle(what, messages_RB)

        pending.wait = wait_and_meddle
        return pending

    def broadcast_(self, tensor: Tensor, what: str, source: int = 0) -> None:
        self._inner.broadcast_(tensor, what, source)
        self._meddle(what, tensor)

    def _meddle(self, what: str, received: Tensor) -> None:
        if self.replica == 0:
            self._received(what, received)


def flip(what: str, rows: Tensor) -> None:
    if what == "second":
        rows[1, 3] ^= 4
        rows[0, 3] ^= 4  # its own, which nobody reads


def flip_the_tag(what: str, rows: Tensor) -> None:
    if what == "second":
        rows[1, -1] ^= 1


class Replay:
    """Gives replica 1's row of the exchange ``recorded`` again in the next one of the name ``played``."""

    def __init__(self, recorded: str, played: str) -> None:
        self._recorded, self._played = recorded, played
        self._row: Tensor | None = None

    def __call__(self, what: str, rows: Tensor) -> None:
        if self._row is None and what == self._recorded:
            self._row = rows[1].clone()
        elif self._row is not None and what == self._played:
            rows[1] = self._row


def swap(what: str, rows: Tensor) -> None:
    if what == "second":
        rows[[1, 2]] = rows[[2, 1]]


def repeat_my_own(what: str, rows: Tensor) -> None:
    if what == "second":
        rows[1] = rows[0]


def exchange_four_times(transport: SignedTransport) -> list[list[list[int]]]:
    found = []
    for place, what in enumerate(("first", "second", "third", "third")):
        rows = torch.full((transport.num_replicas, 5), 77, dtype=torch.uint8)
        rows[transport.replica] = 10 * place + transport.replica
        transport.start_all_gather_(rows, what).wait()
        found.append(rows.tolist())
    return found


@pytest.mark.parametrize(
    ("meddle", "where", "refused"),
    [
        (flip, 1, [0, 1, 0]),
        (flip_the_tag, 1, [0, 1, 0]),
        (Replay("first", "second"), 1, [0, 1, 0]),
        (Replay("third", "third"), 3, [0, 1, 0]),
        (swap, 1, [0, 1, 1]),
        (repeat_my_own, 1, [0, 1, 0]),
    ],
    ids=["flipped", "flipped tag", "replayed", "replayed under the same name", "swapped", "reflected"],
)
def test_what_was_not_sent_so_is_zeroed_counted_and_named(
    meddle: Meddle, where: int, refused: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def work(transport: LoopbackTransport) -> tuple[list[list[list[int]]], list[int]]:
        signed = SignedTransport(Meddling(transport, meddle), KEY)
        return exchange_four_times(signed), signed.num_refused

    with caplog.at_level(logging.WARNING, "thinwire"):
        results = run_replicas(work, 3)
    expected = [[[10 * place + sender] * 5 for sender in range(3)] for place in range(4)]
    for replica in (1, 2):
        assert results[replica] == (expected, [0, 0, 0]), "the others were sent nothing wrong"
    for sender, count in enumerate(refused):
        if count:
            expected[where][sender] = [0] * 5
    assert results[0] == (expected, refused)
    what = ("first", "second", "third", "third")[where]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == sum(refused)
    assert all(
        line.startswith(f"{what}: what came from replica {sender} was not signed") for sender, line in enumerate(told, 1)
    )
    assert KEY.decode() not in caplog.text


def test_a_message_for_an_exchange_of_another_name_does_not_pass() -> None:
    def work(transport: LoopbackTransport) -> list[list[int]]:
        signed = SignedTransport(transport, KEY)
        rows = torch.full((2, 3), 1 + transport.replica, dtype=torch.uint8)
        signed.start_all_gather_(rows, f"step {transport.replica}").wait()
        return rows.tolist()

    assert run_replicas(work, 2) == [[[1] * 3, [0] * 3], [[0] * 3, [2] * 3]]


def test_a_message_of_an_earlier_session_does_not_pass() -> None:
    """The same key, exchange, name, sender and bytes: only the session is another."""
    replay = Replay("second", "second")

    def work(transport: LoopbackTransport) -> list[list[int]]:
        signed = [SignedTransport(Meddling(transport, replay), KEY) for _ in range(2)]
        for each in signed:
            exchange_four_times(each)
        return [each.num_refused for each in signed]

    assert run_replicas(work, 2) == [[[0, 0], [0, 1]], [[0, 0], [0, 0]]]


def outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except (ExchangeError, PayloadError, AgreementError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("what", ["greeting of the replicas", "proof of the key"])
def test_a_greeting_of_an_earlier_session_opens_none(what: str) -> None:
    replay = Replay(what, what)

    def work(transport: LoopbackTransport) -> str:
        SignedTransport(Meddling(transport, replay), KEY)
        return outcome(lambda: SignedTransport(Meddling(transport, replay), KEY))

    said = run_replicas(work, 2)
    assert said[0].startswith("StrangersError: replica 0 does not have the same key as replicas [1]")
    # A replayed greeting splits the session, which both notice; a replayed proof is seen by the one who gets it.
    expected = "no error" if what == "proof of the key" else "StrangersError: replica 1 does not have the same key"
    assert said[1].startswith(expected)


def test_another_key_is_named_on_all_replicas() -> None:
    def work(transport: LoopbackTransport) -> str:
        key = OTHER_KEY if transport.replica == 2 else KEY
        return outcome(lambda: DeMo(build().parameters(), transport=transport, secret=key))

    words = "StrangersError: replica {} does not have the same key as replicas {}; every replica needs the same one"
    said = run_replicas(work, 3, timeout_seconds=10)
    assert said == [words.format(0, [2]), words.format(1, [2]), words.format(2, [0, 1])]


def test_a_replica_without_a_secret_is_noticed_on_both_sides() -> None:
    def work(transport: LoopbackTransport) -> str:
        try:
            return outcome(
                lambda: DeMo(build().parameters(), transport=transport, secret=KEY if transport.replica else None)
            )
        finally:
            transport._hub.leave(transport.replica)

    said = run_replicas(work, 2, timeout_seconds=10)
    assert said[0].startswith("AgreementError: replica 1 answered the roll call with other bytes")
    assert said[1] == "ExchangeError: proof of the key: replicas [0] left; has every replica the secret?"


@pytest.mark.parametrize("place", [2, -1])
def test_a_broadcast_that_was_changed_leaves_the_tensor_alone(place: int) -> None:
    def meddle(what: str, tensor: Tensor) -> None:
        if what == "copy":
            tensor[place] ^= 1

    def work(transport: LoopbackTransport) -> tuple[str, list[float], list[int], list[float]]:
        signed = SignedTransport(Meddling(transport, meddle), KEY)
        tensor = torch.full((4,), float(transport.replica))
        said = outcome(lambda: signed.broadcast_(tensor, "copy", source=1))
        after = torch.full((4,), float(transport.replica))
        signed.broadcast_(after, "another copy", source=1)
        return said, tensor.tolist(), signed.num_refused, after.tolist()

    results = run_replicas(work, 3)
    said, tensor, refused, _ = results[0]
    assert said.startswith("ExchangeError: copy: what came from replica 1 was not signed by it for this exchange")
    assert (tensor, refused) == ([0.0] * 4, [0, 1, 0])
    assert [result[:3] for result in results[1:]] == [("no error", [1.0] * 4, [0, 0, 0])] * 2
    assert all(after == [1.0] * 4 for *_, after in results), "replicas must stay in step"


def test_a_broadcast_of_before_does_not_pass() -> None:
    sent: list[Tensor] = []

    def meddle(what: str, tensor: Tensor) -> None:
        if what == "copy":
            sent.append(tensor.clone())
            tensor.copy_(sent[0])

    def work(transport: LoopbackTransport) -> list[str]:
        signed = SignedTransport(Meddling(transport, meddle), KEY)
        return [outcome(lambda: signed.broadcast_(torch.zeros(4), "copy", source=1)) for _ in range(2)]

    said = run_replicas(work, 2)
    assert said[0][0] == "no error"
    assert said[0][1].startswith("ExchangeError: copy: what came from replica 1 was not signed")
    assert said[1] == ["no error"] * 2


def test_what_fails_before_it_is_sent_does_not_put_replicas_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise MemoryError("no room")

    def work(transport: LoopbackTransport) -> list[list[list[int]]]:
        signed = SignedTransport(transport, KEY)
        if transport.replica == 1:
            with monkeypatch.context() as patch:
                patch.setattr(signed, "_sign_", no_room)
                with pytest.raises(MemoryError):
                    signed.start_all_gather_(torch.zeros(2, 5, dtype=torch.uint8), "first")
                with pytest.raises(MemoryError):
                    signed.broadcast_(torch.zeros(3), "copy", source=1)
        return exchange_four_times(signed)

    results = run_replicas(work, 2, timeout_seconds=10)
    assert results == [[[[10 * place] * 5, [10 * place + 1] * 5] for place in range(4)]] * 2


def test_messages_in_which_zeros_mean_something_are_not_used() -> None:
    def work(transport: LoopbackTransport) -> str:
        signed = SignedTransport(Meddling(transport, flip), KEY)
        return outcome(lambda: all_gather(signed, torch.ones(5, dtype=torch.uint8), "second"))

    said = run_replicas(work, 2)
    assert said == [
        "ExchangeError: second: what came from replicas [1] was not signed by them for this exchange",
        "no error",
    ]


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        (b"fifteen bytes..", ValueError, "must have at least 16 bytes, got 15"),
        (b"", ValueError, "must have at least 16 bytes, got 0"),
        ("a text of some length", TypeError, "must be bytes, at least 16 of them, got str"),
    ],
)
def test_bad_keys_are_refused_and_not_shown(key: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^key {words}$"):
        SignedTransport(SoloTransport(), key)
    with pytest.raises(error, match=f"^secret {words}$"):
        DeMo(build().parameters(), secret=key)


def test_alone_nothing_is_signed() -> None:
    assert isinstance(SignedTransport(SoloTransport(), KEY).start_all_gather_(torch.zeros(1, 5), "alone"), Done)
    model, optimizer, _ = train(0, 2, secret=KEY)
    other, plain, _ = train(0, 2)
    assert torch.equal(flat(model), flat(other))
    assert optimizer.traffic == plain.traffic


@pytest.mark.parametrize("options", [{"num_buckets": 2, "check_drift_every": 2}, {"overlap": True}, {"delay": 1}])
def test_signed_training_ends_at_the_same_bits_and_the_meter_counts_the_tags(options: dict[str, Any]) -> None:
    def work(transport: LoopbackTransport) -> tuple[Tensor, Any, int]:
        secret = {"secret": KEY} if is_signed else {}
        model, optimizer, _ = train(transport.replica, 5, transport=transport, **options, **secret)
        optimizer.drain()
        saved = repr(optimizer.state_dict()) + repr(optimizer) + repr(vars(optimizer)) + repr(optimizer._description())
        assert KEY.decode() not in saved
        assert KEY.hex() not in saved
        return flat(model), optimizer.traffic, len(list(model.parameters()))

    is_signed = False
    plain = run_replicas(work, 3)
    is_signed = True
    signed = run_replicas(work, 3)
    for (parameters, before, num_tensors), (others, after, _) in zip(plain, signed, strict=True):
        assert torch.equal(parameters, others)
        assert torch.equal(parameters, plain[0][0])
        for name in ("last_step", "total"):
            old, new = getattr(before, name), getattr(after, name)
            assert new.num_exchanges == old.num_exchanges > 0
            assert new.sent_bytes == old.sent_bytes + 32 * old.num_exchanges
            assert new.received_bytes == old.received_bytes + 64 * old.num_exchanges
        # A roll call and a broadcast of each tensor, and before them the greeting and the proof of 32 bytes each.
        assert after.setup.num_exchanges == before.setup.num_exchanges + 2 == num_tensors + 3
        assert after.setup.sent_bytes == before.setup.sent_bytes + 64 + 32 * (num_tensors + 1)


def test_a_payload_with_another_tag_is_refused_and_nothing_changes() -> None:
    def forge(what: str, rows: Tensor) -> None:
        if what.startswith("exchange of step 3"):
            rows[1] = rows[2]  # sound in itself, and signed, but by another

    def work(transport: LoopbackTransport) -> tuple[str, bool]:
        model = build()
        options = {"chunk": 16, "topk": 8, "on_bad_payload": "raise", "secret": KEY}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=Meddling(transport, forge), **options)
        for step in range(2):
            train_step(model, optimizer, step, transport.replica)
        before = flat(model).clone()
        said = outcome(lambda: train_step(model, optimizer, 2, transport.replica))
        return said, torch.equal(flat(model), before)

    results = run_replicas(work, 3)
    assert results[0][0].startswith("PayloadError: the payload of replica 1 (step 3, bucket 0) has magic b'\\x00")
    assert results[0][1]
    assert results[1:] == [("no error", False)] * 2


def test_a_plan_that_changes_on_one_replica_is_still_named() -> None:
    def work(transport: LoopbackTransport) -> str:
        model = build()
        model.wide.weight.requires_grad_(False)
        optimizer = DeMo(model.parameters(), lr=1e-2, chunk=16, topk=8, num_buckets=2, transport=transport, secret=KEY)
        train_step(model, optimizer, 0, transport.replica)
        model.wide.weight.requires_grad_(transport.replica == 1)
        return outcome(lambda: train_step(model, optimizer, 1, transport.replica))

    for said in run_replicas(work, 2):
        assert said.startswith("AgreementError: the replicas do not agree: replica 0 has [number of tensors: 8], replica 1 ")
