"""The owner exchange, with replicas as threads: same bits, nothing lost, faults, checkpoints."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training import batch, build, flat, train, train_step
from thinwire import AgreementError, CheckpointError, DeMo, ExchangeError, PayloadError
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.exchange.signed import SignedTransport
from thinwire.wire.codec import ChunkCodec

# So few that owners keep something back, even of two replicas.
OPTIONS: dict[str, Any] = {"chunk": 16, "topk": 8, "dense_below": 60, "exchange": "owner", "owner_topk": 16}


def owned(optimizer: DeMo) -> list[Tensor]:
    return [state["owner_residual"].clone() for state in optimizer.state.values()]


def momenta(optimizer: DeMo) -> list[Tensor]:
    return [state["momentum"].clone() for state in optimizer.state.values()]


@pytest.mark.parametrize(("num_replicas", "update"), [(1, "sign"), (2, "muon"), (5, "sign"), (5, "adamw"), (40, "sign")])
def test_replicas_end_bit_identical(num_replicas: int, update: str) -> None:
    """40 is more than any stack has chunks."""

    def work(transport: LoopbackTransport) -> Tensor:
        return flat(train(transport.replica, 3, transport=transport, exchange="owner", update=update)[0])

    first, *rest = run_replicas(work, num_replicas)
    assert all(torch.equal(first, other) for other in rest)


def test_gradients_are_let_go_after_a_step() -> None:
    def work(transport: LoopbackTransport) -> None:
        model = build()
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=transport, exchange="owner", chunk=16, topk=8)
        train_step(model, optimizer, 0, transport.replica)
        gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
        optimizer.zero_grad()
        assert [gradient() for gradient in gradients] == [None] * len(gradients)

    run_replicas(work, 2)


def test_overlap_and_buckets_give_the_same_bits() -> None:
    def work(transport: LoopbackTransport, **options: Any) -> Tensor:
        return flat(train(transport.replica, 4, transport=transport, exchange="owner", **options)[0])

    plain = run_replicas(work, 3)[0]
    assert torch.equal(plain, run_replicas(lambda end: work(end, num_buckets=3), 3)[0])
    assert torch.equal(plain, run_replicas(lambda end: work(end, overlap=True), 3)[0])
    assert torch.equal(plain, run_replicas(lambda end: work(SignedTransport(end, bytes(16))), 3)[0])


def test_the_fused_backend_finds_the_same_bits_and_what_is_not_finite(device: torch.device) -> None:
    start = torch.randn(32, 32)

    def work(transport: LoopbackTransport, backend: str) -> Tensor:
        parameter = nn.Parameter(start.clone().to(device))
        options = {**OPTIONS, "dense_below": 0, "momentum_decay": 0.5, "backend": backend, "on_nonfinite": "skip"}
        optimizer = DeMo([parameter], 0.1, transport=transport, **options)
        generator = torch.Generator().manual_seed(transport.replica)
        for step in range(3):
            parameter.grad = torch.randn(32, 32, generator=generator).to(device)
            if step == 1 and transport.replica == 1:
                parameter.grad[3, 3] = torch.nan
            optimizer.step()
        assert (optimizer.num_steps, optimizer.num_skipped_steps) == (2, 1)
        return parameter.detach().cpu()

    fused = run_replicas(lambda end: work(end, "triton"), 2)
    assert torch.equal(fused[0], fused[1])
    plain = run_replicas(lambda end: work(end, "torch"), 2)[0]
    # On a GPU the transforms of the two are rounded differently, so that they select another coefficient here and there.
    assert (fused[0] == plain).float().mean() > (0.9 if device.type == "cuda" else 0.999999)


def test_owners_that_keep_everything_change_nothing() -> None:
    """With float values, and as many kept as there are, an owner only passes the mean on."""

    def work(transport: LoopbackTransport, **options: Any) -> Tensor:
        options |= {"values": "float32", "momentum_decay": 0.9}
        return flat(train(transport.replica, 4, transport=transport, **options)[0])

    gathered = run_replicas(work, 3)[0]
    assert torch.equal(gathered, run_replicas(lambda end: work(end, exchange="owner", owner_topk=256), 3)[0])
    assert not torch.equal(gathered, run_replicas(lambda end: work(end, exchange="owner", owner_topk=16), 3)[0])


@pytest.mark.parametrize("values", ["float32", "bfloat16", "int8", "int4", "sign_scale"])
def test_nothing_is_lost_between_sender_owner_and_receivers(values: str) -> None:
    """Without decay, the mean of all gradients is what was applied, and what is left with senders and owners."""
    shape, num_steps, num_replicas, lr = (37, 50), 6, 3, 0.5

    def work(transport: LoopbackTransport) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        options = {"values": values, "update": "sgd", "combine": "mean_over_replicas", "momentum_decay": 1.0}
        optimizer = DeMo([parameter], lr, transport=transport, exact_decode=False, **{**OPTIONS, **options})
        generator, total = torch.Generator().manual_seed(transport.replica), torch.zeros(shape, dtype=torch.float64)
        for _ in range(num_steps):
            parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
            total += parameter.grad
            optimizer.step()
        state = optimizer.state[parameter]
        return total, parameter.detach(), state["momentum"], state["owner_residual"]

    totals, parameters, kept, residuals = zip(*run_replicas(work, num_replicas), strict=True)
    left_CE = sum(kept).double() / num_replicas + torch.cat(residuals)
    # What is left is momentum of the mean gradient: an optimizer that starts with it, and sends all of it, applies it.
    rest = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    options = {**OPTIONS, "topk": 256, "momentum_decay": 1.0, "momentum_dtype": "float64"}
    last = DeMo([rest], lr, update="sgd", values="float32", exact_decode=False, **options)
    last.state[rest]["momentum"].copy_(left_CE)
    rest.grad = torch.zeros_like(rest)
    last.step()
    assert torch.allclose(parameters[0] + rest.detach(), -lr * sum(totals) / num_replicas, atol=1e-4)
    assert torch.cat(residuals).abs().max() > 0.01, "owners kept nothing back, so this test shows little"


def test_received_bytes_do_not_grow_with_the_number_of_replicas() -> None:
    def work(transport: LoopbackTransport, exchange: str) -> int:
        parameter = nn.Parameter(torch.randn(512, 512))
        optimizer = DeMo([parameter], transport=transport, exchange=exchange)
        for _ in range(2):
            parameter.grad = torch.randn(512, 512)
            optimizer.step()
        count = optimizer.traffic.last_step
        assert count.num_exchanges == (2 if exchange == "owner" else 1)
        return count.received_bytes

    received = {
        (exchange, number): run_replicas(lambda end, exchange=exchange: work(end, exchange), number)[0]
        for exchange in ("owner", "all_gather")
        for number in (2, 32)
    }
    assert received["all_gather", 32] == 31 * received["all_gather", 2]
    assert received["owner", 32] < 3 * received["owner", 2]
    assert received["owner", 32] < received["all_gather", 32] / 2


class Tampering:
    """Damages what replica 1 sends at step 3: its slice for replica 2, or its answer, on its way to all."""

    def __init__(self, inner: LoopbackTransport, what: str) -> None:
        self._inner, self._what = inner, what
        self.replica, self.num_replicas, self.broadcast_ = inner.replica, inner.num_replicas, inner.broadcast_

    def start_all_to_all_(self, sent_RB: Tensor, received_RB: Tensor, what: str) -> Any:
        if self.replica == 1 and self._what == "slice" and what.startswith("exchange of step 3"):
            sent_RB = sent_RB.clone()
            sent_RB[2, 70] ^= 1
        return self._inner.start_all_to_all_(sent_RB, received_RB, what)

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Any:
        if self.replica == 1 and self._what == "answer" and what.startswith("exchange of step 3"):
            messages_RB[1, 70] ^= 1
            pending = self._inner.start_all_gather_(messages_RB, what)
            messages_RB[1, 70] ^= 1
            return pending
        return self._inner.start_all_gather_(messages_RB, what)


def test_a_damaged_slice_is_left_out_by_its_owner_alone_and_all_stay_alike(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: LoopbackTransport) -> tuple[list[int], Tensor]:
        model = build()
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=Tampering(transport, "slice"), **OPTIONS)
        for step in range(5):
            train_step(model, optimizer, step, transport.replica)
        assert (optimizer.num_steps, optimizer.drift.num_differences) == (5, 0)
        return [optimizer.refused_payloads[replica] for replica in range(4)], flat(model)

    outcomes = run_replicas(work, 4)
    assert [refused for refused, _ in outcomes] == [[0] * 4, [0] * 4, [0, 1, 0, 0], [0] * 4]
    assert all(torch.equal(outcomes[0][1], after) for _, after in outcomes)
    assert "the payload of replica 1 (step 3, bucket 0) has checksum" in caplog.text


def test_a_damaged_slice_stops_all_if_asked_to_and_nothing_is_changed() -> None:
    def work(transport: LoopbackTransport) -> tuple[str, bool]:
        model, options = build(), {**OPTIONS, "on_bad_payload": "raise"}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=Tampering(transport, "slice"), **options)
        for step in range(2):
            train_step(model, optimizer, step, transport.replica)
        before, kept, left = flat(model).clone(), momenta(optimizer), owned(optimizer)
        with pytest.raises((PayloadError, ExchangeError)) as caught:
            train_step(model, optimizer, 2, transport.replica)
        same = all(torch.allclose(old, new, atol=1e-5) for old, new in zip(kept, momenta(optimizer), strict=True))
        same &= all(torch.equal(old, new) for old, new in zip(left, owned(optimizer), strict=True))
        return str(caught.value), same and torch.equal(flat(model), before)

    outcomes = run_replicas(work, 3)
    assert "the payload of replica 1 (step 3, bucket 0) has checksum" in outcomes[2][0]
    for message, _ in outcomes[:2]:
        assert "replica 2 gave up step 3" in message
    assert all(unchanged for _, unchanged in outcomes)


def test_what_went_to_an_owner_whose_answer_was_damaged_returns_to_the_momentum() -> None:
    def work(transport: LoopbackTransport) -> tuple[float, float, Tensor]:
        model, options = build(), {**OPTIONS, "values": "float32", "check_drift_every": 0}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=Tampering(transport, "answer"), **options)
        sizes = []
        for step in range(5):
            train_step(model, optimizer, step, transport.replica)
            sizes.append(sum(float(momentum.square().sum()) for momentum in momenta(optimizer)))
        assert optimizer.num_steps == 5
        return sizes[2] / sizes[1], sizes[3] / sizes[2], flat(model)

    outcomes = run_replicas(work, 4)
    growth = [outcome[0] for outcome in outcomes]
    assert all(growth[replica] > growth[1] + 0.1 for replica in (0, 2, 3)), "a fourth of the chunks got everything back"
    assert all(torch.equal(outcomes[0][2], outcome[2]) for outcome in outcomes), "replica 1 is given what most hold"


def test_a_gradient_that_is_not_finite_is_one_decision_of_all_and_owners_forget_it() -> None:
    def work(transport: LoopbackTransport) -> tuple[Tensor, bool]:
        model = build()
        options = {**OPTIONS, "on_nonfinite": "skip", "num_buckets": 2}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=transport, **options)
        for step in range(2):
            train_step(model, optimizer, step, transport.replica)
        left = owned(optimizer)
        images, labels = batch(2, transport.replica)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        if transport.replica == 1:
            model.wide.weight.grad[3, 3] = torch.nan
        optimizer.step()
        same = all(torch.equal(old, new) for old, new in zip(left, owned(optimizer), strict=True))
        assert optimizer.num_skipped_steps == 1
        train_step(model, optimizer, 3, transport.replica)
        return flat(model), same

    results = run_replicas(work, 3)
    assert all(torch.equal(results[0][0], parameters) and same for parameters, same in results)


@pytest.mark.parametrize("where", ["sending", "answering"])
def test_a_replica_that_fails_on_its_own_stops_all_at_once_and_training_can_go_on(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, outcomes = ChunkCodec.encode, {}
    failing: dict[int, int] = {}

    def work(transport: LoopbackTransport) -> Tensor:
        model, said = build(), []
        options = {**OPTIONS, "dense_below": 0, "num_buckets": 2, "backend": "torch"}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=transport, **options)
        for step in range(4):
            if transport.replica == 1 and step == 2:
                sent_by = {bucket.stacks[0].codec for bucket in optimizer.plan.buckets}
                answered_by = {bucket.stacks[0].codec for bucket in optimizer.plan.answers.buckets}  # type: ignore[union-attr]
                failing[0] = 1
                chosen.update(sent_by if where == "sending" else answered_by)
            try:
                train_step(model, optimizer, step, transport.replica)
                said.append("stepped")
            except (MemoryError, ExchangeError) as error:
                said.append(f"{type(error).__name__}: {error}")
        outcomes[transport.replica] = said
        return flat(model)

    chosen: set[ChunkCodec] = set()

    def encode_or_fail(self: ChunkCodec, *arguments: Any) -> Any:
        if self in chosen and failing.pop(0, None):
            raise MemoryError("no room")
        return encode(self, *arguments)

    monkeypatch.setattr(ChunkCodec, "encode", encode_or_fail)
    results = run_replicas(work, 2)
    failed = [said[2] for said in outcomes.values()]
    assert sorted(one.split(":")[0] for one in failed) == ["ExchangeError", "MemoryError"]
    assert any("gave up step 3" in one for one in failed)
    assert all(said[3] == "stepped" for said in outcomes.values())
    assert torch.equal(results[0], results[1])


def test_another_exchange_on_one_replica_is_named_on_all() -> None:
    def work(transport: LoopbackTransport) -> str:
        exchange = "owner" if transport.replica == 1 else "all_gather"
        with pytest.raises(AgreementError) as caught:
            DeMo(build().parameters(), transport=transport, exchange=exchange)
        return str(caught.value)

    for message in run_replicas(work, 2):
        assert "exchange: owner, which keeps [256] coefficients" in message


@pytest.mark.parametrize("exchange", ["all_gather", "owner"])
def test_who_gives_up_while_another_changes_its_plan_is_named_and_training_can_go_on(exchange: str) -> None:
    def work(transport: LoopbackTransport) -> list[str]:
        model = build()
        options = {"chunk": 16, "topk": 8, "exchange": exchange}
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=transport, **options)  # type: ignore[arg-type]
        said = []
        for step in range(4):
            if step == 1 and transport.replica == 0:
                optimizer.param_groups[0]["topk"] = 16
            if step == 1 and transport.replica == 1:
                optimizer._local.encode_ = _fail  # type: ignore[method-assign]
            try:
                train_step(model, optimizer, step, transport.replica)
                said.append("")
            except (MemoryError, ExchangeError) as error:
                said.append(str(error))
            if step == 1 and transport.replica == 0:
                optimizer.param_groups[0]["topk"] = 8
            if step == 1 and transport.replica == 1:
                del optimizer._local.encode_
        return said

    everyone = run_replicas(work, 3, timeout_seconds=10)
    gave_up = "replica 1 gave up step 2 because of an error of its own"
    assert [said[1] for said in everyone] == [gave_up, "no room", gave_up]
    assert all(said[::2] == [""] * 2 and said[3] == "" for said in everyone)


def _fail(*_: object) -> None:
    raise MemoryError("no room")


def test_a_plan_may_change_on_the_way_if_all_change_it_and_else_all_stop() -> None:
    def work(transport: LoopbackTransport, who: tuple[int, ...]) -> Tensor | str:
        model = build()
        model.wide.requires_grad_(False)
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=transport, num_buckets=2, **OPTIONS)
        for step in range(4):
            if step == 2 and transport.replica in who:
                model.wide.requires_grad_(True)
            try:
                train_step(model, optimizer, step, transport.replica)
            except AgreementError as error:
                return str(error)
        return flat(model)

    first, second = run_replicas(lambda end: work(end, (0, 1)), 2)
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert torch.equal(first, second)
    for message in run_replicas(lambda end: work(end, (0,)), 2):
        assert "number of tensors" in str(message)


def test_a_checkpoint_has_the_owners_residual_and_goes_on_exactly() -> None:
    def work(transport: LoopbackTransport) -> bool:
        model, optimizer, _ = train(transport.replica, 4, transport=transport, **OPTIONS)
        saved = optimizer.state_dict()
        saved = {**saved, "state": {key: {n: t.clone() for n, t in one.items()} for key, one in saved["state"].items()}}
        other = build(7)
        other.load_state_dict(model.state_dict())
        resumed = DeMo(other.named_parameters(), lr=1e-2, transport=transport, sync_parameters=False, **OPTIONS)
        resumed.load_state_dict(saved)
        for step in (4, 5):
            train_step(model, optimizer, step, transport.replica)
        for step in (4, 5):
            train_step(other, resumed, step, transport.replica)
        assert any(residual.any() for residual in owned(resumed))
        return torch.equal(flat(model), flat(other))

    assert all(run_replicas(work, 3))


def test_a_checkpoint_of_the_other_exchange_is_refused_unless_told_otherwise() -> None:
    def work(transport: LoopbackTransport) -> None:
        _, optimizer, _ = train(transport.replica, 2, transport=transport, **OPTIONS)
        options = {**OPTIONS, "exchange": "all_gather"}
        _, other, _ = train(transport.replica, 0, transport=transport, **options)
        with pytest.raises(CheckpointError, match="exchange: owner"):
            other.load_state_dict(optimizer.state_dict())
        other.load_state_dict(optimizer.state_dict(), residual="keep")
        _, zeroed, _ = train(transport.replica, 2, transport=transport, **OPTIONS)
        zeroed.load_state_dict(optimizer.state_dict(), residual="zero")
        assert not any(residual.any() for residual in owned(zeroed))

    run_replicas(work, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exchange": "ring"}, r"exchange='ring'"),
        ({"exchange": "owner", "owner_topk": 0}, r"owner_topk"),
        ({"exchange": "owner", "delay": 1}, r"exchange='owner' does not go with delay=1"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeMo(build().parameters(), **options)


def test_auto_takes_owners_where_there_are_many_replicas() -> None:
    def work(transport: LoopbackTransport) -> str:
        return DeMo(build().parameters(), transport=transport, exchange="auto").exchange

    assert set(run_replicas(work, 19)) == {"all_gather"}
    assert set(run_replicas(work, 20)) == {"owner"}
