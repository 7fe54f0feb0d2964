"""Islands are replicas: what they come to is plain DeMo on the means of their gradients, bit for bit if these are exact."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.islands import OPTIONS, SHAPES, Shapes, mean_gradients, run_islands, set_gradients, train_plain
from tests.training import flat
from thinwire import (
    AgreementError,
    CheckpointError,
    DeMo,
    ExchangeError,
    NonFiniteGradientError,
    ThinwireError,
    shared_island,
)
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.redistribution import assemble
from thinwire.wire.payload import HEADER_BYTES


def steps(transport: LoopbackTransport, model: Shapes, optimizer: DeMo, first: int = 0, last: int = 3) -> torch.Tensor:
    for step in range(first, last):
        set_gradients(model, step, transport.replica)
        optimizer.step()
    return flat(model)


CASES: list[tuple[int, int, dict[str, Any]]] = [
    (2, 2, {}),
    (2, 3, {"update": "muon", "num_buckets": 3}),
    (3, 2, {"update": "adamw", "values": "int8", "num_buckets": 4}),
    (1, 4, {"update": "lion", "layout": "published", "exact_decode": False}),
    (2, 8, {"update": "sgd", "values": "float32", "secret": b"sixteen bytes..."}),
    (2, 4, {"update": "sgd", "values": "float32", "balance": 0.9}),
    (3, 1, {}),
]


@pytest.mark.parametrize(("num_islands", "size", "options"), CASES)
def test_islands_equal_replicas_with_the_mean_gradients(num_islands: int, size: int, options: dict[str, Any]) -> None:
    """Means of two, four and eight small numbers are exact; that of three is the same sum, divided as here."""
    expected, plain = train_plain(num_islands, size, **{**options, "secret": None})

    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> tuple[torch.Tensor, DeMo]:
        return steps(transport, model, optimizer), optimizer

    results = run_islands(work, num_islands, size, **options)
    for found, _ in results:
        assert torch.equal(found, expected)
    island = [optimizer for _, optimizer in results[:size]]
    assert [optimizer.num_replicas for optimizer in island] == [num_islands] * size
    _check_bytes(island, plain, 32 if "secret" in options else 0)


def test_islands_may_exchange_by_owners() -> None:
    expected, plain = train_plain(3, 2, exchange="owner")

    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> tuple[torch.Tensor, DeMo]:
        return steps(transport, model, optimizer), optimizer

    results = run_islands(work, 3, 2, exchange="owner")
    assert all(torch.equal(found, expected) for found, _ in results)
    assert {optimizer.exchange for _, optimizer in results} == {plain.exchange} == {"owner"}
    elements = [sum(state["owner_residual"].numel() for state in o.state.values()) for _, o in results]
    assert sum(elements) == sum(state["momentum"].numel() for state in plain.state.values())


def test_the_exchange_may_ask_for_islands() -> None:
    def work(transport: LoopbackTransport) -> tuple[str, int]:
        optimizer = DeMo(Shapes().parameters(), transport=transport, exchange="hierarchical", **OPTIONS)
        return optimizer.exchange, optimizer.num_replicas

    assert run_replicas(work, 3) == [("hierarchical", 1)] * 3, "threads of one process are on one host"


def test_what_is_moved_at_once_is_bounded_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = train_plain(2, 3)
    counts = []

    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> torch.Tensor:
        found = steps(transport, model, optimizer)
        counts.append(optimizer.traffic.inside_last_step.num_exchanges)
        return found

    assert all(torch.equal(found, expected) for found in run_islands(work, 2, 3))
    assert set(counts) == {4}, "two votes, one average, the parameters"
    monkeypatch.setattr(shared_island, "MOST_ELEMENTS", 500)
    assert all(torch.equal(found, expected) for found in run_islands(work, 2, 3))
    num_elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    assert max(counts) >= 2 + 2 * num_elements // 500


def _check_bytes(island: list[DeMo], plain: DeMo, tag_bytes: int) -> None:
    """One payload per island crosses, in parts: the headers of the others, and a little padding, come on top."""
    num_buckets, num_others = len(plain.plan.buckets), island[0].num_replicas - 1
    sent = [optimizer.traffic.last_step.sent_bytes for optimizer in island]
    if num_others:
        assert sent == [optimizer.plan.payload_bytes + num_buckets * tag_bytes for optimizer in island]
        assert [o.traffic.last_step.received_bytes for o in island] == [num_others * each for each in sent]
    else:
        assert sent == [0] * len(island)
    extra = sum(o.plan.payload_bytes for o in island) - plain.plan.payload_bytes
    assert 0 <= extra - num_buckets * (len(island) - 1) * HEADER_BYTES <= num_buckets * len(island) * 8
    elements = [sum(state["momentum"].numel() for state in optimizer.state.values()) for optimizer in island]
    assert sum(elements) == sum(state["momentum"].numel() for state in plain.state.values())
    whole = plain.param_groups[0]["update"] == "muon" or plain.param_groups[0]["balance"] > 0
    largest = 90 * 16 if whole else 16 * 33
    assert max(elements) <= sum(elements) / len(island) + 2 * largest
    inside = island[0].traffic.inside_last_step
    assert (inside.sent_bytes > 0) == (len(island) > 1)


def test_bfloat16_gradients_are_added_up_in_float32() -> None:
    """1 + 2^-8 is no bfloat16 number, but the mean of 2 and 2^-7 must not become 1 before it reaches the momentum."""

    def work(transport: LoopbackTransport) -> tuple[int, float]:
        weight = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
        optimizer = DeMo([weight], islands=2, transport=transport, values="float32", dense_below=9)
        weight.grad = torch.full_like(weight, 2.0 if transport.replica == 0 else 2**-7)
        optimizer.step()
        (momentum,) = (state["momentum"] for state in optimizer.state.values())
        return optimizer.traffic.inside_last_step.sent_bytes, float(momentum.sum())

    kept = 1 - 32 / 64**2  # what a dense tensor keeps of its momentum
    (sent_0, sum_0), (sent_1, sum_1) = run_replicas(work, 2)
    assert sum_0 + sum_1 == pytest.approx(8 * (1 + 2**-8) * kept, rel=1e-6)
    assert sent_0 + sent_1 == 16 * 2 + 2 * 16 + 2 * 48, (
        "bfloat16, padded to 16 elements; two rows of 16 bytes; two votes each"
    )


def test_a_gradient_that_is_missing_on_some_ranks_counts_as_zero() -> None:
    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> torch.Tensor:
        for step in range(3):
            set_gradients(model, step, transport.replica)
            for place, parameter in enumerate(model.tensors):
                if (place + transport.replica + step) % 3 == 0 or place == 4:
                    parameter.grad = None
            optimizer.step()
        return flat(model)

    def filled(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> torch.Tensor:
        for step in range(3):
            set_gradients(model, step, transport.replica)
            for place, parameter in enumerate(model.tensors):
                if (place + transport.replica + step) % 3 == 0 or place == 4:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        return flat(model)

    options = {"num_buckets": 2, "check_drift_every": 2}
    missing, zeros = run_islands(work, 2, 2, **options), run_islands(filled, 2, 2, **options)
    assert all(torch.equal(found, zeros[0]) for found in missing)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_nan_on_one_rank_is_one_decision_of_all(policy: str) -> None:
    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> tuple[str, int, torch.Tensor]:
        said = ""
        for step in range(3):
            set_gradients(model, step, transport.replica)
            if step == 1 and transport.replica == 2:
                model.tensors[4].grad[0, 0] = torch.nan
            try:
                optimizer.step()
            except NonFiniteGradientError as error:
                said = str(error)
        return said, optimizer.num_steps, flat(model)

    results = run_islands(work, 2, 2, on_nonfinite=policy, num_buckets=2)
    for said, num_steps, found in results:
        assert num_steps == 2
        assert torch.equal(found, results[0][2])
        assert said.startswith("replica 1 has NaN or Inf in the gradient of tensors.4") == (policy == "raise")


def test_a_sparse_gradient_on_one_rank_is_named_on_all() -> None:
    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> str:
        set_gradients(model, 0, transport.replica)
        if transport.replica == 3:
            model.tensors[2].grad = model.tensors[2].grad.to_sparse()
        with pytest.raises(TypeError) as error:
            optimizer.step()
        return str(error.value)

    for said in run_islands(work, 2, 2):
        assert said == "replica 1 has a sparse gradient for tensors.2; DeMo needs dense gradients"


class _Fails:
    """Raises in place of a method, once, after so many calls."""

    def __init__(self, owner: Any, name: str, num_calls: int) -> None:
        self._owner, self._name, self._method, self._num_calls = owner, name, getattr(owner, name), num_calls
        setattr(owner, name, self)

    def __call__(self, *args: Any) -> Any:
        self._num_calls -= 1
        if self._num_calls >= 0:
            return self._method(*args)
        setattr(self._owner, self._name, self._method)
        raise MemoryError("no room")


@pytest.mark.parametrize("where", ["prepare", "begin", "encode", "average"])
def test_a_rank_that_fails_stops_all_at_once_and_training_can_go_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has sent anything; between two payloads; and in the middle of a bucket's average."""
    monkeypatch.setattr(shared_island, "MOST_ELEMENTS", 500)

    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> tuple[list[str], torch.Tensor]:
        outcomes = []
        for step in range(4):
            set_gradients(model, step, transport.replica)
            if step == 2 and transport.replica == 1:
                island: Any = optimizer.island
                places: dict[str, tuple[Any, str, int]] = {
                    "prepare": (optimizer, "_refresh", 0),
                    "begin": (optimizer, "_attempt", 0),
                    "encode": (optimizer._local, "encode_", 1),
                    "average": (island, "_fill_", 2),
                }
                _Fails(*places[where])
            try:
                optimizer.step()
                outcomes.append("stepped")
            except (MemoryError, ExchangeError) as error:
                outcomes.append(str(error))
        return outcomes, flat(model)

    results = run_islands(work, 2, 2, 20.0, num_buckets=3)
    is_early = where in ("prepare", "begin")
    for rank, (outcomes, found) in enumerate(results):
        assert outcomes[:2] == ["stepped"] * 2
        said = {1: "no room", 3: "replica 0 gave up step 3"}.get(rank, "another rank of this replica could not take step 3")
        if is_early and rank in (0, 2):
            said = ["another rank of this island could not go on", "", "replica 0 gave up step 3"][rank]
        assert said in outcomes[2]
        assert torch.equal(found, results[0][1])
        assert outcomes[3:] == ["stepped"]


