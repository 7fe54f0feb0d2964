"""The order of examples: disjoint between replicas, shuffled anew in each pass, and a function of the position alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.training import examples
from thinwire.training.errors import TrainingError
from thinwire.training.examples import Images, LazyImages, Order, Stream, TokenWindows, fingerprint


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 60), st.integers(0, 1000))
def test_a_pass_holds_every_example_once(num_replicas: int, share: int, extra: int, seed: int) -> None:
    batch = num_replicas * share
    orders = [Order(batch + extra, batch, replica, num_replicas, seed) for replica in range(num_replicas)]
    per_pass = (batch + extra) // batch * batch
    for number in (0, 1):
        first = number * per_pass
        seen = [i for p in range(first, first + per_pass, batch) for order in orders for i in order.indices(p).tolist()]
        assert len(seen) == len(set(seen)) == per_pass
        assert all(len(order.indices(first)) == share for order in orders)


def test_passes_and_seeds_differ() -> None:
    order, other = Order(64, 8, 0, 1, seed=0), Order(64, 8, 0, 1, seed=1)
    assert order.indices(0).tolist() != order.indices(64).tolist()
    assert order.indices(0).tolist() != other.indices(0).tolist()
    assert order.indices(0).tolist() == Order(64, 8, 0, 1, seed=0).indices(0).tolist()


def test_more_replicas_than_data() -> None:
    with pytest.raises(TrainingError, match="has 7 examples, a step of all replicas needs 8"):
        Order(7, 8, 0, 8, 0)


def test_windows_are_the_text() -> None:
    parts = [np.arange(10, dtype=np.uint8), np.arange(100, 103, dtype=np.uint8), np.arange(50, 60, dtype=np.uint8)]
    windows = TokenWindows(parts, sequence=4, vocab_size=256)
    assert len(windows) == 4  # the second part is too short, and no window crosses into the next part
    batch = windows.fetch(np.arange(4))
    assert batch.inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [50, 51, 52, 53], [54, 55, 56, 57]]
    assert torch.equal(batch.targets, batch.inputs + 1)


def test_a_token_outside_the_vocabulary_is_named() -> None:
    windows = TokenWindows([np.array([1, 2, 3, 900, 5])], sequence=2, vocab_size=512)
    assert windows.fetch(np.array([0])).inputs.tolist() == [[1, 2]]
    with pytest.raises(TrainingError, match="has token 900, but the vocabulary ends at 511"):
        windows.fetch(np.array([1]))


def test_a_stream_continues_where_another_ended() -> None:
    examples = TokenWindows([np.arange(201) % 200], sequence=2, vocab_size=256)
    order = Order(len(examples), 8, 1, 2, seed=3)
    first = Stream(examples, order, 0, workers=2)
    batches = [next(first) for _ in range(30)]
    assert first.position == 240
    second = Stream(examples, order, 80, workers=1)
    for batch in batches[10:]:
        assert torch.equal(batch.inputs, next(second).inputs)
    assert torch.equal(batches[3].inputs, examples.fetch(order.indices(24)).inputs)
    first.close()
    second.close()


def test_errors_of_the_threads_reach_the_loop() -> None:
    broken = Stream(TokenWindows([np.full(40, 999)], 2, 256), Order(19, 4, 0, 1, 0), 0, workers=1)
    with pytest.raises(TrainingError, match="token 999"):
        next(broken)
    broken.close()


def test_images_from_memory_and_from_files_are_the_same() -> None:
    images, labels = torch.randn(5, 1, 4, 4), torch.arange(5)
    lazy = LazyImages(lambda index: images[index], labels.tolist())
    here = Images(images, labels).fetch(np.array([4, 0, 2]))
    there = lazy.fetch(np.array([4, 0, 2]))
    assert torch.equal(here.inputs, there.inputs)
    assert here.targets.tolist() == there.targets.tolist() == [4, 0, 2]
    assert len(lazy) == 5


def test_a_fingerprint_is_of_all_tokens_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(5000, dtype=np.uint16) % 250
    changed = tokens.copy()
    changed[3333] += 1

    def found(*parts: np.ndarray) -> str:
        return fingerprint(TokenWindows(parts, 8, 256))

    assert found(tokens) == found(tokens[:2000], tokens[2000:]) != found(changed)
    # Where there are too many, what is looked at is spread over all of them.
    monkeypatch.setattr(examples, "_MOST_HASHED_BYTES", 5000)
    assert found(tokens) == found(tokens.copy()) != found(tokens[::-1].copy())
    assert found(tokens) != found(np.concatenate([tokens[:-9], changed[:9]]))


def test_labels_are_a_part_of_the_fingerprint() -> None:
    images = torch.arange(40.0).reshape(10, 1, 2, 2)
    labels = torch.arange(10)
    assert fingerprint(Images(images, labels)) == fingerprint(Images(images.clone(), labels.clone()))
    assert fingerprint(Images(images, labels)) != fingerprint(Images(images, labels.flip(0)))
