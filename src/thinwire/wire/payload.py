"""The payload: a 64-byte header and the records of every stack of a bucket, in one uint8 buffer.

The header says what the bytes are and whose, and its checksum covers every other byte of the payload. Nothing of a
peer's payload is used before `check_payload` and `ChunkCodec.is_valid` have passed it.
"""

import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.errors import ExchangeError, PayloadError

MAGIC = b"TWIR"
VERSION = 1
_FLAG_GAVE_UP = 1
DIGEST_BYTES = 16
# magic, version, flags, plan digest, step, replica, bucket, body bytes, reserved, checksum
_HEADER = struct.Struct("<4sHH16sQIIQQQ")
HEADER_BYTES = _HEADER.size
CHECKSUM_WORD = HEADER_BYTES // 8 - 1
WORD_BYTES = 8


@dataclass(frozen=True)
class Header:
    """What a payload claims to be."""

    plan_digest: bytes
    step: int
    replica: int
    bucket: int
    body_bytes: int
    gave_up: bool = False
    """The sender failed at this step: the body means nothing and nobody must apply it."""

    def pack(self) -> bytes:
        """The 64 bytes, with a checksum of 0."""
        fields = (self.plan_digest, self.step, self.replica, self.bucket, self.body_bytes)
        return _HEADER.pack(MAGIC, VERSION, _FLAG_GAVE_UP if self.gave_up else 0, *fields, 0, 0)


def payload_bytes(body_bytes: int) -> int:
    """Header and body, the body padded to whole 8-byte words."""
    return HEADER_BYTES + -(-body_bytes // WORD_BYTES) * WORD_BYTES


def seal_(payload_B: Tensor, header: Header) -> Tensor:
    """Write header and checksum into a payload whose body is already there. Does not wait for the device."""
    packed = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
    payload_B[:HEADER_BYTES].copy_(packed)
    words = payload_B.view(torch.int64)
    words[CHECKSUM_WORD] = checksum(words)
    return payload_B


def checksum(words_N: Tensor) -> Tensor:
    """``sum of word_i * weight_i`` modulo 2**64 over all words but the checksum's own.

    The weights are odd, so a change of one word always shows, and pseudo-random, so other changes do but for one in 2**64.
    It guards against damage, not against forgery.
    """
    return (words_N * _weights(len(words_N), words_N.device)).sum()


@functools.lru_cache(maxsize=32)
def _weights(num_words: int, device: torch.device) -> Tensor:
    """Weight i is the i-th output of SplitMix64 seeded with 0, made odd; 0 at the checksum's own word."""
    state = torch.arange(1, num_words + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    mixed = (state ^ _shift_right(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _signed(0x94D049BB133111EB)
    weights = (mixed ^ _shift_right(mixed, 31)) | 1
    weights[CHECKSUM_WORD] = 0
    return weights


def _signed(value: int) -> int:
    return value - 2**64


def _shift_right(values: Tensor, amount: int) -> Tensor:
    """Shift in zeros; torch's own shift of int64 copies the sign bit."""
    shifted: Tensor = (values >> amount) & (2 ** (64 - amount) - 1)
    return shifted


def check_payload(payload_B: Tensor, expected: Header) -> None:
    """Raise `PayloadError`, naming the field, unless the payload is the one this replica owes for this bucket.

    A sound payload of a replica that gave up is an `ExchangeError`.
    """
    if payload_B.numel() != payload_bytes(expected.body_bytes):
        who = _who(expected)
        raise PayloadError(f"{who} has {payload_B.numel()} bytes, expected {payload_bytes(expected.body_bytes)}")
    raw = payload_B[:HEADER_BYTES].cpu().numpy().tobytes()
    check_header(raw, int(checksum(payload_B.view(torch.int64))), expected)


def _who(expected: Header) -> str:
    return f"the payload of replica {expected.replica} (step {expected.step}, bucket {expected.bucket})"


def check_header(raw: bytes, found_checksum: int, expected: Header) -> None:
    """`check_payload` on the header's bytes and the checksum of the whole payload."""
    who = _who(expected)
    magic, version, flags, digest, step, replica, bucket, body, reserved, stated = _HEADER.unpack(raw)
    fields = {
        "magic": (magic, MAGIC),
        "version": (version, VERSION),
        "flags": (flags & ~_FLAG_GAVE_UP, 0),
        "plan digest": (digest.hex(), expected.plan_digest.hex()),
        "step": (step, expected.step),
        "replica": (replica, expected.replica),
        "bucket": (bucket, expected.bucket),
        "body bytes": (body, expected.body_bytes),
        "reserved": (reserved, 0),
        "checksum": (stated, found_checksum % 2**64),
    }
    for name, (found, wanted) in fields.items():
        if found != wanted:
            raise PayloadError(f"{who} has {name} {found!r}, expected {wanted!r}")
    if flags & _FLAG_GAVE_UP:
        raise ExchangeError(f"replica {expected.replica} gave up step {expected.step} because of an error of its own")