def test_an_option_that_differs_inside_an_island_is_named() -> None:
    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> list[str]:
        said = []
        for step in range(2):
            set_gradients(model, step, transport.replica)
            optimizer.param_groups[0]["lr"] = 0.5 if step == 1 and transport.replica % 2 else 0.25
            try:
                optimizer.step()
                said.append("stepped")
            except AgreementError as error:
                said.append(str(error))
        return said

    for said in run_islands(work, 2, 2):
        assert said[0] == "stepped"
        assert "inside an island" in said[1]
        assert "replica 0 has [group 0 lr: 0.25], replica 1 has [group 0 lr: 0.5]" in said[1]


def test_an_option_that_differs_in_one_island_stops_the_others_too_and_training_can_go_on() -> None:
    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> list[str]:
        said = []
        for step in range(3):
            set_gradients(model, step, transport.replica)
            optimizer.param_groups[0]["lr"] = 0.5 if (step, transport.replica) == (1, 1) else 0.25
            try:
                optimizer.step()
                said.append("stepped")
            except ThinwireError as error:
                said.append(str(error))
        return said

    for rank, said in enumerate(run_islands(work, 2, 2, 20.0)):
        assert said[::2] == ["stepped"] * 2
        assert ("inside an island" if rank < 2 else "replica 0 gave up step 2") in said[1]


