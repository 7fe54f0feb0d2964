import dataclasses
import struct

import pytest
import torch

from thinwire.core.errors import PayloadError
from thinwire.wire.payload import HEADER_BYTES, Header, Problem, Trouble, checksum, payload_bytes, read_header, seal_

HEADER = Header(bytes(range(16)), step=7, replica=2, bucket=1, fingerprint=99)


def sealed(header: Header = HEADER, device: torch.device | str = "cpu") -> torch.Tensor:
    payload = torch.zeros(payload_bytes(37), dtype=torch.uint8, device=device)
    payload[:HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
    payload[HEADER_BYTES : HEADER_BYTES + 37] = torch.randint(0, 256, (37,), dtype=torch.uint8, device=device)
    seal_(payload)
    return payload


def read(payload: torch.Tensor, expected: Header = HEADER) -> Header:
    raw = payload[:HEADER_BYTES].cpu().numpy().tobytes()
    return read_header(raw, int(checksum(payload.view(torch.int64))), expected)


def test_a_sealed_payload_passes(device: torch.device) -> None:
    payload = sealed(device=device)
    assert payload.numel() == 64 + 40
    assert read(payload) == HEADER


@pytest.mark.parametrize(
    "said",
    [
        {"gave_up": True},
        {"digest": bytes(16), "step": 8},
        {"trouble": Trouble(Problem.SPARSE, 0)},
        {"trouble": Trouble(Problem.NONFINITE, 123456)},
        {"trouble": Trouble(Problem.OVERFLOW, 3), "fingerprint": 2**64 - 1},
    ],
)
def test_what_a_sender_says_of_itself_is_read(said: dict[str, object]) -> None:
    header = dataclasses.replace(HEADER, **said)
    assert read(sealed(header)) == header


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("step", 8, "has step 7, expected 8"),
        ("replica", 3, "has replica 2, expected 3"),
        ("bucket", 0, "has bucket 1, expected 0"),
    ],
)
def test_every_field_of_the_header_is_compared(field: str, value: object, words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        read(sealed(), dataclasses.replace(HEADER, **{field: value}))


def test_an_unknown_problem_or_flag_is_refused() -> None:
    for place in (7, 54):
        payload = sealed()
        payload[place] = 77
        payload[56:64] = 0
        seal_(payload)
        with pytest.raises(PayloadError, match=r"has (flags|problem)"):
            read(payload)


def test_of_two_problems_the_first_tensor_counts() -> None:
    words = [Trouble(Problem.NONFINITE, tensor).pack() for tensor in (0, 1, 500)]
    assert words == sorted(words, reverse=True)
    assert min(words) > 0 == Trouble().pack()


def test_every_single_bit_is_guarded() -> None:
    payload = sealed()
    for place in range(payload.numel()):
        for bit in range(8):
            damaged = payload.clone()
            damaged[place] ^= 1 << bit
            with pytest.raises(PayloadError):
                read(damaged)


def test_every_two_bits_of_a_word_or_of_two_are_guarded() -> None:
    """Also the top bits, whose products with odd weights have little to differ in."""
    words = torch.randint(-(2**62), 2**62, (20,))
    expected = checksum(words)
    for first in range(64):
        for place, second in ((9, 63), (12, first), (12, 63)):
            damaged = words.clone()
            damaged[9] ^= _bit(first)
            damaged[place] ^= _bit(second)
            assert torch.equal(damaged, words) or checksum(damaged) != expected


def _bit(number: int) -> int:
    return 1 << number if number < 63 else -(2**63)


def test_swapped_words_show_in_the_checksum() -> None:
    words = torch.arange(1, 20)
    swapped = words.clone()
    swapped[[10, 15]] = words[[15, 10]]
    assert checksum(words) != checksum(swapped)


def test_the_header_is_laid_out_as_documented() -> None:
    raw = sealed().numpy().tobytes()
    magic, version, flags = struct.unpack_from("<4sHH", raw)
    assert (magic, version, flags) == (b"TWIR", 3, 0)
    assert raw[8:24] == bytes(range(16))
    assert struct.unpack_from("<QIIQQ", raw, 24) == (7, 2, 1, 99, 0)
    (stated,) = struct.unpack_from("<Q", raw, 56)
    total = 0
    for index, (word,) in enumerate(struct.iter_unpack("<I", raw)):
        z = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        total += 0 if index in (14, 15) else word * ((z ^ z >> 31) | 1)
    assert stated == total % 2**64
