"""Replicas that come and go: what does not answer is given up in time."""

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.core.errors import TooFewReplicasError
from thinwire.parallel import elastic
from thinwire.parallel.elastic import ElasticTransport

pytest.importorskip("torchft", reason="torchft has no build for this platform")


@pytest.fixture
def silent_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Where connections are taken and nothing is ever said, as if the process had been stopped."""
    monkeypatch.setattr(elastic, "_CONNECT", timedelta(seconds=0.2))
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])
    for thread in set(threading.enumerate()) - before:
        thread.join(10)


def test_a_first_member_that_is_frozen_is_not_waited_for(silent_port: int) -> None:
    address = f"127.0.0.1:{silent_port}"
    transport = ElasticTransport(address, name="b", num_expected=2, timeout_seconds=0.2)
    created = SimpleNamespace(seconds=5, nanos=0)
    quorum = SimpleNamespace(created=created, participants=[SimpleNamespace(store_address=address)])
    with pytest.raises(RuntimeError, match=r"^a, where they connect, did not answer in 0.4 s$"):
        transport._connect(quorum, ["a", "b"])
    assert transport.meeting == 0


def test_a_lighthouse_that_hangs_costs_no_more_than_one_that_is_gone(silent_port: int) -> None:
    """The question itself may take 600 s."""
    transport = ElasticTransport(f"127.0.0.1:{silent_port}", name="b", num_expected=2)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(transport._ask({})), daemon=True)
    asking.start()
    asking.join(20)
    transport.leave()
    assert answers == [None]
    assert transport._num_silences == 1


def test_that_too_few_came_may_be_for_a_name_that_two_have(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = ElasticTransport("127.0.0.1:9", name="a", num_expected=2, patience_seconds=0.001)
    alone = SimpleNamespace(participants=[SimpleNamespace(replica_id="a", data={})])
    monkeypatch.setattr(transport, "_ask", lambda _: alone)
    with pytest.raises(TooFewReplicasError, match=r"only \['a'\] came; does another process have the name of one of them\?"):
        transport.meet(is_broken=False, is_running=False)