def test_an_option_that_differs_on_one_rank_stops_all() -> None:
    def work(transport: LoopbackTransport) -> str:
        weight = nn.Parameter(torch.zeros(64, 64))
        with pytest.raises(ThinwireError) as error:
            DeMo([weight], lr=1e-3, topk=32 + transport.replica // 3, islands=2, transport=transport)
        return str(error.value)

    said = run_replicas(work, 4, timeout_seconds=20.0)
    assert "has [group 0 topk: 32], replica 1 has [group 0 topk: 33]" in said[1] == said[3]
    assert said[0] == said[2] == "another rank of this island could not go on; it says why"


def test_a_layer_that_is_unfrozen_and_a_group_that_is_added() -> None:
    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> tuple[torch.Tensor, torch.Tensor]:
        extra = nn.Parameter(torch.ones(40, 20))
        steps(transport, model, optimizer, 0, 2)
        model.tensors[4].requires_grad_(True)
        steps(transport, model, optimizer, 2, 3)
        optimizer.add_param_group({"params": [extra], "param_names": ["extra"], "lr": 0.5})
        extra.grad = torch.full_like(extra, 1.0 + transport.replica)
        steps(transport, model, optimizer, 3, 4)
        return flat(model), extra.detach()

    def frozen(transport: LoopbackTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = models[transport.replica]
        model.tensors[4].requires_grad_(False)
        options = {"islands": 2, "num_buckets": 2, **OPTIONS}
        return work(transport, model, DeMo(model.named_parameters(), transport=transport, **options))

    models = [Shapes(seed) for seed in range(4)]
    results = run_replicas(frozen, 4, timeout_seconds=20.0)
    assert all(torch.equal(found[0], results[0][0]) and torch.equal(found[1], results[0][1]) for found in results)
    assert ((results[0][1] - 1).abs() == 0.5).all()
    start = Shapes(0)
    assert all(not torch.equal(a, b) for a, b in zip(models[3].tensors, start.tensors, strict=True) if a.numel())


def test_a_checkpoint_goes_on_bit_for_bit_and_knows_whose_it_is() -> None:
    options = {"update": "adamw", "num_buckets": 2}

    def first(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> Any:
        steps(transport, model, optimizer, 0, 2)
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}, optimizer.state_dict()
        copied = {"state": {k: {n: t.clone() for n, t in v.items()} for k, v in saved[1]["state"].items()}}
        return (saved[0], {**saved[1], **copied}), steps(transport, model, optimizer, 2, 4)

    done = run_islands(first, 2, 2, **options)

    def second(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> torch.Tensor:
        parameters, state = done[transport.replica][0]
        with pytest.raises(CheckpointError, match="made with another plan"):
            optimizer.load_state_dict(done[transport.replica ^ 1][0][1])
        with pytest.raises(CheckpointError, match="the checkpoint's replica is"):
            optimizer.load_state_dict(done[transport.replica ^ 2][0][1])
        model.load_state_dict(parameters)
        optimizer.load_state_dict(state)
        return steps(transport, model, optimizer, 2, 4)

    for found in run_islands(second, 2, 2, **options):
        assert torch.equal(found, done[0][1])

    def apart(transport: LoopbackTransport) -> torch.Tensor:
        """The same from the files of all ranks, as two whole replicas."""
        model = models[transport.replica]
        optimizer = DeMo(model.named_parameters(), transport=transport, **{**OPTIONS, **options})
        model.load_state_dict(done[0][0][0])
        optimizer.load_state_dict(assemble(optimizer, [state for (_, state), _ in done], "keep"))
        for step in (2, 3):
            ranks = range(2 * transport.replica, 2 * transport.replica + 2)
            for parameter, mean in zip(model.parameters(), mean_gradients(model, step, ranks), strict=True):
                parameter.grad = mean
            optimizer.step()
        return flat(model)

    models = [Shapes() for _ in range(2)]
    for found in run_replicas(apart, 2):
        assert torch.allclose(found, done[0][1], atol=1e-5)

    def together(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> torch.Tensor:
        """And as two islands of three ranks, which are given the same mean gradients."""
        model.load_state_dict(done[0][0][0])
        optimizer.load_state_dict(assemble(optimizer, [state for (_, state), _ in done], "keep"))
        for step in (2, 3):
            ranks = range(2 * optimizer.replica, 2 * optimizer.replica + 2)
            for parameter, mean in zip(model.parameters(), mean_gradients(model, step, ranks), strict=True):
                parameter.grad = mean
            optimizer.step()
        return flat(model)

    # A momentum whose chunks move is carried over to rounding, but for what it held beyond the edges of a padded tensor.
    padded = torch.cat([torch.full((torch.Size(shape).numel(),), shape == (37, 21)) for shape in SHAPES])
    for found in run_islands(together, 2, 3, **options):
        assert torch.allclose(found[~padded], done[0][1][~padded], atol=1e-5)


class Net(nn.Module):
    """Layers whose last one some ranks leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(4)])

    def forward(self, inputs: torch.Tensor, num_layers: int) -> torch.Tensor:
        for layer in list(self.layers)[:num_layers]:
            inputs = torch.tanh(layer(inputs))
        return inputs.square().mean()


def _backward(model: Net, step: int, rank: int, num_layers: int = 4) -> None:
    inputs = torch.randn(3, 24, generator=torch.Generator().manual_seed(10 * step + rank))
    model(inputs, num_layers).backward()


@pytest.mark.parametrize("leaves_out", [False, True])
def test_overlap_gives_the_same_bits(leaves_out: bool) -> None:
    torch.manual_seed(0)
    state = Net().state_dict()

    def work(transport: LoopbackTransport, overlap: bool) -> tuple[torch.Tensor, float]:
        model = Net()
        model.load_state_dict(state)
        optimizer = DeMo(model.named_parameters(), transport=transport, islands=2, overlap=overlap, **OPTIONS)
        for step in range(4):
            optimizer.zero_grad()
            _backward(model, step, transport.replica, 3 if leaves_out and transport.replica == 1 and step else 4)
            optimizer.step()
        return flat(model), optimizer.traffic.total.early_seconds

    late = run_replicas(lambda transport: work(transport, False), 4)
    early = run_replicas(lambda transport: work(transport, True), 4)
    assert all(torch.equal(found, late[0][0]) for found, _ in (*late, *early))
    assert all(seconds > 0 for _, seconds in early)
    assert late[0][1] == 0


def test_with_overlap_what_some_ranks_change_too_late_is_an_error_on_all() -> None:
    torch.manual_seed(0)
    state = Net().state_dict()

    def work(transport: LoopbackTransport) -> tuple[list[str], torch.Tensor]:
        model, said = Net(), []
        model.load_state_dict(state)
        optimizer = DeMo(model.named_parameters(), transport=transport, islands=2, overlap=True, **OPTIONS)
        for step in range(3):
            optimizer.zero_grad()
            try:
                _backward(model, step, transport.replica)
                if step == 1 and transport.replica % 2 == 0:
                    model.layers[0].weight.grad.mul_(0.5)
                optimizer.step()
                said.append("stepped")
            except ThinwireError as error:
                said.append(str(error))
        return said, flat(model)

    results = run_replicas(work, 4, timeout_seconds=20.0)
    for rank, (said, found) in enumerate(results):
        assert (said[0], said[2]) == ("stepped", "stepped")
        assert said[1] != "stepped"
        assert ("the gradient of layers.0.weight changed after it was sent" in said[1]) == (rank % 2 == 0)
        assert torch.equal(found, results[0][1])


def test_each_rank_may_have_its_own_loss_scale() -> None:
    expected, _ = train_plain(2, 2)

    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> torch.Tensor:
        scale = 2.0 ** (8 + transport.replica)
        for step in range(4):
            set_gradients(model, max(0, step - 1), transport.replica)
            for parameter in model.parameters():
                parameter.grad.mul_(scale)
            optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(float(step == 0 and transport.replica == 1))  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        assert optimizer.num_skipped_steps == 1
        return flat(model)

    assert all(torch.equal(found, expected) for found in run_islands(work, 2, 2))


def test_a_repair_reaches_all_ranks() -> None:
    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> tuple[bool, bool, torch.Tensor]:
        steps(transport, model, optimizer)
        if transport.replica // 2 == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
        return optimizer.check_drift("repair"), optimizer.check_drift("raise"), flat(model)

    results = run_islands(work, 3, 2)
    for same, same_again, found in results:
        assert (same, same_again) == (False, True)
        assert torch.equal(found, results[0][2])


def test_the_first_parameters_cross_once_per_island() -> None:
    def work(transport: LoopbackTransport, model: Shapes, optimizer: DeMo) -> tuple[int, bool]:
        is_rank_0s = torch.equal(flat(model), flat(Shapes(0)))
        return optimizer.traffic.setup.sent_bytes, is_rank_0s

    results = run_islands(work, 2, 2)
    assert all(is_rank_0s for _, is_rank_0s in results)
    model_bytes = sum(4 * torch.Size(shape).numel() for shape in SHAPES)
    assert [sent > model_bytes for sent, _ in results] == [True, False, True, False]
