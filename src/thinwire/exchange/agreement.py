"""Do all replicas train the same model with the same settings?

A replica describes plan, settings and step in lines of text, and every payload carries a digest of them. The digests are
also compared by themselves, in a *roll call*, where there is no payload yet. Only when digests differ are the full
descriptions exchanged, to name the first difference on every replica.
"""

import struct
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from thinwire.core.errors import AgreementError, ReceivedDifferentlyError
from thinwire.exchange.plan import digest_of, first_difference

_MAGIC = b"TWRC"
# magic, padding, digest
_ROLL_CALL = struct.Struct("<4s12x16s")
_LONGEST_DESCRIPTION_BYTES = 1 << 24

AllGather = Callable[[Tensor, str], Tensor]
RECEIVED = "received at the last step"
"""The fact that may differ although all replicas do the same: a link may have damaged what one of them was sent."""


def hold_roll_call(description: Sequence[str], all_gather: AllGather, noun: str = "replica") -> None:
    """Raise on every replica if two descriptions differ. ``noun`` is what errors call one of them."""
    mine = _ROLL_CALL.pack(_MAGIC, digest_of(description))
    rows = all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8), "roll call")
    digests = [_unpack(row, replica, noun) for replica, row in enumerate(rows)]
    if any(digest != digests[0] for digest in digests):
        name_the_difference(description, all_gather, noun)


def _unpack(row_B: Tensor, replica: int, noun: str) -> bytes:
    magic, digest = _ROLL_CALL.unpack(row_B.cpu().numpy().tobytes())
    if magic != _MAGIC:
        raise AgreementError(
            f"{noun} {replica} answered the roll call with other bytes; do all ranks run the same program and version, "
            "and have all the secret or none?"
        )
    return bytes(digest)


def name_the_difference(description: Sequence[str], all_gather: AllGather, noun: str = "replica") -> NoReturn:
    """Exchange descriptions that differ, and say where. Collective: all replicas have seen that the digests differ."""
    descriptions = _exchange_texts("\n".join(description), all_gather)
    without = [[line for line in lines if not line.startswith(RECEIVED)] for lines in descriptions]
    if all(lines == without[0] for lines in without) and any(lines != descriptions[0] for lines in descriptions):
        raise ReceivedDifferentlyError(_what_differs(descriptions, noun))
    raise AgreementError(_what_differs(descriptions, noun))


def _exchange_texts(text: str, all_gather: AllGather) -> list[list[str]]:
    mine = text.encode()[:_LONGEST_DESCRIPTION_BYTES]
    lengths = all_gather(torch.tensor([len(mine)], device="cpu").view(torch.uint8), "lengths of the descriptions")
    sizes = [min(max(0, int(row.cpu().view(torch.int64))), _LONGEST_DESCRIPTION_BYTES) for row in lengths.clone()]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    rows = all_gather(padded, "descriptions")
    texts = [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
    return [text.decode(errors="replace").split("\n") for text in texts]


def _what_differs(descriptions: list[list[str]], noun: str) -> str:
    for number, other in enumerate(descriptions):
        difference = first_difference(descriptions[0], other)
        if difference is not None:
            return (
                f"the {noun}s do not agree: {noun} 0 has [{difference[0]}], {noun} {number} has [{difference[1]}]; "
                f"all {noun}s need the same model, parameter order, dtypes, options and step"
            )
    return f"the {noun}s do not agree, but their descriptions are equal; was a message damaged?"
