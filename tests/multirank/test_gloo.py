"""Real processes, joined by gloo."""

import os
import re
import signal
import time
import warnings
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks
from tests.training import batch, build, flat, train, train_step
from thinwire import AgreementError, DeMo, ExchangeError, NonFiniteGradientError, ThinwireError, disable_gradient_sync
from thinwire.exchange.loopback import LoopbackTransport, run_replicas

NUM_STEPS = 12


def _train(rank: int, options: dict[str, Any]) -> tuple[Tensor, list[float], list[int]]:
    model, optimizer, losses = train(rank, NUM_STEPS, **options)
    signed, signing, _ = train(rank, NUM_STEPS, secret=b"sixteen bytes...", **options)
    assert torch.equal(flat(signed), flat(model)), "signing has changed the outcome"
    traffic = optimizer.traffic
    tags = 32 * traffic.total.num_exchanges
    assert signing.traffic.total.sent_bytes == traffic.total.sent_bytes + tags
    secret = bytes([65 + rank]) * 16
    said = _outcome(lambda: DeMo(build().parameters(), secret=secret, timeout_seconds=20))
    assert said.startswith(f"StrangersError: replica {rank} does not have the same key as replicas [")
    counts = [traffic.last_step.sent_bytes, traffic.last_step.received_bytes, traffic.total.sent_bytes]
    num_buckets = len(optimizer.plan.buckets)
    return flat(model), losses, [*counts, optimizer.plan.payload_bytes, traffic.last_step.num_exchanges, num_buckets]


@pytest.mark.parametrize(
    ("num_ranks", "options"), [(2, {}), (4, {"num_buckets": 2, "update": "adamw", "weight_decay": 0.1})]
)
def test_ranks_end_bit_identical_and_equal_to_loopback(num_ranks: int, options: dict[str, Any]) -> None:
    results = run_ranks(_train, num_ranks, options)

    def in_one_process(transport: LoopbackTransport) -> tuple[Tensor, list[float]]:
        model, _, losses = train(transport.replica, NUM_STEPS, transport=transport, **options)
        return flat(model), losses

    alike = run_replicas(in_one_process, num_ranks)
    for (parameters, losses, _), (others, other_losses) in zip(results, alike, strict=True):
        assert torch.equal(parameters, results[0][0]), "ranks differ"
        assert torch.equal(parameters, others), "gloo and loopback differ"
        assert losses == other_losses
    assert len({tuple(losses) for _, losses, _ in results}) == num_ranks, "ranks saw the same data"
    for _, _, (sent, received, total_sent, payload, num_exchanges, num_buckets) in results:
        assert sent == payload
        assert received == (num_ranks - 1) * sent
        assert total_sent == NUM_STEPS * sent
        assert num_exchanges == num_buckets, "one collective per bucket, and no other"
        assert num_buckets == (2 if "num_buckets" in options else 1)


def _train_with_owners(rank: int) -> tuple[Tensor, Any]:
    model, optimizer, _ = train(rank, 6, exchange="owner", overlap=True, num_buckets=2)
    return flat(model), asdict(optimizer.traffic.last_step)


def test_owners_end_bit_identical_and_equal_to_loopback() -> None:
    def in_one_process(transport: LoopbackTransport) -> tuple[Tensor, Any]:
        options = {"exchange": "owner", "num_buckets": 2}
        model, optimizer, _ = train(transport.replica, 6, transport=transport, **options)
        return flat(model), asdict(optimizer.traffic.last_step)

    results, alike = run_ranks(_train_with_owners, 3), run_replicas(in_one_process, 3)
    assert all(torch.equal(parameters, alike[0][0]) for parameters, _ in [*results, *alike])
    for name in ("sent_bytes", "received_bytes", "num_exchanges"):
        assert all(count[name] == alike[0][1][name] for _, count in results)


def _train_with_unused(rank: int) -> Tensor:
    model = build(rank)
    optimizer = DeMo(model.parameters(), lr=1e-2, chunk=16, topk=8)
    for step in range(6):
        optimizer.zero_grad()
        images, labels = batch(step, rank)
        output = model.out(model.norm(torch.zeros(8, 37))) if rank == step % 2 else model(images)
        nn.functional.cross_entropy(output, labels).backward()
        optimizer.step()
    return flat(model)


def test_gradients_missing_on_some_ranks_only() -> None:
    results = run_ranks(_train_with_unused, 2)
    assert torch.equal(*results)


