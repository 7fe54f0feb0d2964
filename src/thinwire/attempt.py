"""One attempt at a step: encode, exchange, find out whether the step may be taken, then apply it or take it back.

Where the fused kernels do all of it, the verdict is found and obeyed on the device, and the host learns of it later; else
the host decides.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from thinwire.core.errors import ExchangeError, ThinwireError
from thinwire.exchange.agreement import AllGather, name_the_difference
from thinwire.exchange.plan import Bucket
from thinwire.exchange.traffic import Traffic
from thinwire.exchange.transport import Pending, Transport, metered
from thinwire.local_step import Encoding, LocalStep
from thinwire.sealing import empty_findings, inspect_, open_, read_findings, seal_
from thinwire.stack_step import GroupStep
from thinwire.wire.payload import Header

_log = logging.getLogger("thinwire")
_POLL_SECONDS = 2e-4


class Attempt:
    """``header`` is this replica's for every bucket; ``description`` is what its digest was made from."""

    def __init__(
        self,
        buckets: Sequence[tuple[Bucket, Encoding]],
        local: LocalStep,
        groups: Sequence[GroupStep],
        header: Header,
        description: Sequence[str],
        transport: Transport,
        traffic: Traffic,
    ) -> None:
        self.header, self._description = header, description
        self._transport, self._traffic = transport, traffic
        self._buckets, self._local, self._groups = buckets, local, groups
        self._is_told = False
        self._event: torch.cuda.Event | None = None

    def exchange_(self) -> None:
        """Encode every bucket, unless this replica has a problem, send it, and receive everyone's.

        If anything fails, the momenta are given back what was taken from them, and payloads that are still owed are sent as
        given up: the others then stop at once too, and the next exchange finds all replicas at the same place.
        """
        self._local.set_verdict_(0)
        pending: list[Pending] = []
        try:
            for bucket, encoding in self._buckets:
                open_(encoding.payload_B, replace(self.header, bucket=bucket.index))
                encoding.begun.clear()
                if not self.header.trouble.problem:
                    self._local.encode_(bucket, self._groups, encoding)
                pending.append(self._send(bucket, encoding))
            with self._traffic.waiting():
                for exchange in pending:
                    exchange.wait()
            if self._transport.num_replicas > 1 or self._local.is_fused:
                self._inspect_()
        except BaseException as error:
            self.undo_()
            if not isinstance(error, ThinwireError):
                self._give_up(len(pending))
            raise

    def _send(self, bucket: Bucket, encoding: Encoding) -> Pending:
        seal_(encoding.payload_B, self._local.is_fused)
        self._traffic.add(bucket.payload_bytes, self._transport.num_replicas)
        what = f"exchange of step {self.header.step}, bucket {bucket.index}"
        return self._transport.start_all_gather_(encoding.payloads_RB, what)

    def _give_up(self, num_sent: int) -> None:
        """After an error of this replica's own: send what it still owes, marked as worthless."""
        try:
            pending = []
            for bucket, encoding in self._buckets[num_sent:]:
                open_(encoding.payload_B, replace(self.header, bucket=bucket.index, gave_up=True))
                pending.append(self._send(bucket, encoding))
            for exchange in pending:
                exchange.wait()
        except ThinwireError as error:
            _log.warning("could not tell the other replicas that this one gave up: %s", error)

    def _inspect_(self) -> None:
        for bucket, encoding in self._buckets:
            if not self._local.is_fused:
                inspect_(bucket, encoding.payloads_RB, encoding.findings_RW)
                continue
            from thinwire.kernels import checks

            stacks = [(stack.codec, stack.offset_bytes, stack.num_chunks) for stack in bucket.stacks]
            checks.inspect_(encoding.payloads_RB, stacks, encoding.findings_RW)
            (verdict,) = self._local.verdicts.values()
            checks.judge_(encoding.payloads_RB, encoding.replica, encoding.findings_RW, verdict)

    def check(self) -> list[Header]:
        """Everyone's headers, bucket by bucket. Waits for the device.

        Raises, on every replica that sees it, unless all payloads are sound, all replicas agree, and nobody gave up.
        """
        headers = []
        for bucket, encoding in self._buckets:
            findings_RW = encoding.told_RW if self._is_told else encoding.findings_RW.cpu()
            headers += read_findings(bucket, findings_RW, replace(self.header, bucket=bucket.index))
        _compare_digests(headers, self.header, self._description, metered(self._transport, self._traffic))
        for header in headers:
            if header.gave_up:
                raise ExchangeError(f"replica {header.replica} gave up step {header.step} because of an error of its own")
        return headers

    def apply_(self, combine_rule: str) -> None:
        """Apply everyone's payloads."""
        for bucket, encoding in self._buckets:
            self._local.apply_(bucket, self._groups, encoding.payloads_RB, combine_rule)

    def undo_(self) -> None:
        """Take back what was encoded."""
        self._local.set_verdict_(1)
        for bucket, encoding in self._buckets:
            self._local.undo_(bucket, self._groups, encoding)

    def finish_on_device_(self, combine_rule: str) -> None:
        """Launch both, of which the verdict lets one do its work; and have the findings brought to the host."""
        for bucket, encoding in self._buckets:
            self._local.undo_(bucket, self._groups, encoding)
        self.apply_(combine_rule)
        for _, encoding in self._buckets:
            encoding.told_RW.copy_(encoding.findings_RW, non_blocking=True)
        (device,) = self._local.verdicts
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
        self._is_told = True

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the device has said what it found."""
        deadline = time.monotonic() + timeout_seconds
        while self._event is not None and not self._event.query():
            if time.monotonic() > deadline:
                raise ExchangeError(
                    f"exchange of step {self.header.step}: the device has not finished it after {timeout_seconds:g} s; "
                    "did a replica die?"
                )
            time.sleep(_POLL_SECONDS)


def announce_plan(
    old_buckets: Sequence[Bucket], header: Header, description: Sequence[str], transport: Transport, traffic: Traffic
) -> None:
    """Agree with the others on a new plan, or raise on all replicas.

    They may not know of it, and expect payloads of the old sizes: so they get those, given up, with the new digest.
    """
    headers = []
    for bucket in old_buckets:
        mine = replace(header, bucket=bucket.index, gave_up=True)
        payloads_RB = torch.zeros(transport.num_replicas, bucket.payload_bytes, dtype=torch.uint8)
        open_(payloads_RB[transport.replica], mine)
        seal_(payloads_RB[transport.replica], fused=False)
        traffic.add(bucket.payload_bytes, transport.num_replicas)
        with traffic.waiting():
            transport.start_all_gather_(payloads_RB, f"new plan before step {header.step}").wait()
        findings_RW = empty_findings(bucket, transport.num_replicas, torch.device("cpu"))
        inspect_(bucket, payloads_RB, findings_RW)
        headers += read_findings(bucket, findings_RW, mine)
    _compare_digests(headers, header, description, metered(transport, traffic))


def _compare_digests(headers: Sequence[Header], mine: Header, description: Sequence[str], all_gather: AllGather) -> None:
    if any(header.digest != mine.digest for header in headers):
        name_the_difference(description, all_gather)
