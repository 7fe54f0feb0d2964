"""What replicas tell each other: the same news on all of them, whenever it is exchanged."""

import math

import pytest
import torch

from thinwire.exchange.loopback import run_replicas
from thinwire.exchange.transport import SoloTransport, Transport
from thinwire.training.errors import TrainingError
from thinwire.training.journal import Journal, News


def test_everyone_hears_the_mean_of_every_step() -> None:
    def work(transport: Transport) -> list[News]:
        journal, news = Journal(transport, 10), []
        for step in range(6):
            journal.add(torch.tensor(float(step + transport.replica)))
            if step in (1, 5):
                news.append(journal.exchange(wants_stop=False))
        return news

    for news in run_replicas(work, 3):
        assert news == [News(11, [1.0, 2.0], False, 3), News(13, [3.0, 4.0, 5.0, 6.0], False, 3)]


def test_one_wish_to_stop_is_enough() -> None:
    def work(transport: Transport) -> bool:
        journal = Journal(transport, 0)
        journal.add(torch.tensor(1.0))
        return journal.exchange(wants_stop=transport.replica == 2).stop

    assert run_replicas(work, 3) == [True, True, True]


def test_all_replicas_choose_the_same_next_exchange() -> None:
    def work(transport: Transport) -> list[int]:
        journal, due = Journal(transport, 0), []
        for step in range(1, 300):
            journal.add(torch.tensor(0.0))
            if journal.is_due:
                due.append(step)
                journal.exchange(False)
        return due

    first, second = run_replicas(work, 2)
    assert first == second
    assert first[0] == 1  # the first exchange comes at once, so that the display has something to show
    assert 2 < len(first) < 200


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run(loss: float) -> None:
    journal = Journal(SoloTransport(), 4)
    journal.add(torch.tensor(1.0))
    journal.add(torch.tensor(loss))
    with pytest.raises(TrainingError, match=r"the loss of step 6 is (nan|inf)"):
        journal.exchange(False)


def test_a_step_that_is_left_out_does_not_end_the_run() -> None:
    def work(transport: Transport) -> list[float]:
        journal = Journal(transport, 4, allows_nonfinite=True)
        journal.add(torch.tensor(math.nan if transport.replica else 1.0))
        journal.add(torch.tensor(2.0))
        return journal.exchange(False).losses

    for losses in run_replicas(work, 2):
        assert math.isnan(losses[0])
        assert losses[1] == 2.0
