"""One attempt at a step: encode, exchange, find out whether the step may be taken, then apply it or take it back.

Where the fused kernels do all of it, the verdict is found and obeyed on the device, and the host learns of it later; else
the host decides.
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.core.combine import Decoding
from thinwire.core.errors import ExchangeError, PayloadError, ThinwireError
from thinwire.exchange.agreement import AllGather, name_the_difference
from thinwire.exchange.plan import Bucket
from thinwire.exchange.sharding import is_sharded, local_of
from thinwire.exchange.traffic import Traffic
from thinwire.exchange.transport import Pending, Transport, bytes_on_wire, elastic, metered
from thinwire.gradients import fingerprint, first_trouble
from thinwire.local_step import Encoding, LocalStep
from thinwire.sealing import empty_findings, inspect_, open_, read_findings, seal_
from thinwire.slabs import LocalTensor
from thinwire.stack_step import GroupStep
from thinwire.wire.payload import HEADER_WORDS, Header, Trouble, Verdict

_log = logging.getLogger("thinwire")
_POLL_SECONDS = 2e-4


class Attempt:
    """``header`` is this replica's for every bucket; ``description`` is what its digest was made from. ``compares`` says
    whether to look if all replicas have the same gradients, ``drops`` whether bad payloads are left out."""

    def __init__(
        self,
        buckets: Sequence[tuple[Bucket, Encoding]],
        local: LocalStep,
        groups: Sequence[GroupStep],
        header: Header,
        description: Sequence[str],
        transport: Transport,
        traffic: Traffic,
        compares: bool,
        drops: bool,
    ) -> None:
        self.header, self.description, self.compares, self._drops = header, description, compares, drops
        self._transport, self._traffic = transport, traffic
        self._buckets, self._local, self._groups = buckets, local, groups
        self._pending: list[Pending] = []
        self._sent_gradients: list[tuple[int, Tensor | None, float]] = []
        self._is_told = self._is_late = False
        self._is_left_open = elastic(transport) is not None
        """Whether it is left as it is when its exchange fails: others may have taken the step, and all will meet."""
        self._event: torch.cuda.Event | None = None
        self.num_sent = 0
        self.said: list[Header] = []
        """The own headers, as sent."""
        self.received = ""
        """A hash of all headers and checksums that have come, once `check` has looked at them."""
        self.refused: dict[int, PayloadError] = {}
        """The replicas whose payloads do not count, and why; known after `check`."""
        for _, encoding in buckets:
            encoding.begun.clear()

    def first_trouble(self, found_inf: float | None = None) -> Trouble:
        """What keeps this replica from sending the buckets that are left."""
        for bucket, _ in self._buckets[self.num_sent :]:
            self._local.ready_(bucket)
        left = [index for bucket, _ in self._buckets[self.num_sent :] for index in bucket.members]
        return first_trouble([(i, self._local.tensors[i].gradient) for i in sorted(left)], found_inf, self._local.is_fused)

    def send_next_(self, trouble: Trouble | None = None) -> None:
        """Encode the next bucket, unless this replica has a problem, and begin to exchange it; see `send_rest_` for
        what happens if that fails."""
        bucket, encoding = self._buckets[self.num_sent]
        is_early = trouble is None
        if is_early:
            with self.taken_back_on_error():
                self._local.ready_(bucket)
        with self.taken_back_on_error(), self._traffic.encoding(is_early):
            gradients = [(index, self._local.tensors[index].gradient) for index in bucket.members]
            trouble = first_trouble(gradients, None, self._local.is_fused) if trouble is None else trouble
            header = replace(self.header, bucket=bucket.index, trouble=trouble)
            if self.compares and not trouble.problem:
                header = replace(header, fingerprint=fingerprint([gradient for _, gradient in gradients]))
            self.said.append(header)
            open_(encoding.payload_B, header)
            if not trouble.problem:
                self._local.encode_(bucket, self._groups, encoding)
            self._send(bucket, encoding)
        if is_early:
            self._sent_gradients += [(index, *_trace(self._local.tensors[index])) for index, _ in gradients]

    def changed_gradient(self) -> int | None:
        """The first tensor whose gradient is not what was sent."""
        for index, sent, trace in self._sent_gradients:
            now, now_trace = _trace(self._local.tensors[index])
            if now is not sent or now_trace != trace:
                return index
        self._sent_gradients.clear()
        return None

    def send_rest_(self, trouble: Trouble) -> None:
        """Send the buckets that are left.

        If anything fails, the momenta are given back what was taken from them, and payloads that are still owed are sent as
        given up: the others then stop at once too, and the next exchange finds all replicas at the same place.
        """
        while self.num_sent < len(self._buckets):
            self.send_next_(trouble)

    def receive_(self) -> None:
        """Wait for everyone's payloads, and look at them. If that fails, see `send_rest_`."""
        self._local.set_verdict_(Verdict.FINE)
        with self.taken_back_on_error():
            spans = []
            with self._traffic.waiting():
                while self._pending:
                    exchange = self._pending.pop(0)
                    exchange.wait()
                    spans.append(exchange.span())
            self._traffic.add_spans(spans)
            if self._transport.num_replicas > 1 or self._local.is_fused:
                with self._traffic.applying():
                    self._inspect_()

    @contextmanager
    def taken_back_on_error(self) -> Iterator[None]:
        """See `send_rest_`."""
        try:
            yield
        except BaseException as error:
            for _, encoding in self._buckets:
                encoding.is_safe = False  # an exchange that failed may still write to it
            if isinstance(error, ExchangeError) and self._is_left_open:
                self._pending.clear()
                raise
            self.take_back_()
            if not isinstance(error, ThinwireError) or self._local.island.has_heard(error):
                self.give_up_()
            raise

    def _send(self, bucket: Bucket, encoding: Encoding) -> None:
        seal_(encoding.payload_B, self._local.is_fused)
        self._traffic.add(bytes_on_wire(self._transport, bucket.payload_bytes), self._transport.num_replicas)
        what = f"exchange of step {self.header.step}, bucket {bucket.index}"
        self._pending.append(self._transport.start_all_gather_(encoding.payloads_RB, what))
        self.num_sent += 1

    def give_up_(self) -> None:
        """After an error of this replica's own: send what it still owes, marked as worthless."""
        try:
            for bucket, encoding in self._buckets[self.num_sent :]:
                open_(encoding.payload_B, replace(self.header, bucket=bucket.index, gave_up=True))
                self._send(bucket, encoding)
            while self._pending:
                self._pending.pop(0).wait()
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
            damage = Verdict.DAMAGED if self._drops else Verdict.REFUSED
            checks.judge_(encoding.payloads_RB, encoding.replica, encoding.findings_RW, verdict, damage)

    def check(self, is_catching_up: bool = False) -> list[Header]:
        """All sound headers, bucket by bucket; ``refused`` says whose payloads do not count. Waits for the device.

        Raises, on every replica that sees it, unless all payloads are sound, or all but a few that can be left out, and all
        replicas agree, and nobody gave up.
        """
        if self._transport.num_replicas == 1 and not self._local.is_fused:
            return self.said
        headers: list[Header] = []
        received = hashlib.blake2b(digest_size=8)
        for bucket, encoding in self._buckets:
            findings_RW = encoding.told_RW if self._is_told else encoding.findings_RW.cpu()
            received.update(findings_RW[:, : HEADER_WORDS + 1].contiguous().numpy().tobytes())
            for replica, found in enumerate(read_findings(bucket, findings_RW, replace(self.header, bucket=bucket.index))):
                if isinstance(found, PayloadError):
                    self.refused.setdefault(replica, found)
                else:
                    headers.append(found)
        if self.refused and not is_catching_up:
            if not self._drops or self.header.replica in self.refused:
                raise next(iter(self.refused.values()))
            if len(self.refused) == len(self._buckets[0][1].payloads_RB) - 1:
                words = (
                    f"step {self.header.step}: no payload of another replica is sound; is this one's own network at fault?"
                )
                raise ExchangeError(f"{words} ({next(iter(self.refused.values()))})")
        received.update(repr(sorted(self.refused)).encode())
        if is_catching_up and any(header.digest != self.header.digest for header in headers):
            raise ExchangeError(f"step {self.header.step} is not one that this replica can follow")
        _compare_digests(headers, self.header, self.description, metered(self._transport, self._traffic))
        for header in headers:
            if header.gave_up:
                raise ExchangeError(f"replica {header.replica} gave up step {header.step} because of an error of its own")
        self.received = received.hexdigest()
        return headers

    def apply_(self, decoding: Decoding) -> None:
        """Apply the payloads of all that are not refused."""
        with self._traffic.applying():
            for bucket, encoding in self._buckets:
                payloads_RB = encoding.payloads_RB
                if self.refused:
                    payloads_RB = payloads_RB[[row for row in range(len(payloads_RB)) if row not in self.refused]]
                self._local.apply_(bucket, self._groups, payloads_RB, decoding)

    def apply_late_(self, decoding: Decoding) -> None:
        """After `finish_on_device_`, where the device has left it to the host to say whose payloads count."""
        self._local.set_verdict_(Verdict.FINE)
        self.apply_(decoding)

    @property
    def payloads(self) -> list[Tensor]:
        """Everyone's, bucket by bucket."""
        return [encoding.payloads_RB for _, encoding in self._buckets]

    def catch_up_(self, given: Sequence[Tensor], decoding: Decoding) -> None:
        """Apply the payloads that another replica has applied, and has now given to this one."""
        own, sent = self.header.replica, [payloads_RB[self.header.replica].clone() for payloads_RB in self.payloads]
        for payloads_RB, theirs_RB in zip(self.payloads, given, strict=True):
            payloads_RB.copy_(theirs_RB)
        self._inspect_()
        try:
            self.check(is_catching_up=True)
        finally:
            for payloads_RB, mine_B in zip(self.payloads, sent, strict=True):
                payloads_RB[own].copy_(mine_B)
        if own in self.refused:  # the others had to leave it out: it returns to the momentum
            self.be_late().take_back_()
        self.apply_late_(decoding)

    def take_back_(self) -> None:
        """Undo what was encoded; or, where that was a step ago and its gradients are gone, return what was sent."""
        self._local.set_verdict_(Verdict.REFUSED)
        for bucket, encoding in self._buckets:
            if self._is_late:
                self._local.give_back_(encoding)
            else:
                self._local.undo_(bucket, self._groups, encoding)

    def abandon_(self) -> None:
        """After an error of the caller's: return what was sent to the momenta, which keep the gradients, since these may
        have changed by now; and tell the others."""
        self.be_late().take_back_()
        self.give_up_()

    def be_late(self) -> "Attempt":
        """The next attempt will be made before this one is finished."""
        self._is_late = True
        for exchange in self._pending:
            exchange.begin()
        for _, encoding in self._buckets:
            self._local.keep_units(encoding)
        return self

    def finish_on_device_(self, decoding: Decoding) -> None:
        """Launch both, of which the verdict lets one do its work; and have the findings brought to the host."""
        for bucket, encoding in self._buckets:
            self._local.undo_(bucket, self._groups, encoding)
        self.apply_(decoding)
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


def _trace(tensor: LocalTensor) -> tuple[Tensor | None, float]:
    """A gradient, and a number that changes when it is changed: its version, or its norm where DTensor hides the version."""
    gradient = tensor.source.grad
    if gradient is None:
        return None, 0.0
    return gradient, float(local_of(gradient).norm()) if is_sharded(tensor.source) else float(gradient._version)


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
        traffic.add(bytes_on_wire(transport, bucket.payload_bytes), transport.num_replicas)
        with traffic.waiting():
            transport.start_all_gather_(payloads_RB, f"exchange of step {header.step}, bucket {bucket.index}").wait()
        findings_RW = empty_findings(bucket, transport.num_replicas, torch.device("cpu"))
        inspect_(bucket, payloads_RB, findings_RW)
        for found in read_findings(bucket, findings_RW, mine):
            if isinstance(found, PayloadError):
                raise found
            headers.append(found)
    _compare_digests(headers, header, description, metered(transport, traffic))


def _compare_digests(headers: Sequence[Header], mine: Header, description: Sequence[str], all_gather: AllGather) -> None:
    if any(header.digest != mine.digest for header in headers):
        name_the_difference(description, all_gather)
