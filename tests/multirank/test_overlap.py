"""Exchanges that begin during backward: the same bits, hidden time, and clear words where it cannot work."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from tests.ranks import run_ranks
from tests.training import batch, build, flat, train
from thinwire import AgreementError, DeMo, NonFiniteGradientError, ThinwireError
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.exchange.transport import Pending

OPTIONS: dict[str, Any] = {"chunk": 16, "topk": 8, "dense_below": 60, "num_buckets": 4}


MORE: list[dict[str, Any]] = [{}, {"update": "muon", "weight_decay": 0.1, "momentum_dtype": "bfloat16"}]


def _train(rank: int, device: str, variants: list[dict[str, Any]]) -> list[list[tuple[Tensor, list[float], int]]]:
    torch.backends.cudnn.deterministic = True
    results = []
    for more in variants:
        runs = [train(rank, 8, device=device, **{**OPTIONS, **more, "overlap": overlap}) for overlap in (False, True)]
        for _, optimizer, _ in runs:
            optimizer.synchronize()
        results.append([(flat(model).cpu(), losses, opt.traffic.total.sent_bytes) for model, opt, losses in runs])
    return results


def test_the_same_bits_as_without() -> None:
    _check_same_bits(run_ranks(_train, 3, "cpu", MORE))


@pytest.mark.gpu
def test_the_same_bits_as_without_on_a_gpu() -> None:
    """Backward on one stream, encoding on another, payloads through the host; the replicas share the GPU."""
    variants = [{"backend": "torch"}, {"backend": "triton"}, {"backend": "triton", "delay": 1}, *MORE]
    _check_same_bits(run_ranks(_train, 2, "cuda", variants, timeout_seconds=200))


def _check_same_bits(everyone: list[Any]) -> None:
    for rank in everyone:
        for (late, early), (first, _) in zip(rank, everyone[0], strict=True):
            assert torch.equal(early[0], first[0]), "ranks differ"
            assert torch.equal(early[0], late[0])
            assert early[1:] == late[1:]


def gradients(model: nn.Module, step: int, replica: int) -> None:
    images, labels = batch(step, replica)
    nn.functional.cross_entropy(model(images), labels).backward()


def run(overlap: bool, loop: Callable[[nn.Module, DeMo, int], None], num_replicas: int = 2, **options: Any) -> list[Tensor]:
    """The parameters of all replicas after ``loop(model, optimizer, replica)``."""

    def work(transport: LoopbackTransport) -> Tensor:
        model = build()
        optimizer = DeMo(model.named_parameters(), lr=1e-2, overlap=overlap, transport=transport, **{**OPTIONS, **options})
        loop(model, optimizer, transport.replica)
        return flat(model)

    return run_replicas(work, num_replicas)


def accumulating(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            with optimizer.accumulate() if part < 2 else nullcontext():
                gradients(model, 10 * step + part, replica)
        optimizer.step()


def clipping(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.accumulate():
            gradients(model, step, replica)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def scaling(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        optimizer.zero_grad()
        images, labels = batch(step, replica)
        loss = nn.functional.cross_entropy(model(images), labels)
        with optimizer.accumulate():
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def freezing(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    for step in range(6):
        optimizer.zero_grad()
        model.get_parameter("wide.weight").requires_grad_(step not in (2, 3))
        gradients(model, step, replica)
        optimizer.step()


def leaving_out(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    """Each replica uses other parts of the model, in another order."""
    for step in range(4):
        optimizer.zero_grad()
        images, labels = batch(step, replica)
        hidden = torch.zeros(8, 37) if replica == step % 2 else model.wide(torch.relu(model.conv(images)).flatten(1))  # type: ignore[operator]
        output = model.out(model.norm(hidden))  # type: ignore[operator]
        nn.functional.cross_entropy(output, labels).backward()
        optimizer.step()


def skipping(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    for step in range(4):
        optimizer.zero_grad()
        bad = step == 2 and replica == 1
        images, labels = batch(step, replica)
        nn.functional.cross_entropy(model(images * (torch.nan if bad else 1)), labels).backward()
        before = flat(model).clone()
        optimizer.step()
        assert (step == 2) == torch.equal(flat(model), before)
    assert (optimizer.num_steps, optimizer.num_skipped_steps) == (3, 1)


@pytest.mark.parametrize("loop", [accumulating, clipping, scaling, freezing, leaving_out])
def test_what_people_do_with_gradients_gives_the_same_bits(loop: Callable[[nn.Module, DeMo, int], None]) -> None:
    results = [*run(False, loop), *run(True, loop)]
    for result in results:
        assert torch.equal(result, results[0])


def test_a_gradient_that_is_not_finite_is_one_decision_on_all() -> None:
    # What was sent before the bad gradient came is taken back, which rounds.
    late, early = run(False, skipping, on_nonfinite="skip"), run(True, skipping, on_nonfinite="skip")
    assert torch.equal(*early)
    assert torch.allclose(early[0], late[0], atol=0.05)
    with pytest.raises(NonFiniteGradientError, match=r"replica 1 has NaN or Inf in the gradient of .* at step 3"):
        run(True, skipping)


def changed_gradients(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    gradients(model, 0, replica)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def changed_lr(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    gradients(model, 0, replica)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def second_backward(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    gradients(model, 0, replica)
    gradients(model, 1, replica)


def scaled(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    images, labels = batch(0, replica)
    scaler.scale(nn.functional.cross_entropy(model(images), labels)).backward()
    scaler.step(optimizer)


def unscaled(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    images, labels = batch(0, replica)
    scaler.scale(nn.functional.cross_entropy(model(images), labels)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def saving(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    gradients(model, 0, replica)
    optimizer.state_dict()


def late_accumulation(model: nn.Module, optimizer: DeMo, replica: int) -> None:
    gradients(model, 0, replica)
    with optimizer.accumulate():
        gradients(model, 1, replica)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (
            changed_gradients,
            r"the gradient of .* changed after it was sent; call backward inside `with optimizer\.acc",
        ),
        (changed_lr, r"a learning rate or the parameters changed between backward and step\(\)"),
        (
            second_backward,
            r"got another gradient after the first was sent; call backward inside `with optimizer\.acc",
        ),
        (scaled, "before the GradScaler could unscale them"),
        (unscaled, "before the GradScaler could unscale them"),
        (saving, r"a step that was not taken yet; call step\(\) first"),
        (late_accumulation, r"accumulate\(\) after a backward whose gradients were sent; call step\(\) first"),
    ],
)
def test_what_cannot_work_is_said(loop: Callable[[nn.Module, DeMo, int], None], words: str) -> None:
    with pytest.raises(ThinwireError, match=words):
        run(True, loop)


def test_a_failed_step_can_be_followed_by_others() -> None:
    def loop(model: nn.Module, optimizer: DeMo, replica: int) -> None:
        with pytest.raises(ThinwireError, match="changed between backward"):
            changed_lr(model, optimizer, replica)
        optimizer.param_groups[0]["lr"] = 1e-2
        for step in range(2):
            optimizer.zero_grad()
            gradients(model, step, replica)
            optimizer.step()
        assert optimizer.num_steps == 2

    assert torch.equal(*run(True, loop))


def test_hooks_are_gone_with_the_optimizer() -> None:
    def work(transport: LoopbackTransport) -> None:
        model = build()
        DeMo(model.parameters(), overlap=True, transport=transport)
        gradients(model, 0, transport.replica)

    run_replicas(work, 2)


class Slow:
    """A wire that takes its time, a link at a time."""

    def __init__(self, inner: LoopbackTransport, seconds_per_byte: float) -> None:
        self._inner, self._seconds_per_byte = inner, seconds_per_byte
        self.replica, self.num_replicas = inner.replica, inner.num_replicas
        self._free_at = 0.0

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Any:
        began = time.monotonic()
        seconds = messages_RB.numel() * self._seconds_per_byte if what.startswith("exchange") else 0.0
        self._free_at = max(began, self._free_at) + seconds
        return _Delayed(self._inner.start_all_gather_(messages_RB, what), began, self._free_at)

    def broadcast_(self, tensor: Tensor, what: str) -> None:
        self._inner.broadcast_(tensor, what)


class _Delayed:
    def __init__(self, inner: Pending, began: float, ends: float) -> None:
        self._inner, self._began, self._ends = inner, began, ends

    def wait(self) -> None:
        self._inner.wait()
        time.sleep(max(0.0, self._ends - time.monotonic()))

    def span(self) -> tuple[float, float]:
        return self._began, self._ends


class _Pause(torch.autograd.Function):
    """Backward takes a while here."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(0.125)
        return gradient


