"""The validation loss does not depend on how many replicas compute it."""

import math
from contextlib import nullcontext
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from thinwire.exchange.loopback import run_replicas
from thinwire.exchange.transport import SoloTransport, Transport
from thinwire.training.divergence import check_parameters
from thinwire.training.errors import DivergedError
from thinwire.training.evaluation import Score, average_buffers_, evaluate
from thinwire.training.examples import Images, TokenWindows
from thinwire.training.models import Sizes, build_model
from thinwire.training.recipes import build


def test_parameters_that_are_no_numbers_on_one_replica_are_refused_on_all() -> None:
    def work(transport: Transport) -> str:
        model = nn.Linear(3, 2)
        check_parameters(model, transport, 4)
        with torch.no_grad():
            model.bias[1] = math.inf if transport.replica == 1 else 0.0
        with pytest.raises(DivergedError) as error:
            check_parameters(model, transport, 5)
        return str(error.value)

    assert len(set(run_replicas(work, 3))) == 1


class Logits(nn.Module):
    """A classifier that answers as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.BatchNorm2d(1), nn.Linear(16, 3)

    def forward(self, images: torch.Tensor) -> object:
        answer = type("Answer", (), {})()
        answer.logits = self.out(self.norm(images).flatten(1))
        return answer


def data(count: int) -> Images:
    generator = torch.Generator().manual_seed(1)
    return Images(torch.randn(count, 1, 4, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator))


@pytest.mark.parametrize(("count", "wanted"), [(50, 0), (50, 20), (7, 100)])
def test_any_number_of_replicas_gives_the_same_score(count: int, wanted: int) -> None:
    model = Logits()

    def work(transport: Transport) -> Score:
        return evaluate(deepcopy(model), data(count), wanted, 4, transport, torch.device("cpu"), nullcontext())

    alone = work(SoloTransport())
    total = min(count, wanted or count)
    examples = data(count).fetch(np.arange(total) * count // total)
    logits = deepcopy(model).eval()(examples.inputs).logits
    assert alone.loss == pytest.approx(nn.functional.cross_entropy(logits, examples.targets).item(), rel=1e-5)
    assert alone.accuracy == pytest.approx((logits.argmax(-1) == examples.targets).float().mean().item())
    for score in run_replicas(work, 3):
        assert score.loss == pytest.approx(alone.loss, rel=1e-6)
        assert score.accuracy == pytest.approx(alone.accuracy)


def test_a_model_in_training_stays_so() -> None:
    model = Logits().train()
    before = model.norm.running_mean.clone()
    evaluate(model, data(8), 0, 4, SoloTransport(), torch.device("cpu"), nullcontext())
    assert model.training
    assert torch.equal(model.norm.running_mean, before)


def test_buffers_become_the_mean_of_all_replicas() -> None:
    fresh = Logits()

    def work(transport: Transport) -> list[float]:
        model = deepcopy(fresh)
        model.norm.running_mean.fill_(transport.replica)
        average_buffers_(model, transport)
        return model.norm.running_mean.tolist()

    assert run_replicas(work, 3) == [[1.0]] * 3


def test_text_has_no_accuracy() -> None:
    config = build("quickstart")
    windows = TokenWindows([np.arange(600) % 256], 16, 256)
    model = build_model(config, Sizes(vocab_size=256))
    score = evaluate(model, windows, 3, 2, SoloTransport(), torch.device("cpu"), nullcontext())
    assert score.accuracy is None
    assert 5 < score.loss < 6.5
