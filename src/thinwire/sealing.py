"""Sealing a payload and inspecting everyone's, in torch, or fused where the kernels run.

Nothing of a peer's payload is used before it has passed: header, checksum, and every record.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from thinwire.core.errors import PayloadError
from thinwire.exchange.plan import Message, stack_records
from thinwire.wire import payload
from thinwire.wire.payload import HEADER_BYTES, HEADER_WORDS, Header

# Small payloads are looked at together.
_BYTES_AT_ONCE = 1 << 16
_NO_BAD_RECORD = torch.iinfo(torch.int64).max


def open_(payload_B: Tensor, header: Header) -> None:
    """Begin a payload: the header, and zeros. Does not wait for the device."""
    packed = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
    payload_B[HEADER_BYTES:].zero_()
    payload_B[:HEADER_BYTES].copy_(packed.pin_memory() if payload_B.is_cuda else packed, non_blocking=True)


def seal_(payload_B: Tensor, fused: bool) -> None:
    """Write the checksum into a payload whose header and body are there. Does not wait for the device."""
    if fused:
        from thinwire.kernels.checks import add_checksum_

        add_checksum_(payload_B)
    else:
        payload.seal_(payload_B)


def empty_findings(message: Message, num_replicas: int, device: torch.device) -> Tensor:
    """Room for what is found in the payloads of this form, a row of int64 per replica: the header, the checksum, and the
    first bad record of each stack."""
    return torch.empty(num_replicas, HEADER_WORDS + 1 + len(message.stacks), dtype=torch.int64, device=device)


def inspect_(forms: Sequence[Message], payloads_RB: Tensor, findings_RW: Tensor, fused: bool = False) -> None:
    """Fill in what is found; ``forms`` are those of the rows."""
    for form, rows in groupby(range(len(forms)), key=lambda row: forms[row]):
        first, *others = rows
        alike = slice(first, first + 1 + len(others))
        if fused:
            from thinwire.kernels import checks

            runs = [(run.codec, run.offset_bytes, run.num_chunks) for run in form.stacks]
            checks.inspect_(payloads_RB[alike], runs, findings_RW[alike])
        else:
            _inspect_(form, payloads_RB[alike], findings_RW[alike])
    findings_RW[:, :HEADER_WORDS] = payloads_RB[:, :HEADER_BYTES].contiguous().view(torch.int64)


def _inspect_(form: Message, payloads_RB: Tensor, findings_RW: Tensor) -> None:
    findings_RW.fill_(_NO_BAD_RECORD)
    at_once = max(1, _BYTES_AT_ONCE // form.payload_bytes)
    for some_RB, rows_RW in zip(payloads_RB.split(at_once), findings_RW.split(at_once), strict=True):
        rows_RW[:, HEADER_WORDS] = payload.checksum(some_RB.view(torch.int64))
        for column, stack in enumerate(form.stacks, HEADER_WORDS + 1):
            if stack.num_chunks:
                records_CB = stack_records(some_RB, stack).reshape(-1, stack.codec.record_bytes)
                valid_RC = stack.codec.is_valid(records_CB).view(len(some_RB), -1)
                for place in (~valid_RC.all(dim=1)).nonzero():
                    rows_RW[place, column] = int(valid_RC[place[0]].to(torch.uint8).argmin())


def read_findings(forms: Sequence[Message], findings_RW: Tensor, expected: Header) -> list[Header | PayloadError]:
    """Everyone's headers, where this replica expects the like of its own.

    A `PayloadError` stands for a payload that is not one its replica owes for this bucket, or has a record that nobody
    writes. Where the sender says itself that nobody must apply it, the body does not matter.
    """
    rows = enumerate(zip(forms, findings_RW, strict=True))
    return [_read_row(form, row_W, replace(expected, replica=replica)) for replica, (form, row_W) in rows]


def _read_row(message: Message, row_W: Tensor, expected: Header) -> Header | PayloadError:
    raw = row_W[:HEADER_WORDS].numpy().tobytes()
    try:
        header = payload.read_header(raw, int(row_W[HEADER_WORDS]), expected)
        for stack, bad in zip(message.stacks, row_W[HEADER_WORDS + 1 :].tolist(), strict=True):
            if bad != _NO_BAD_RECORD and not header.gave_up and not header.trouble.problem:
                stack.codec.refuse(bad, stack.num_chunks, f"the payload of replica {expected.replica}")
    except PayloadError as error:
        return error
    return header