def test_most_of_the_exchange_hides_behind_backward() -> None:
    """1 s of backward, 0.5 s of exchange: what is exposed falls by half at least."""

    def exposed(overlap: bool) -> list[tuple[float, float]]:
        def work(transport: LoopbackTransport) -> tuple[float, float]:
            torch.manual_seed(0)
            layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(8)])
            options: dict[str, Any] = {"num_buckets": 8, "dense_below": 0, "overlap": overlap}
            plan_bytes = DeMo(layers.parameters(), num_buckets=8, dense_below=0).plan.payload_bytes
            slow = Slow(transport, 0.5 / (2 * plan_bytes))
            optimizer = DeMo(layers.parameters(), transport=slow, **options)
            for _ in range(2):
                optimizer.zero_grad()
                hidden = torch.randn(4, 64)
                for layer in layers:
                    hidden = layer(_Pause.apply(hidden))
                hidden.square().mean().backward()
                optimizer.step()
            return optimizer.traffic.last_step.wait_seconds, optimizer.traffic.last_step.hidden_seconds

        return run_replicas(work, 2)

    for (late_wait, late_hidden), (early_wait, early_hidden) in zip(exposed(False), exposed(True), strict=True):
        # On a busy machine the last buckets are encoded while the first travel, and that much is hidden.
        assert late_wait + late_hidden > 0.45
        assert late_wait > 0.4
        assert early_wait < late_wait / 2
        assert early_hidden > 0.2


