"""Do all replicas train the same model with the same settings, and are they fit for this step?

Before each step the replicas hold a *roll call*: 64 bytes each with a digest of plan, settings and step, and whether the
local gradients are finite. Everyone sees the same answers and so takes the same decision, before any momentum is
touched. Only when digests differ are the full descriptions exchanged, to name the first difference.
"""

import enum
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.core.errors import AgreementError
from thinwire.exchange.plan import digest_of, first_difference

_MAGIC = b"TWRC"
# magic, problem, digest, tensor, gradient fingerprint, padding
_ROLL_CALL = struct.Struct("<4sI16sqQ24x")
ROLL_CALL_BYTES = _ROLL_CALL.size
_LONGEST_DESCRIPTION_BYTES = 1 << 24

AllGather = Callable[[Tensor, str], Tensor]


class Problem(enum.IntEnum):
    """What keeps a replica from taking a step."""

    NONE = 0
    SPARSE = 1
    NONFINITE = 2
    OVERFLOW = 3


@dataclass(frozen=True)
class Answer:
    """One replica's answer: its problem and the first tensor concerned, a fingerprint of its gradients (0: not taken), and
    the digest of its description, which `hold_roll_call` fills in."""

    problem: Problem = Problem.NONE
    tensor: int = -1
    gradient_fingerprint: int = 0
    digest: bytes = b""

    def pack(self) -> Tensor:
        """As 64 bytes."""
        packed = _ROLL_CALL.pack(_MAGIC, self.problem, self.digest, self.tensor, self.gradient_fingerprint)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def hold_roll_call(description: Sequence[str], answer: Answer, all_gather: AllGather) -> list[Answer]:
    """Exchange answers and return them in replica order; raise on every replica if two descriptions differ."""
    mine = replace(answer, digest=digest_of(description))
    rows = all_gather(mine.pack(), "roll call")
    answers = [_unpack(row, replica) for replica, row in enumerate(rows)]
    if any(answer.digest != answers[0].digest for answer in answers):
        raise AgreementError(_what_differs(_exchange_texts("\n".join(description), all_gather)))
    return answers


def _unpack(row_B: Tensor, replica: int) -> Answer:
    magic, problem, digest, tensor, fingerprint = _ROLL_CALL.unpack(row_B.cpu().numpy().tobytes())
    if magic != _MAGIC or problem not in list(Problem):
        raise AgreementError(
            f"replica {replica} answered the roll call with other bytes; do all ranks run the same program and version?"
        )
    return Answer(Problem(problem), tensor, fingerprint, digest)


def _exchange_texts(text: str, all_gather: AllGather) -> list[list[str]]:
    mine = text.encode()[:_LONGEST_DESCRIPTION_BYTES]
    lengths = all_gather(torch.tensor([len(mine)]).view(torch.uint8), "lengths of the descriptions")
    sizes = [min(max(0, int(row.cpu().view(torch.int64))), _LONGEST_DESCRIPTION_BYTES) for row in lengths.clone()]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    rows = all_gather(padded, "descriptions")
    texts = [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
    return [text.decode(errors="replace").split("\n") for text in texts]


def _what_differs(descriptions: list[list[str]]) -> str:
    for replica, other in enumerate(descriptions):
        difference = first_difference(descriptions[0], other)
        if difference is not None:
            return (
                f"the replicas do not agree: replica 0 has [{difference[0]}], replica {replica} has [{difference[1]}]; "
                "all replicas need the same model, parameter order, dtypes, options and step"
            )
    return "the replicas do not agree, but their descriptions are equal; was a message damaged?"
