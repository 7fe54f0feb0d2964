"""Which ranks are an island; bad islands are one clear error on every rank."""

from typing import Any

import pytest
import torch

from tests.islands import OPTIONS, Shapes
from thinwire import AgreementError, DeMo
from thinwire.exchange.islands import by_host, consecutive, divide
from thinwire.exchange.loopback import LoopbackTransport, run_replicas
from thinwire.exchange.traffic import Count
from thinwire.exchange.transport import SoloTransport


def test_ranks_are_divided_by_number_and_by_host() -> None:
    assert consecutive(2, 6) == [[0, 1], [2, 3], [4, 5]]
    assert by_host([b"a", b"b", b"a", b"b"]) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="islands=4 does not divide 6 ranks: islands must be of equal size"):
        consecutive(4, 6)
    with pytest.raises(ValueError, match=r"islands of unequal size, \[\[0, 1\], \[2\]\]"):
        by_host([b"a", b"a", b"b"])


@pytest.mark.parametrize("islands", [0, -1, True, 1.5, "host"])
def test_what_is_no_island_is_refused(islands: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a number of ranks, a DeviceMesh with the axes .* or 'hosts'"):
        DeMo(Shapes().parameters(), islands=islands)


@pytest.mark.parametrize(("islands", "inside", "between"), [(3, 3, 2), ("hosts", 6, 1), (6, 6, 1), (1, 1, 6)])
def test_a_rank_reaches_its_island_and_its_counterparts(islands: Any, inside: int, between: int) -> None:
    def work(transport: LoopbackTransport) -> tuple[int, ...]:
        across, within = divide(islands, transport, None, 10.0, None, Count())
        return across.replica, across.num_replicas, within.rank, within.num_ranks

    for rank, found in enumerate(run_replicas(work, 6)):
        assert found == (rank // inside, between, rank % inside, inside)


def test_ranks_that_have_other_islands_in_mind_all_hear_of_it() -> None:
    said: dict[int, str] = {}

    def work(transport: LoopbackTransport) -> None:
        islands = 2 if transport.replica < 3 else 3  # which does not divide four ranks
        try:
            divide(islands, transport, None, 10.0, None, Count())
        except AgreementError as error:
            said[transport.replica] = str(error)

    run_replicas(work, 4)
    assert sorted(said) == [0, 1, 2, 3]
    for words in said.values():
        assert "rank 0 has [islands: [[0, 1], [2, 3]]], rank 3 has [islands: islands=3 does not divide 4" in words


@pytest.mark.parametrize(("first", "second"), [("hosts", 4), (4, "hosts"), (None, 2), (2, None)])
def test_other_forms_of_islands_are_named(first: Any, second: Any) -> None:
    said: list[str] = []

    def work(transport: LoopbackTransport) -> None:
        islands = second if transport.replica else first
        try:
            DeMo(Shapes().parameters(), transport=transport, islands=islands, **OPTIONS)
        except AgreementError as error:
            said.append(str(error))

    run_replicas(work, 4)
    words = {"hosts": "hosts", 4: "[[0, 1, 2, 3]]", 2: "[[0, 1], [2, 3]]", None: "None"}
    assert len(said) == 4
    for text in said:
        assert f"0 has [islands: {words[first]}]" in text
        assert f"1 has [islands: {words[second]}]" in text


def test_what_does_not_go_with_islands_is_refused() -> None:
    class Elastic(SoloTransport):
        def meet(self, is_broken: bool, is_running: bool) -> bool:
            return False

    parameters = list(Shapes().parameters())
    with pytest.raises(ValueError, match="delay=1 does not go with islands"):
        DeMo(parameters, islands=1, delay=1, **OPTIONS)
    with pytest.raises(ValueError, match="islands do not go with a transport whose replicas come and go"):
        DeMo(parameters, islands=1, transport=Elastic(), **OPTIONS)
    with pytest.raises(ValueError, match="a SoloTransport cannot be divided into islands"):
        DeMo(parameters, islands=1, transport=SoloTransport(), **OPTIONS)


@pytest.mark.parametrize("options", [{"islands": 1}, {"islands": "hosts"}, {"exchange": "hierarchical"}], ids=str)
def test_one_process_alone_is_plain_demo(options: dict[str, Any]) -> None:
    model = Shapes()
    optimizer = DeMo(model.parameters(), **{**OPTIONS, **options})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.num_steps == 1
    assert optimizer.num_replicas == 1