def momenta_of(optimizer: DeMo) -> list[Tensor]:
    return [state["momentum"].clone() for state in optimizer.state.values()]


def test_an_attempt_that_fails_leaves_buckets_alone_that_were_not_sent() -> None:
    """A bucket that the last step sent, and this one did not, must not be taken back again."""

    def loop(model: nn.Module, optimizer: DeMo, replica: int) -> None:
        leaving_out(model, optimizer, replica)
        optimizer.zero_grad()
        model.out(model.norm(torch.randn(8, 37))).square().mean().backward()  # type: ignore[operator]
        optimizer.param_groups[0]["lr"] = 0.5
        before = momenta_of(optimizer)
        with pytest.raises(ThinwireError, match="changed between backward"):
            optimizer.step()
        unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert unused
        for name, momentum, now in zip(dict(model.named_parameters()), before, momenta_of(optimizer), strict=True):
            assert name not in unused or torch.equal(momentum, now)

    run(True, loop)


@pytest.mark.parametrize("change", ["clip", "zero"])
def test_gradients_that_changed_after_they_were_sent_are_not_lost(change: str) -> None:
    """What was sent goes back, and the gradient that was sent stays in the momentum."""

    def loop(model: nn.Module, optimizer: DeMo, replica: int) -> None:
        before = momenta_of(optimizer)
        gradients(model, 0, replica)
        sent = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        if change == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        else:
            optimizer.zero_grad()
        with pytest.raises(ThinwireError, match="changed after it was sent"):
            optimizer.step()
        for momentum, now, gradient in zip(before, momenta_of(optimizer), sent, strict=True):
            # Transforms keep the norm; the decay had nothing to decay.
            assert not momentum.any()
            assert torch.allclose(now.norm(), gradient.norm(), rtol=1e-4)

    run(True, loop, values="float32", update="sgd", topk=3)


