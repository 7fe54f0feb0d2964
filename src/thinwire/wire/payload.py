"""The payload: a 64-byte header and the records of every stack of a bucket, in one uint8 buffer.

The header says what the bytes are and whose, whether the sender can take the step, and its checksum covers every other byte
of the payload. Nothing of a peer's payload is used before header, checksum and records have passed.
"""

import enum
import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.errors import PayloadError

MAGIC = b"TWIR"
VERSION = 3
FLAG_GAVE_UP = 1
FLAG_CALLS_MEETING = 2
DIGEST_BYTES = 16
# magic, version, flags, digest, step, replica, bucket, fingerprint, problem, checksum
_HEADER = struct.Struct("<4sHH16sQIIQQQ")
HEADER_BYTES = _HEADER.size
WORD_BYTES = 8
HEADER_WORDS = HEADER_BYTES // WORD_BYTES
PLACE_WORD = 4
PROBLEM_WORD = 6
CHECKSUM_WORD = 7
FIRST_WORD = int.from_bytes(struct.pack("<4sHH", MAGIC, VERSION, 0), "little")
"""The first word of every payload, without its flags."""
FLAGS_BIT = 48
"""Where the flags begin in the first word."""
_NO_TENSOR = 0xFFFFFFFF


class Verdict(enum.IntEnum):
    """What becomes of a step, the graver the larger."""

    FINE = 0
    DAMAGED = 1
    """A payload is bad: nothing is applied or taken back before it is settled whose payloads count."""
    REFUSED = 2
    """Nobody takes it."""


class Problem(enum.IntEnum):
    """What keeps a replica from taking a step."""

    NONE = 0
    SPARSE = 1
    NONFINITE = 2
    OVERFLOW = 3


@dataclass(frozen=True)
class Trouble:
    """A replica's problem and the first tensor concerned, or -1."""

    problem: Problem = Problem.NONE
    tensor: int = -1

    def pack(self) -> int:
        """As a word: of two, the one with the earlier tensor is larger, and none is 0."""
        return (self.problem << 32) + (_NO_TENSOR - max(self.tensor, 0)) if self.problem else 0

    @classmethod
    def unpack(cls, word: int) -> "Trouble | None":
        """What `pack` packed; None if it cannot have."""
        if word == 0:
            return cls()
        known = [problem.value for problem in Problem if problem]
        return cls(Problem(word >> 32), _NO_TENSOR - (word & _NO_TENSOR)) if word >> 32 in known else None


@dataclass(frozen=True)
class Header:
    """What a payload claims to be."""

    digest: bytes
    """Of plan, settings and step: replicas whose digests differ must not step together."""
    step: int
    replica: int
    bucket: int
    fingerprint: int = 0
    """Of the sender's gradients; 0 if not taken."""
    trouble: Trouble = Trouble()
    gave_up: bool = False
    """The sender failed at this step: the body means nothing and nobody must apply it."""
    calls_meeting: bool = False
    """The sender wants all to meet before the next step, so that others can join."""

    def pack(self) -> bytes:
        """The 64 bytes, with a checksum of 0."""
        place = (self.digest, self.step, self.replica, self.bucket)
        flags = FLAG_GAVE_UP * self.gave_up + FLAG_CALLS_MEETING * self.calls_meeting
        return _HEADER.pack(MAGIC, VERSION, flags, *place, self.fingerprint, self.trouble.pack(), 0)


def payload_bytes(body_bytes: int) -> int:
    """Header and body, the body padded to whole 8-byte words."""
    return HEADER_BYTES + -(-body_bytes // WORD_BYTES) * WORD_BYTES


def seal_(payload_B: Tensor) -> None:
    """Write the checksum into a payload (B), or into several (R, B), whose header and body are there. Does not wait for the
    device."""
    words = payload_B.view(torch.int64)
    words[..., CHECKSUM_WORD] = checksum(words)


def checksum(words: Tensor) -> Tensor:
    """Of a payload (N words) or of several (R, N): ``sum of half_i * weight_i`` modulo 2**64 over the halves of all words,
    32 bits each, but for the checksum's own.

    The weights are odd, so a change of one half always shows, and pseudo-random, so that of other changes about one in 2**32
    does not, whatever bits they flip. It guards against damage, not against forgery.
    """
    halves = words.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return (halves * _weights(halves.shape[-1], words.device)).sum(dim=-1)


@functools.lru_cache(maxsize=32)
def _weights(num_halves: int, device: torch.device) -> Tensor:
    """Weight i is the i-th output of SplitMix64 seeded with 0, made odd; 0 at the checksum's own word."""
    state = torch.arange(1, num_halves + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    mixed = (state ^ _shift_right(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _signed(0x94D049BB133111EB)
    weights = (mixed ^ _shift_right(mixed, 31)) | 1
    weights[2 * CHECKSUM_WORD : 2 * CHECKSUM_WORD + 2] = 0
    return weights


def _signed(value: int) -> int:
    return value - 2**64


def _shift_right(values: Tensor, amount: int) -> Tensor:
    """Shift in zeros; torch's own shift of int64 copies the sign bit."""
    shifted: Tensor = (values >> amount) & (2 ** (64 - amount) - 1)
    return shifted


def read_header(raw: bytes, found_checksum: int, expected: Header) -> Header:
    """The header of a payload that this replica owes for this bucket, whatever it then says of itself.

    Raises `PayloadError`, naming the field, if it is another or damaged.
    """
    magic, version, flags, digest, step, replica, bucket, fingerprint, problem, stated = _HEADER.unpack(raw)
    trouble = Trouble.unpack(problem)
    fields = {
        "magic": (magic, MAGIC),
        "version": (version, VERSION),
        "replica": (replica, expected.replica),
        "bucket": (bucket, expected.bucket),
        "checksum": (stated, found_checksum % 2**64),
        "flags": (flags & ~(FLAG_GAVE_UP | FLAG_CALLS_MEETING), 0),
        "problem": (problem, problem if trouble is not None else 0),
        "step": (step, expected.step if digest == expected.digest else step),
    }
    for name, (found, wanted) in fields.items():
        if found != wanted:
            who = f"the payload of replica {expected.replica} (step {expected.step}, bucket {expected.bucket})"
            raise PayloadError(f"{who} has {name} {found!r}, expected {wanted!r}")
    said = bool(flags & FLAG_GAVE_UP), bool(flags & FLAG_CALLS_MEETING)
    return Header(digest, step, replica, bucket, fingerprint, trouble or Trouble(), *said)
