"""Sealing a payload and checking everyone's, in torch, or fused where the kernels run.

Nothing of a peer's payload is used before it has passed: length, header, checksum, and every record.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.exchange.plan import Bucket
from thinwire.stack_step import stack_records
from thinwire.wire import payload
from thinwire.wire.payload import HEADER_BYTES, Header


def seal_(payload_B: Tensor, header: Header, fused: bool) -> None:
    """Write header and checksum into a payload whose body is there. Does not wait for the device."""
    if not fused:
        payload.seal_(payload_B, header)
        return
    from thinwire.kernels.checks import add_checksums_

    packed = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
    if payload_B.device.type == "cuda":
        packed = packed.pin_memory()
    payload_B[:HEADER_BYTES].copy_(packed, non_blocking=True)
    word = payload_B.view(torch.int64)[payload.CHECKSUM_WORD :][:1]
    add_checksums_(payload_B[None], word)


def check_received(
    bucket: Bucket,
    payloads_RB: Tensor,
    header_of: Callable[[int], Header],
    replicas: Sequence[int],
    fused: bool | None = None,
) -> None:
    """Raise `PayloadError`, or `ExchangeError` if a replica gave up, unless the payloads of these replicas are sound."""
    if not replicas:
        return
    if payloads_RB.shape[1] != bucket.payload_bytes or not fused:
        for replica in replicas:
            payload.check_payload(payloads_RB[replica], header_of(replica))
            for stack in bucket.stacks:
                stack.codec.check(stack_records(payloads_RB[replica], stack), f"the payload of replica {replica}")
        return
    headers, sums, first_bad = _look(bucket, payloads_RB)
    for replica in replicas:
        payload.check_header(headers[replica], sums[replica], header_of(replica))
        for stack, bad in zip(bucket.stacks, first_bad[replica], strict=True):
            if bad < stack.num_chunks:
                stack.codec.refuse(bad, stack.num_chunks, f"the payload of replica {replica}")


def _look(bucket: Bucket, payloads_RB: Tensor) -> tuple[list[bytes], list[int], list[list[int]]]:
    """Headers, checksums and the first bad record of each stack, for every replica; the device is waited for once."""
    from thinwire.kernels.checks import add_checksums_, find_bad_records_

    num_replicas, device = len(payloads_RB), payloads_RB.device
    sums_R = torch.zeros(num_replicas, dtype=torch.int64, device=device)
    add_checksums_(payloads_RB, sums_R)
    bad_SR = torch.empty(len(bucket.stacks), num_replicas, dtype=torch.int32, device=device)
    for stack, bad_R in zip(bucket.stacks, bad_SR, strict=True):
        bad_R.fill_(stack.num_chunks)
        find_bad_records_(payloads_RB, stack.codec, stack.offset_bytes, bad_R, stack.num_chunks)
    words = payloads_RB[:, :HEADER_BYTES].contiguous().view(torch.int64)
    found = torch.cat((words, sums_R[:, None], bad_SR.T.long()), dim=1).cpu()
    headers = [row[: HEADER_BYTES // 8].numpy().tobytes() for row in found]
    return headers, found[:, HEADER_BYTES // 8].tolist(), found[:, HEADER_BYTES // 8 + 1 :].tolist()