def test_a_backward_that_fails_can_be_followed_by_others() -> None:
    def loop(model: nn.Module, optimizer: DeMo, replica: int) -> None:
        images, labels = batch(0, replica)
        handle = model.get_parameter("conv.weight").register_hook(_fail)
        with pytest.raises(MemoryError):
            nn.functional.cross_entropy(model(images), labels).backward()
        handle.remove()
        optimizer.zero_grad()
        with pytest.raises(ThinwireError, match="after a backward that failed, call it again"):
            gradients(model, 0, replica)
        for step in range(2):
            optimizer.zero_grad()
            gradients(model, step, replica)
            optimizer.step()
        assert optimizer.num_steps == 2

    assert torch.equal(*run(True, loop))


def _fail(_: Tensor) -> None:
    raise MemoryError("no room")


def test_a_failed_new_group_leaves_the_old_plan_agreed() -> None:
    def loop(model: nn.Module, optimizer: DeMo, replica: int) -> None:
        with pytest.raises(AgreementError):
            optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.zeros(8, 8 + replica)))]})
        for step in range(2):
            optimizer.zero_grad()
            gradients(model, step, replica)
            optimizer.step()

    assert torch.equal(*run(False, loop))


def test_a_model_without_trained_parameters_still_agrees() -> None:
    def loop(model: nn.Module, optimizer: DeMo, replica: int) -> None:
        model.requires_grad_(False)
        optimizer.step()
        if replica == 1:
            model.get_parameter("wide.weight").requires_grad_(True)
        with pytest.raises(AgreementError, match="number of tensors: 0"):
            optimizer.step()

    run(False, loop)


def test_the_same_data_is_noticed_whichever_parameters_it_reaches() -> None:
    def loop(model: nn.Module, optimizer: DeMo, replica: int) -> None:
        for step in range(2):
            optimizer.zero_grad()
            images, _ = batch(step, 0)
            model.conv(images).square().mean().backward()  # type: ignore[operator]
            optimizer.step()

    with pytest.warns(UserWarning, match="same gradients"):
        run(False, loop)


class Branches(nn.Module):
    """A layer that only one of the ranks uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, uses_second: bool) -> Tensor:
        hidden = self.first(x)
        return self.third(self.second(hidden) if uses_second else hidden)


def _log_losses(rank: int) -> Tensor:
    torch.manual_seed(0)
    model = Branches()
    optimizer = DeMo(model.parameters(), overlap=True, num_buckets=3, timeout_seconds=20, chunk=16, dense_below=0)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 32), rank == 0 or step < 2).square().mean()
        loss.backward()
        if step == 2 and rank == 0:
            with pytest.raises(ThinwireError, match="a step that was not taken yet"):
                optimizer.check_drift()
        total = loss.detach().clone()
        dist.all_reduce(total)
        optimizer.step()
    return flat(model)


def _overlap_of_one(rank: int) -> tuple[str, int]:
    with pytest.raises(AgreementError) as caught:
        DeMo(nn.Linear(32, 32).parameters(), overlap=rank == 0, timeout_seconds=20)
    for timeout_seconds in (20, 20, 10, 20):
        DeMo(nn.Linear(32, 32).parameters(), overlap=True, timeout_seconds=timeout_seconds)
    return str(caught.value), len(distributed_c10d._world.pg_map)


def test_ranks_that_differ_in_overlap_say_so_and_optimizers_share_a_group() -> None:
    for words, num_groups in run_ranks(_overlap_of_one, 2):
        assert "a process group of its own, for overlap: True" in words
        assert "a process group of its own, for overlap: False" in words
        assert num_groups == 3, "the default one, and one for each time-out"


def test_exchanges_of_the_training_loop_do_not_meet_the_optimizers() -> None:
    first, second = run_ranks(_log_losses, 2)
    assert torch.equal(first, second)
