import dataclasses
import struct

import pytest
import torch

from thinwire.core.errors import PayloadError
from thinwire.wire.payload import HEADER_BYTES, Header, check_payload, checksum, payload_bytes, seal_

HEADER = Header(plan_digest=bytes(range(16)), step=7, replica=2, bucket=1, body_bytes=37)


def sealed(device: torch.device | str = "cpu") -> torch.Tensor:
    payload = torch.zeros(payload_bytes(37), dtype=torch.uint8, device=device)
    payload[HEADER_BYTES : HEADER_BYTES + 37] = torch.randint(0, 256, (37,), dtype=torch.uint8, device=device)
    return seal_(payload, HEADER)


def test_a_sealed_payload_passes(device: torch.device) -> None:
    payload = sealed(device)
    assert payload.numel() == 64 + 40
    check_payload(payload, HEADER)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("plan_digest", bytes(16), "plan digest"),
        ("step", 8, "has step 7, expected 8"),
        ("replica", 3, "has replica 2, expected 3"),
        ("bucket", 0, "has bucket 1, expected 0"),
        ("body_bytes", 38, "has body bytes 37, expected 38"),
        ("body_bytes", 50, "has 104 bytes, expected 120"),
    ],
)
def test_every_field_of_the_header_is_compared(field: str, value: object, words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        check_payload(sealed(), dataclasses.replace(HEADER, **{field: value}))


def test_every_single_bit_is_guarded() -> None:
    payload = sealed()
    for place in range(payload.numel()):
        for bit in range(8):
            damaged = payload.clone()
            damaged[place] ^= 1 << bit
            with pytest.raises(PayloadError):
                check_payload(damaged, HEADER)


def test_swapped_words_show_in_the_checksum() -> None:
    words = torch.arange(1, 20)
    swapped = words.clone()
    swapped[[10, 15]] = words[[15, 10]]
    assert checksum(words) != checksum(swapped)


def test_the_header_is_laid_out_as_documented() -> None:
    raw = sealed().numpy().tobytes()
    magic, version, flags = struct.unpack_from("<4sHH", raw)
    assert (magic, version, flags) == (b"TWIR", 1, 0)
    assert raw[8:24] == bytes(range(16))
    assert struct.unpack_from("<QIIQQ", raw, 24) == (7, 2, 1, 37, 0)
    (stated,) = struct.unpack_from("<Q", raw, 56)
    total = 0
    for index, (word,) in enumerate(struct.iter_unpack("<Q", raw)):
        z = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        total += 0 if index == 7 else word * ((z ^ z >> 31) | 1)
    assert stated == total % 2**64