def _outcome(work: Any) -> str:
    try:
        work()
    except (ThinwireError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _differ(rank: int, kind: str) -> str:
    shape = (8, 9) if kind == "shape" and rank == 1 else (8, 8)
    dtype = torch.bfloat16 if kind == "dtype" and rank == 1 else torch.float32
    parameters = [("weight", nn.Parameter(torch.zeros(shape, dtype=dtype))), ("bias", nn.Parameter(torch.zeros(4)))]
    if kind == "order" and rank == 1:
        parameters.reverse()
    if kind == "number" and rank == 1:
        parameters.pop()
    options: dict[str, Any] = {"topk": 3 if kind == "topk" and rank == 1 else 4}
    if kind == "buckets":
        options["num_buckets"] = 1 + 30 * rank
    if kind == "frozen":
        parameters.append(("frozen", nn.Parameter(torch.zeros(3 + 2 * rank), requires_grad=False)))
    if kind == "combine" and rank == 1:
        options["combine"] = "mean_over_senders"
    if kind == "exchange" and rank == 1:
        options["exchange"] = "owner"

    def work() -> None:
        optimizer = DeMo(parameters, timeout_seconds=20, **options)
        for _, parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        if kind == "lr" and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()

    return _outcome(work)


DIFFERENCES = {
    "shape": r"shape \(8, 8\), torch.float32, group 0 # weight.*shape \(8, 9\), torch.float32, group 0 # weight",
    "dtype": "torch.float32.*torch.bfloat16",
    "order": r"# weight.*# bias",
    "buckets": r"bucket 0: \d+ bytes.*bucket 0: \d+ bytes",
    "frozen": r"frozen: shape \(3,\).*frozen: shape \(5,\)",
    "number": "number of tensors: 2.*number of tensors: 1",
    "topk": "group 0 topk: 4.*group 0 topk: 3",
    "combine": "mean_over_replicas.*mean_over_senders",
    "exchange": r"replica 0 has \[nothing\], replica 1 has \[exchange: owner",
    "lr": "group 0 lr: 0.001.*group 0 lr: 0.5",
}


def _differ_in_all_ways(rank: int) -> dict[str, str]:
    return {kind: _differ(rank, kind) for kind in DIFFERENCES}


def test_what_differs_is_named_on_every_rank() -> None:
    outcomes = run_ranks(_differ_in_all_ways, 2)
    assert outcomes[0] == outcomes[1]
    for kind, words in DIFFERENCES.items():
        assert outcomes[0][kind].startswith(AgreementError.__name__), kind
        assert re.search(words, outcomes[0][kind]), kind


def _nonfinite(rank: int, policy: str) -> tuple[str, Tensor, Tensor, int]:
    model, optimizer, _ = train(rank, 3, on_nonfinite=policy)
    if rank == 1:
        model.wide.weight.grad[0, 0] = torch.nan
    before, momenta = flat(model).clone(), [optimizer.state[p]["momentum"].clone() for p in model.parameters()]
    outcome = _outcome(optimizer.step)
    assert torch.equal(flat(model), before)
    for parameter, momentum in zip(model.parameters(), momenta, strict=True):
        now = optimizer.state[parameter]["momentum"]
        assert torch.equal(now, momentum) if rank == 1 else torch.allclose(now, momentum, atol=1e-6)
    train_step(model, optimizer, 9, rank)
    return outcome, flat(model), before, optimizer.num_skipped_steps


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_non_finite_gradient_on_one_rank_is_one_decision_on_all(policy: str) -> None:
    results = run_ranks(_nonfinite, 2, policy)
    for outcome, after, before, num_skipped in results:
        if policy == "raise":
            assert outcome.startswith(NonFiniteGradientError.__name__)
            assert "replica 1 has NaN or Inf in the gradient of wide.weight at step 4" in outcome
        else:
            assert (outcome, num_skipped) == ("no error", 1)
        assert not torch.equal(after, before), "training did not go on"
        assert torch.equal(after, results[0][1])


def _sparse_on_one(rank: int) -> str:
    embedding = nn.Embedding(10, 4, sparse=rank == 1)
    optimizer = DeMo(embedding.parameters())
    embedding(torch.tensor([rank, 5])).sum().backward()
    return _outcome(optimizer.step)


def test_a_sparse_gradient_on_one_rank_is_an_error_on_all() -> None:
    for outcome in run_ranks(_sparse_on_one, 2):
        assert outcome == "TypeError: replica 1 has a sparse gradient for parameter 0 of group 0; DeMo needs dense gradients"


def _die(rank: int, moment: str) -> tuple[str, float, bool, bool] | None:
    exchange = "owner" if moment == "owing an answer" else "all_gather"
    pair = dist.new_group([0, 2])
    if rank != 1:
        DeMo(build().parameters(), process_group=pair)  # one more than rank 1 has, which is not to be accused for it
    model, optimizer, _ = train(rank, 3, timeout_seconds=3, exchange=exchange)
    images, labels = batch(7, rank)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    before, momenta = flat(model).clone(), [optimizer.state[p]["momentum"].clone() for p in model.parameters()]
    if rank == 2:
        if moment == "late":
            time.sleep(10)
        if moment in ("mid-step", "owing an answer"):
            optimizer._transport.start_all_gather_ = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            optimizer.step()
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    outcome = _outcome(optimizer.step)
    untouched = torch.equal(flat(model), before)
    kept = all(
        torch.allclose(optimizer.state[p]["momentum"], m, atol=1e-5)
        for p, m in zip(model.parameters(), momenta, strict=True)
    )
    return outcome, time.monotonic() - began, untouched, kept


@pytest.mark.parametrize("moment", ["before", "mid-step", "late", "owing an answer"])
def test_a_rank_that_dies_or_lags_is_named_in_time_and_nothing_is_changed(moment: str) -> None:
    results = run_ranks(_die, 3, moment, may_die=True, timeout_seconds=60)
    for outcome, seconds, untouched, kept in results[:2]:
        assert outcome.startswith(ExchangeError.__name__), outcome
        assert "waited for replicas [2]" in outcome
        assert "GLHF" not in outcome
        assert seconds < 20
        assert untouched
        assert kept


def _ddp(rank: int, sync: bool, is_compiled: bool = False) -> tuple[str, Tensor, int]:
    model: Any = DistributedDataParallel(build(rank))
    if is_compiled:
        model = torch.compile(model, backend="eager")
    if not sync:
        assert disable_gradient_sync(model) is model
    optimizer = DeMo(model.parameters(), lr=1e-2, chunk=16, topk=8)

    def work() -> None:
        for step in range(3):
            train_step(model, optimizer, step, rank)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _outcome(work), flat(model), optimizer.num_steps


def test_ddp_with_gradient_sync_is_refused_at_the_first_step() -> None:
    for outcome, _, num_steps in run_ranks(_ddp, 2, True):
        assert "thinwire.disable_gradient_sync(ddp_model)" in outcome
        assert num_steps == 0


@pytest.mark.parametrize("is_compiled", [False, True])
def test_ddp_without_gradient_sync_trains(is_compiled: bool) -> None:
    results = run_ranks(_ddp, 2, False, is_compiled)
    for outcome, parameters, num_steps in results:
        assert (outcome, num_steps) == ("no error", 3)
        assert torch.equal(parameters, results[0][1])


def _same_data(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = build()
        optimizer = DeMo(model.parameters(), lr=1e-2)
        for step in range(2):
            train_step(model, optimizer, step, replica=0)
    return [str(warning.message) for warning in caught if "same gradients" in str(warning.message)]


def test_replicas_that_read_the_same_data_are_warned_once() -> None:
    for messages in run_ranks(_same_data, 2):
        assert len(messages) == 1


def _subgroup(rank: int) -> Tensor:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model, _, _ = train(rank, 4, process_group=pairs[rank % 2])
    return flat(model)


def test_any_process_group_will_do() -> None:
    results = run_ranks(_subgroup, 4)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1])


