"""Some chunks of a replica, by layer kind, so that a study can look at them as a training goes on."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from thinwire.core.layout import ChunkLayout, bands_of, chunks_view
from thinwire.core.transform import dct_basis
from thinwire.exchange.plan import Stack, stack_records
from thinwire.local_step import LocalStep
from thinwire.studies.settings import DEMO_RULES, text_trial
from thinwire.studies.simulation import VirtualReplicas
from thinwire.studies.study import FULL
from thinwire.studies.trials import Trial
from thinwire.studies.tuning import seeds_for

# Words in the names of parameters that tell their kind. Norms have none: they are too small to be transformed.
_WORDS = {"embedding": ("embed", "wte", "lm_head"), "attention": ("attn",), "mlp": ("mlp",)}
KINDS = tuple(_WORDS)
# All edges are powers of two, which not every basis can do without, and all chunks are 64 x 64.
POWERS_OF_TWO = {"width": 128, "mlp_width": 256}


def watched_trials(kind: type[Trial], size: str) -> list[Trial]:
    """Trainings to look into, at the usual learning rates: what is compared is in the same training."""
    shape, trials = {} if size == FULL else POWERS_OF_TWO, list[Trial]()
    for (update, start), seed in product(DEMO_RULES[size].items(), seeds_for(size)):
        settings = {**shape, **start.settings, "update": update, "lr": start.rate, "seed": seed}
        trials.append(kind(**vars(text_trial(size, settings=settings))))
    return trials


def kind_of(name: str) -> str | None:
    """The layer kind of a parameter, if it is one of `KINDS`."""
    if "norm" in name:
        return None
    return next((kind for kind, words in _WORDS.items() if any(word in name for word in words)), None)


@dataclass(frozen=True)
class Sample:
    """N chunks of one tensor. Indices lie on the tensor's device, so that looking does not make the host wait."""

    kind: str
    tensor: int
    layout: ChunkLayout
    stack: Stack
    first_record: int
    chunks_N: Tensor

    def gradient_of(self, local: LocalStep) -> Tensor:
        """What the chunks hold of the gradient that a replica has just used, (N, row_edge, col_edge)."""
        gradient = local.tensors[self.tensor].gradient
        assert gradient is not None
        chunks = chunks_view(bands_of(gradient.contiguous(), self.layout, 0, self.layout.num_bands), self.layout)
        per_band = self.layout.chunks_per_band
        return chunks[self.chunks_N // per_band, self.chunks_N % per_band].float()

    def residual_of(self, local: LocalStep) -> Tensor:
        """Their residual momentum, a copy (N, row_edge, col_edge) of coefficients."""
        residual_NE = local.tensors[self.tensor].momentum_CE[self.chunks_N].float()
        return residual_NE.view(-1, self.layout.row_edge, self.layout.col_edge)

    def is_sent_in(self, payload_B: Tensor) -> Tensor:
        """Which coefficients a payload holds, (N, row_edge, col_edge)."""
        records_NB = stack_records(payload_B, self.stack)[self.first_record + self.chunks_N]
        indices_NK, _ = self.stack.codec.decode(records_NB)
        num_elements = self.layout.num_elements
        is_sent = torch.zeros(len(indices_NK), num_elements + 1, dtype=torch.bool, device=indices_NK.device)
        is_sent.scatter_(1, indices_NK, True)  # voids go to one past the end
        return is_sent[:, :num_elements].view(-1, self.layout.row_edge, self.layout.col_edge)


def to_coefficients(elements: Tensor) -> Tensor:
    """The DCT of chunks (..., row_edge, col_edge)."""
    rows, cols = _bases(elements)
    return rows @ elements @ cols.mT


def to_elements(coefficients: Tensor) -> Tensor:
    """The inverse of `to_coefficients`."""
    rows, cols = _bases(coefficients)
    return rows.mT @ coefficients @ cols


def _bases(chunks: Tensor) -> tuple[Tensor, Tensor]:
    row_edge, col_edge = chunks.shape[-2:]
    return dct_basis(row_edge, chunks.dtype, chunks.device), dct_basis(col_edge, chunks.dtype, chunks.device)


def take_samples(method: VirtualReplicas, edge: int, most_chunks: int, seed: int = 0) -> list[Sample]:
    """At most so many chunks of each layer kind, drawn from all chunks of edge x edge elements; the same for a seed."""
    samples = []
    for kind in KINDS:
        places = [place for place in _places(method, kind) if place[1].row_edge == place[1].col_edge == edge]
        pairs = [(index, chunk) for index, (_, layout, _, _) in enumerate(places) for chunk in range(layout.num_chunks)]
        drawn = random.Random(seed).sample(pairs, min(most_chunks, len(pairs)))
        for index, (tensor, layout, stack, first) in enumerate(places):
            if chunks := sorted(chunk for place, chunk in drawn if place == index):
                device = method.replicas[0].tensors[tensor].momentum_CE.device
                samples.append(Sample(kind, tensor, layout, stack, first, torch.tensor(chunks, device=device)))
    return samples


def _places(method: VirtualReplicas, kind: str) -> Iterator[tuple[int, ChunkLayout, Stack, int]]:
    plan = method.optimizer.plan
    for stack in (stack for bucket in plan.buckets for stack in bucket.stacks):
        for entry in stack.entries:
            if not entry.layout.dense and kind_of(plan.tensors[entry.tensor].name) == kind:
                yield entry.tensor, entry.layout, stack, entry.first_chunk
