"""What a user sets in torch for a whole program: default device and dtype, precisions of products, compilation."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training import build, flat, train_step
from thinwire import DeMo
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.parallel.state_files import read_state, write_state
from thinwire.redistribution import assemble

OPTIONS: dict[str, Any] = {"chunk": 16, "topk": 8, "dense_below": 60}


def parameters_after(num_steps: int, **options: Any) -> torch.Tensor:
    """Of two replicas on CPUs, which are what they are whatever torch's defaults."""

    def work(transport: LoopbackTransport) -> torch.Tensor:
        model = BUILT[transport.replica]()
        optimizer = DeMo(model.named_parameters(), lr=1e-2, transport=transport, **{**OPTIONS, **options})
        for gradients in GRADIENTS[transport.replica][:num_steps]:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return flat(model)

    first, second = run_replicas(work, 2)
    assert torch.equal(first, second)
    return first


_MODELS = [build(seed) for seed in range(2)]
BUILT = [lambda model=model: copy.deepcopy(model) for model in _MODELS]
GRADIENTS = [[[torch.randn_like(p) for p in model.parameters()] for _ in range(3)] for model in _MODELS]


@pytest.fixture
def another_device() -> Iterator[None]:
    """Some device that is not the CPU, as cuda would be for those who have one."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.fixture
def another_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


WAYS: list[dict[str, Any]] = [{}, {"update": "adamw"}, {"exchange": "owner"}, {"secret": b"a key of the run, long enough"}]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("setting", ["device", "dtype"])
def test_defaults_of_torch_do_not_matter(options: dict[str, Any], setting: str, request: pytest.FixtureRequest) -> None:
    wanted = parameters_after(3, **options)
    request.getfixturevalue(f"another_{setting}")
    assert torch.equal(parameters_after(3, **options), wanted)


@pytest.mark.parametrize("setting", ["device", "dtype"])
def test_the_fused_backend_does_not_mind_them_either(setting: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    start, gradient = torch.randn(16, 16), torch.randn(16, 16)

    def work() -> torch.Tensor:
        parameter = nn.Parameter(start.clone())
        optimizer = DeMo([parameter], backend="triton", **{**OPTIONS, "dense_below": 0})
        parameter.grad = gradient.clone()
        optimizer.step()
        return parameter.detach()

    wanted = work()
    request.getfixturevalue(f"another_{setting}")
    assert torch.equal(work(), wanted)


def test_files_are_read_whatever_the_default_device(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = build()
    optimizer = DeMo(model.named_parameters(), lr=torch.tensor(1e-2), **OPTIONS)
    train_step(model, optimizer, 0, 0)
    write_state(optimizer.state_dict(), tmp_path / "state")
    other = DeMo(build().named_parameters(), lr=1e-2, **OPTIONS)
    request.getfixturevalue("another_device")
    saved = read_state(tmp_path / "state")
    other.load_state_dict(saved)
    assembled = assemble(other, [saved], "keep")
    for index, state in optimizer.state_dict()["state"].items():
        assert torch.equal(assembled["state"][index]["momentum"], state["momentum"])


def test_groups_that_share_a_learning_rate_are_saved(tmp_path: Path) -> None:
    first, second = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    optimizer = DeMo([{"params": [first]}, {"params": [second]}], lr=torch.tensor(0.5))
    write_state(optimizer.state_dict(), tmp_path / "state")
    assert [float(group["lr"]) for group in read_state(tmp_path / "state")["param_groups"]] == [0.5, 0.5]


def test_a_precision_set_per_backend_is_no_obstacle() -> None:
    """torch then refuses to name one for all, and whole numbers must stay exact without knowing it."""
    wanted = parameters_after(3)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert torch.equal(parameters_after(3), wanted)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_a_compiled_training_step_takes_steps() -> None:
    model = build()
    plain = copy.deepcopy(model)
    optimizer, other = (DeMo(one.named_parameters(), lr=1e-2, **OPTIONS) for one in (model, plain))
    images = torch.randn(8, 1, 8, 8)

    def step(model: nn.Module, optimizer: DeMo) -> None:
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(step, backend="eager")
    for _ in range(3):
        compiled(model, optimizer)
        step(plain, other)
    assert optimizer.num_steps == 3
    assert torch.equal(flat(model), flat(plain))
