"""Every transport keeps the same promises, and every wait ends."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.training import batch, build, flat, train_step
from thinwire import AgreementError, DeMo, ExchangeError, PayloadError
from thinwire.exchange.agreement import hold_roll_call
from thinwire.exchange.collective import CollectiveTransport
from thinwire.exchange.loopback import LoopbackHub, LoopbackTransport, run_replicas
from thinwire.exchange.signed import SignedTransport
from thinwire.exchange.transport import SoloTransport, Transport, all_gather
from thinwire.parallel.shaped import ShapedLink, ShapedTransport, shape
from thinwire.planner.link_spec import parse_link
from thinwire.sealing import seal_
from thinwire.wire.codec import ChunkCodec


def exercise(transport: Transport, device: torch.device | None = None) -> list[Any]:
    """Three exchanges under way at once, then a broadcast of several dtypes."""
    replica = transport.replica
    short = torch.zeros(transport.num_replicas, 5, dtype=torch.uint8, device=device)
    long = torch.zeros(transport.num_replicas, 9, dtype=torch.uint8, device=device)
    short[replica], long[replica] = replica, 100 + replica
    first, second = transport.start_all_gather_(short, "first"), transport.start_all_gather_(long, "second")
    sent = torch.arange(transport.num_replicas, dtype=torch.uint8, device=device)[:, None] + torch.full(
        (1, 7), 10 * replica, dtype=torch.uint8, device=device
    )
    received = torch.full_like(sent, 255)
    third = transport.start_all_to_all_(sent, received, "third")
    first.wait()
    third.wait()
    second.wait()
    gathered = [short.tolist(), long.tolist(), received.tolist()]
    copies = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        tensor = torch.full((2, 3), 7.0 + replica, dtype=dtype, device=device).T
        transport.broadcast_(tensor, "copy")
        copies.append(tensor.tolist())
    return [transport.replica, transport.num_replicas, gathered, copies]


def check(results: list[list[Any]]) -> None:
    num_replicas = len(results)
    for replica, (who, how_many, gathered, copies) in enumerate(results):
        assert (who, how_many) == (replica, num_replicas)
        assert gathered[0] == [[r] * 5 for r in range(num_replicas)]
        assert gathered[1] == [[100 + r] * 9 for r in range(num_replicas)]
        assert gathered[2] == [[10 * r + replica] * 7 for r in range(num_replicas)]
        assert all(copy == [[7.0, 7.0]] * 3 for copy in copies)


KEY = b"sixteen bytes..."
LINK = parse_link("1mbit,4ms")


def shaped(inner: Transport) -> Transport:
    """Over a modelled link; the roll calls go the same way as the messages."""
    return ShapedTransport(inner, ShapedLink(LINK, inner))


def test_solo() -> None:
    check([exercise(SoloTransport())])
    check([exercise(SignedTransport(SoloTransport(), KEY))])
    check([exercise(shaped(SoloTransport()))])


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_loopback(num_replicas: int) -> None:
    check(run_replicas(exercise, num_replicas))
    check(run_replicas(lambda transport: exercise(SignedTransport(transport, KEY)), num_replicas))
    check(run_replicas(lambda transport: exercise(shaped(transport)), num_replicas))
    check(run_replicas(lambda transport: exercise(shaped(SignedTransport(transport, KEY))), num_replicas))
    check(run_replicas(lambda transport: exercise(SignedTransport(shaped(transport), KEY)), num_replicas))


def _collective(rank: int) -> list[list[Any]]:
    plain = CollectiveTransport(torch.distributed.group.WORLD, 30.0)
    signed = SignedTransport(plain, KEY)
    over_link = shape(plain, LINK, 30.0)
    assert signed.ranks == over_link.ranks == plain.ranks == [0, 1, 2]
    assert (shaped(signed).overhead_bytes, over_link.overhead_bytes) == (signed.overhead_bytes, 0)
    return [exercise(plain), exercise(signed), exercise(over_link)]


def test_collective() -> None:
    for kind in zip(*run_ranks(_collective, 3), strict=True):
        check(list(kind))


@pytest.mark.gpu
def test_collective_over_nccl(tmp_path: Path) -> None:
    """One rank: a second GPU is not to be had, but device placement, waiting and copying are those of many."""
    torch.distributed.init_process_group("nccl", init_method=(tmp_path / "rendezvous").as_uri(), rank=0, world_size=1)
    try:
        transport = CollectiveTransport(torch.distributed.group.WORLD, 30.0)
        check([exercise(transport)])
        check([exercise(transport, torch.device("cuda"))])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_signed_messages_on_a_gpu() -> None:
    check(run_replicas(lambda transport: exercise(SignedTransport(transport, KEY), torch.device("cuda")), 3))


def test_a_replica_that_does_not_come_is_named_at_the_deadline() -> None:
    hub = LoopbackHub(3, timeout_seconds=0.3)
    for replica in (0, 2):
        pending = hub.transport(replica).start_all_gather_(torch.zeros(3, 1, dtype=torch.uint8), "roll call")
    with pytest.raises(ExchangeError, match=r"roll call: replicas \[1\] did not come within 0.3 s"):
        pending.wait()


def test_a_replica_that_leaves_is_named_at_once() -> None:
    def work(transport: LoopbackTransport) -> None:
        if transport.replica == 1:
            raise KeyError("a fault of its own")
        all_gather(transport, torch.zeros(1, dtype=torch.uint8), "exchange")

    began = time.monotonic()
    with pytest.raises(KeyError, match="a fault of its own"):
        run_replicas(work, 2, timeout_seconds=30)
    assert time.monotonic() - began < 20
    hub = LoopbackHub(2)
    pending = hub.transport(0).start_all_gather_(torch.zeros(2, 1, dtype=torch.uint8), "exchange")
    hub.leave(1)
    with pytest.raises(ExchangeError, match=r"exchange: replicas \[1\] left"):
        pending.wait()


def test_messages_of_different_length_are_refused() -> None:
    def work(transport: LoopbackTransport) -> None:
        all_gather(transport, torch.zeros(1 + transport.replica, dtype=torch.uint8), "exchange")

    with pytest.raises(ExchangeError, match=r"sent \[1, 2\] bytes"):
        run_replicas(work, 2)


class Tampering:
    """A transport that damages what replica 1 sends, on its way to all."""

    def __init__(self, inner: LoopbackTransport, place: int) -> None:
        self._inner, self._place = inner, place
        self.replica, self.num_replicas = inner.replica, inner.num_replicas

    def start_all_gather_(self, messages_RB: torch.Tensor, what: str) -> Any:
        if self.replica != 1 or not what.startswith("exchange of step 3"):
            return self._inner.start_all_gather_(messages_RB, what)
        messages_RB[1, self._place] ^= 1
        pending = self._inner.start_all_gather_(messages_RB, what)
        messages_RB[1, self._place] ^= 1
        return pending

    def broadcast_(self, tensor: torch.Tensor, what: str, source: int = 0) -> None:
        self._inner.broadcast_(tensor, what, source)


@pytest.mark.parametrize(
    ("place", "words"), [(0, "magic"), (4, "version"), (24, "checksum"), (32, "replica"), (70, "checksum")]
)
def test_a_damaged_payload_stops_the_step_before_anything_changes(place: int, words: str) -> None:
    outcomes: dict[int, tuple[str, bool]] = {}

    def work(transport: LoopbackTransport) -> None:
        model = build()
        options = {"chunk": 16, "topk": 8, "on_bad_payload": "raise"}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=Tampering(transport, place), **options)
        for step in range(2):
            train_step(model, optimizer, step, transport.replica)
        before = flat(model).clone()
        momentum = [state["momentum"].clone() for state in optimizer.state.values()]
        try:
            train_step(model, optimizer, 2, transport.replica)
        except PayloadError as error:
            kept = zip(momentum, optimizer.state.values(), strict=True)
            same = all(torch.allclose(old, state["momentum"], atol=1e-5) for old, state in kept)
            outcomes[transport.replica] = str(error), same and torch.equal(flat(model), before)

    run_replicas(work, 3)
    assert sorted(outcomes) == [0, 2], "those who received the damaged payload, and only those, must stop"
    for message, unchanged in outcomes.values():
        assert "the payload of replica 1 (step 3, bucket 0)" in message
        assert words in message
        assert unchanged


@pytest.mark.parametrize("place", [0, 4, 24, 32, 70])
def test_a_damaged_payload_is_left_out_and_all_become_alike_again(
    place: int, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    models = [build().to(device) for _ in range(4)]

    def work(transport: LoopbackTransport) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        model = models[transport.replica]
        options = {"chunk": 16, "topk": 8, "check_drift_every": 0, "dense_below": 0}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=Tampering(transport, place), **options)
        for step in range(3):
            train_step(model, optimizer, step, transport.replica)
        optimizer.synchronize()
        after_damage = flat(model).clone()
        for step in range(3, 6):
            train_step(model, optimizer, step, transport.replica)
        # Where the device decides, a step that had to be repaired is known too late to be tried again.
        assert optimizer.num_steps == (6 if device.type == "cpu" else 5)
        assert optimizer.drift.num_differences == 1
        return [optimizer.refused_payloads[replica] for replica in range(4)], after_damage, flat(model).clone()

    outcomes = run_replicas(work, 4)
    others = [outcomes[replica] for replica in (0, 2, 3)]
    assert [refused for refused, _, _ in others] == [[0, 1, 0, 0]] * 3
    assert outcomes[1][0] == [0] * 4
    assert all(torch.equal(others[0][1], after) for _, after, _ in others), "the same decision, without a word"
    assert not torch.equal(outcomes[1][1], others[0][1]), "replica 1, which saw nothing bad, took another step"
    assert all(torch.equal(outcomes[0][2], after) for _, _, after in outcomes), "it is given what most hold"
    assert "the payload of replica 1 (step 3, bucket 0)" in caplog.text
    assert "it does not count at step 3" in caplog.text
    assert "replicas [1] hold other parameters than replicas [0, 2, 3]" in caplog.text


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_others_count_also_where_the_host_decides_about_kernels(backend: str, device: torch.device) -> None:
    """As at the first step, where gradients are compared."""

    class AtOnce(Tampering):
        def start_all_gather_(self, messages_RB: torch.Tensor, what: str) -> Any:
            return super().start_all_gather_(messages_RB, what.replace("step 1", "step 3"))

    def work(transport: LoopbackTransport) -> int:
        parameter = torch.nn.Parameter(torch.ones(16, 16, device=device))
        options = {"chunk": 16, "topk": 8, "dense_below": 0, "backend": backend}
        optimizer = DeMo([parameter], lr=0.1, transport=AtOnce(transport, 70), **options)
        parameter.grad = torch.randn(16, 16, generator=torch.Generator().manual_seed(transport.replica)).to(device)
        optimizer.step()
        assert optimizer.num_steps == 1
        return int((parameter != 1).sum())

    assert run_replicas(work, 3) == [256] * 3


def test_what_a_sound_bucket_says_counts_though_another_was_damaged() -> None:
    def work(transport: LoopbackTransport) -> tuple[int, int, torch.Tensor]:
        model = build()
        options = {"chunk": 16, "topk": 8, "num_buckets": 2, "on_nonfinite": "skip"}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=OneBucket(transport, 70), **options)
        for step in range(5):  # the step that is left out is the third again, damaged again, and repaired at the fourth
            images, labels = batch(step, transport.replica)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            if step == 2 and transport.replica == 1:
                for parameter in model.parameters():
                    parameter.grad.fill_(torch.nan)
            optimizer.step()
        return optimizer.num_steps, optimizer.num_skipped_steps, flat(model)

    results = run_replicas(work, 3)
    assert [result[:2] for result in results] == [(4, 1)] * 3
    assert all(torch.equal(results[0][2], result[2]) for result in results)


class OneBucket(Tampering):
    """Damages the first bucket only."""

    def start_all_gather_(self, messages_RB: torch.Tensor, what: str) -> Any:
        if what.endswith("bucket 1"):
            return self._inner.start_all_gather_(messages_RB, what)
        return super().start_all_gather_(messages_RB, what)


class Forging:
    """A wire that gives replica 2 another payload of replica 1 than the others get, with a checksum that fits."""

    def __init__(self, inner: LoopbackTransport) -> None:
        self._inner = inner
        self.replica, self.num_replicas, self.broadcast_ = inner.replica, inner.num_replicas, inner.broadcast_

    def start_all_gather_(self, messages_RB: torch.Tensor, what: str) -> Any:
        pending = self._inner.start_all_gather_(messages_RB, what)
        if self.replica == 2 and what.startswith("exchange of step 3"):
            wait = pending.wait

            def wait_and_forge() -> None:
                wait()
                messages_RB[1, 64:] = messages_RB[0, 64:]
                messages_RB[1].view(torch.int64)[7] = 0
                seal_(messages_RB[1], fused=False)

            pending.wait = wait_and_forge
        return pending


def test_replicas_that_received_different_bytes_notice_at_the_next_step() -> None:
    def work(transport: LoopbackTransport) -> list[str]:
        model, outcomes = build(), []
        options = {"chunk": 16, "topk": 8, "dense_below": 0, "values": "int8", "on_bad_payload": "raise"}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=Forging(transport), **options)
        for step in range(4):
            try:
                train_step(model, optimizer, step, transport.replica)
                outcomes.append("stepped")
            except AgreementError as error:
                outcomes.append(str(error))
        return outcomes

    for outcomes in run_replicas(work, 3):
        assert outcomes[:3] == ["stepped"] * 3
        assert "replica 0 has [received at the last step: " in outcomes[3]
        assert "replica 2 has [received at the last step: " in outcomes[3]


def test_replicas_that_received_different_bytes_become_alike_again() -> None:
    def work(transport: LoopbackTransport) -> torch.Tensor:
        model = build()
        options = {"chunk": 16, "topk": 8, "dense_below": 0, "values": "int8", "overlap": True}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=Forging(transport), **options)
        for step in range(5):
            train_step(model, optimizer, step, transport.replica)
        assert optimizer.num_steps == 5
        assert optimizer.drift.num_differences == 1
        return flat(model)

    first, *rest = run_replicas(work, 3)
    assert all(torch.equal(first, other) for other in rest)


def test_a_replica_that_fails_on_its_own_stops_all_at_once_and_training_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: dict[int, list[str]] = {0: [], 1: [], 2: []}
    encode = ChunkCodec.encode

    def work(transport: LoopbackTransport) -> torch.Tensor:
        model = build()
        options = {"chunk": 16, "topk": 8, "num_buckets": 2}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=transport, **options)
        for step in range(4):
            failing.active = transport.replica == 1 and step == 2
            try:
                train_step(model, optimizer, step, transport.replica)
                outcomes[transport.replica].append("stepped")
            except (MemoryError, ExchangeError) as error:
                outcomes[transport.replica].append(f"{type(error).__name__}: {error}")
        return flat(model)

    failing = threading.local()

    def encode_or_fail(self: ChunkCodec, *args: torch.Tensor) -> Any:
        if failing.active:
            raise MemoryError("no room")
        return encode(self, *args)

    monkeypatch.setattr(ChunkCodec, "encode", encode_or_fail)
    results = run_replicas(work, 3, timeout_seconds=20)
    gave_up = "ExchangeError: replica 1 gave up step 3 because of an error of its own"
    assert outcomes[0] == outcomes[2] == ["stepped", "stepped", gave_up, "stepped"]
    assert outcomes[1] == ["stepped", "stepped", "MemoryError: no room", "stepped"]
    for result in results:
        assert torch.equal(result, results[0])


def test_a_roll_call_with_foreign_bytes_is_refused() -> None:
    def garbage(message: torch.Tensor, what: str) -> torch.Tensor:
        return torch.stack([message, torch.full_like(message, 7)])

    with pytest.raises(AgreementError, match="replica 1 answered the roll call with other bytes"):
        hold_roll_call(["a"], garbage)


def test_replicas_in_threads_do_not_wait_for_each_other_outside_exchanges() -> None:
    barrier = threading.Barrier(2)
    assert run_replicas(lambda _: barrier.wait(5) >= 0, 2) == [True, True]
