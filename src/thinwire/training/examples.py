"""What a data set is to the loop: numbered examples, and the order in which each replica sees them.

The order depends on the seed and on one number, the position: how many examples all replicas together have seen. So
resuming needs nothing else, and replicas see disjoint examples within a pass over the data.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from thinwire.training.errors import TrainingError

Array = np.ndarray[Any, Any]
# Less than a second to hash; shards may hold a thousand times as much.
_MOST_HASHED_BYTES = 256_000_000
_HASHED_EXAMPLES = 64


@dataclass(frozen=True)
class Batch:
    """Model inputs and what they should give. Text: token numbers (B, S) each. Images: (B, C, H, W) and labels (B,)."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> "Batch":
        """On another device."""
        return Batch(self.inputs.to(device, non_blocking=True), self.targets.to(device, non_blocking=True))


class Examples(Protocol):
    """A numbered collection of examples."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Array) -> Batch:
        """The examples with these numbers."""
        ...


class TokenWindows:
    """Consecutive windows of ``sequence`` tokens; targets are the tokens that follow. No window crosses from one part (a
    shard, or a text) into the next."""

    def __init__(self, parts: Sequence[Array], sequence: int, vocab_size: int) -> None:
        self.parts, self._sequence, self._vocab_size = parts, sequence, vocab_size
        counts = [max(0, (len(part) - 1) // sequence) for part in parts]
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def fetch(self, indices: Array) -> Batch:
        """Windows as int64."""
        windows = self._windows(np.asarray(indices))
        largest = int(windows.max())
        if largest >= self._vocab_size:
            raise TrainingError(
                f"the data has token {largest}, but the vocabulary ends at {self._vocab_size - 1}: "
                "the tokenizer does not fit the data, or set --vocab-size"
            )
        tokens = torch.from_numpy(windows)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def _windows(self, indices: Array) -> Array:
        windows = np.empty((len(indices), self._sequence + 1), np.int64)
        parts = np.searchsorted(self._ends, indices, side="right")
        for part in np.unique(parts):
            is_here = parts == part
            places = indices[is_here] - (self._ends[part - 1] if part else 0)
            windows[is_here] = self.parts[part][places[:, None] * self._sequence + np.arange(self._sequence + 1)]
        return windows


class Images:
    """Images that are all in memory."""

    def __init__(self, images_NCHW: Tensor, labels_N: Tensor) -> None:
        self._images_NCHW, self._labels_N = images_NCHW, labels_N

    def __len__(self) -> int:
        return len(self._labels_N)

    def fetch(self, indices: Array) -> Batch:
        """Rows of the two tensors."""
        rows = torch.from_numpy(indices)
        return Batch(self._images_NCHW[rows], self._labels_N[rows])


class LazyImages:
    """Images that are read when they are wanted."""

    def __init__(self, load: Callable[[int], Tensor], labels: Sequence[int]) -> None:
        self._load, self._labels = load, labels

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, indices: Array) -> Batch:
        """Read, then stack."""
        images = torch.stack([self._load(int(index)) for index in indices])
        return Batch(images, torch.tensor([self._labels[int(index)] for index in indices]))


def fingerprint(*collections: Examples) -> str:
    """A hash of all tokens; where they are very many, and of images, of some examples from all over them."""
    digest = hashlib.sha256()
    for examples in collections:
        tokens = examples.parts if isinstance(examples, TokenWindows) else ()
        if tokens and sum(part.nbytes for part in tokens) <= _MOST_HASHED_BYTES:
            arrays = list(tokens)
        else:
            batch = examples.fetch(np.unique(np.linspace(0, len(examples) - 1, _HASHED_EXAMPLES, dtype=np.int64)))
            arrays = [batch.inputs.numpy(), batch.targets.numpy()]
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Order:
    """Which examples replica ``replica`` of ``num_replicas`` sees at which position, in passes that are shuffled anew."""

    num_examples: int
    batch: int
    replica: int
    num_replicas: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_examples < self.batch:
            raise TrainingError(
                f"the training data has {self.num_examples} examples, a step of all replicas needs {self.batch}: "
                "take more data, a smaller --batch, fewer replicas or a shorter --sequence"
            )

    def indices(self, position: int) -> Array:
        """This replica's examples of the step that begins at ``position``."""
        # The rest of a pass that does not fill a step is left out: a step never holds an example twice.
        per_pass = self.num_examples - self.num_examples % self.batch
        number, first = divmod(position, per_pass)
        share = self.batch // self.num_replicas
        first += self.replica * share
        return _permutation(self.num_examples, self.seed, number)[first : first + share]


_last_permutation: tuple[tuple[int, int, int], Array] | None = None


def _permutation(num_examples: int, seed: int, number: int) -> Array:
    global _last_permutation
    key = (num_examples, seed, number)
    if _last_permutation is None or _last_permutation[0] != key:
        _last_permutation = key, np.random.default_rng([seed, number]).permutation(num_examples)
    return _last_permutation[1]


class Stream:
    """A replica's batches from a position on, prepared ahead by a few threads. ``position`` is the next step's."""

    def __init__(self, examples: Examples, order: Order, position: int, workers: int) -> None:
        self._examples, self._order = examples, order
        self.position = position
        self._ahead = position
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
        self._pending: deque[Future[Batch]] = deque()
        for _ in range(workers + 1):
            self._submit()

    def _submit(self) -> None:
        indices = self._order.indices(self._ahead)
        self._pending.append(self._pool.submit(self._examples.fetch, indices))
        self._ahead += self._order.batch

    def __next__(self) -> Batch:
        batch = self._pending.popleft().result()
        self.position += self._order.batch
        self._submit()
        return batch

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
