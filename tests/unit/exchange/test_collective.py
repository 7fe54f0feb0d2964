"""What a failed exchange says about the others, and that it says so in time."""

import threading
from typing import Any

import pytest

from thinwire.exchange import collective


class FrozenStore:
    """As torch's store is while its host is stopped: no call comes back."""

    def __init__(self) -> None:
        self.thaws = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.thaws.wait(60)


def test_a_store_whose_host_is_frozen_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "_STORE_ANSWERS_WITHIN_SECONDS", 0.05)
    monkeypatch.setattr(collective, "_ANNOUNCE_AFTER_SECONDS", 0.0)
    store: Any = FrozenStore()
    roster = collective._Roster(store, "thinwire/0", 1, 2, "replicas")
    before = set(threading.enumerate())
    words = roster.who_is_missing()
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert "rank 0 (or its launcher), who hosts the store, does not answer" in words
    assert [thread.daemon for thread in left] == [True], "the process could not end"
    store.thaws.set()
    left[0].join(10)


def test_words_of_gloo_have_neither_its_source_nor_its_advice() -> None:
    said = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3277. This is GLHF!"
    assert collective.words_of_gloo(RuntimeError(said)) == "Connection closed by peer [127.0.0.1]:3277"