def _late_group(rank: int) -> Tensor:
    model, optimizer, _ = train(rank, 2, sync_parameters=False)
    extra = nn.Parameter(torch.full((4, 4), float(rank)))
    optimizer.add_param_group({"params": [("extra", extra)]})
    extra.grad = torch.randn(4, 4)
    optimizer.step()
    return flat(model)


def test_parameters_may_start_apart_and_groups_may_come_later() -> None:
    results = run_ranks(_late_group, 2)
    assert not torch.equal(*results)


def _unfreeze(rank: int, ranks: list[int]) -> tuple[str, Tensor]:
    model = build(rank)
    model.wide.weight.requires_grad_(False)
    optimizer = DeMo(model.parameters(), lr=1e-2, chunk=16, topk=8, num_buckets=2, timeout_seconds=20)

    def work() -> None:
        for step in range(4):
            if step == 2 and rank in ranks:
                model.wide.weight.requires_grad_(True)
            train_step(model, optimizer, step, rank)

    return _outcome(work), flat(model)


def test_a_plan_may_change_on_the_way_if_all_change_it() -> None:
    results = run_ranks(_unfreeze, 2, [0, 1])
    assert [outcome for outcome, _ in results] == ["no error"] * 2
    assert torch.equal(results[0][1], results[1][1])


def test_a_plan_that_changes_on_one_rank_is_named_on_all() -> None:
    outcomes = [outcome for outcome, _ in run_ranks(_unfreeze, 2, [1])]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].startswith(
        "AgreementError: the replicas do not agree: replica 0 has [number of tensors: 8], replica 1 "
    )


def _drift(rank: int) -> tuple[torch.Tensor, int, bool]:
    model = build(rank)
    optimizer = DeMo(model.named_parameters(), lr=1e-2, chunk=16, topk=8, check_drift_every=2, on_drift="repair")
    for step in range(5):
        train_step(model, optimizer, step, rank)
        if step == 3 and rank == 2:
            model.wide.weight.data.view(-1).view(torch.int32)[5] ^= 1 << 10
    return flat(model), optimizer.drift.num_differences, optimizer.check_drift()


def test_a_flipped_bit_on_one_of_four_ranks_is_repaired() -> None:
    everyone = run_ranks(_drift, 4)
    for parameters, num_differences, is_same in everyone:
        assert torch.equal(parameters, everyone[0][0])
        assert (num_differences, is_same) == (1, True)
