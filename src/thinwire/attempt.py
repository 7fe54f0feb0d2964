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
from thinwire.exchange.transport import Transport, elastic, metered
from thinwire.gradients import fingerprint, first_trouble
from thinwire.local_step import Encoding, LocalStep
from thinwire.routes import Route
from thinwire.sealing import inspect_, open_, read_findings
from thinwire.slabs import LocalTensor
from thinwire.stack_step import GroupStep
from thinwire.wire.payload import HEADER_WORDS, Header, Trouble, Verdict

_log = logging.getLogger("thinwire")
_POLL_SECONDS = 2e-4
# Of a replica that gave up: it does not say what it would have done, and takes no part in finding out who differs.
_NO_DIGEST = bytes(16)


class Attempt:
    """``header`` is this replica's for every bucket; ``description`` is what its digest was made from. ``compares`` says
    whether to look if all replicas have the same gradients, ``drops`` whether bad payloads are left out."""

    def __init__(
        self,
        route: Route,
        rooms: Sequence[Encoding],
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
        self._route, self._local, self._groups = route, local, groups
        self._buckets = list(zip(route.buckets, rooms, strict=True))
        self._sent_gradients: list[tuple[int, Tensor | None, float]] = []
        self._is_told = self._is_late = False
        self._is_left_open = elastic(transport) is not None
        """Whether it is left as it is when its exchange fails: others may have taken the step, and all will meet."""
        self._event: torch.cuda.Event | None = None
        self.has_failed = self.has_given_up = False
        self.num_sent = 0
        self.said: list[Header] = []
        """The own headers, as sent."""
        self.received = ""
        """A hash of all headers and checksums that have come, once `check` has looked at them."""
        self.refused: dict[int, PayloadError] = {}
        """The replicas whose payloads do not count, and why; known after `check`."""
        for room in rooms:
            room.reset()

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
            self._send(bucket, encoding, header)
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
            for (bucket, encoding), header in zip(self._buckets, self.said, strict=True):
                self._route.turn_(bucket, encoding, header, self._groups)
            with self._traffic.waiting():
                for _, encoding in self._buckets:
                    encoding.wait()
            self._traffic.add_spans(span for _, encoding in self._buckets for span in encoding.spans)
            if self._transport.num_replicas > 1 or self._local.is_fused:
                with self._traffic.applying():
                    self._inspect_()

    @contextmanager
    def taken_back_on_error(self) -> Iterator[None]:
        """See `send_rest_`."""
        try:
            yield
        except BaseException as error:
            self.has_failed = True
            self._keep_rooms()
            if isinstance(error, ExchangeError) and self._is_left_open:
                for _, encoding in self._buckets:
                    encoding.pending.clear()
                raise
            self.take_back_()
            if not isinstance(error, ThinwireError) or self._local.island.has_heard(error):
                self.give_up_()
            raise

    def drop_(self) -> None:
        """Take back an attempt whose exchange may still be under way."""
        self._keep_rooms()
        self.take_back_()

    def _keep_rooms(self) -> None:
        """No other attempt may use them: an exchange that failed may still write to them."""
        for _, encoding in self._buckets:
            encoding.is_safe = False

    def _send(self, bucket: Bucket, encoding: Encoding, header: Header) -> None:
        self._route.start_(bucket, encoding, header)
        self.num_sent += 1

    def give_up_(self) -> None:
        """After an error of this replica's own: send what it still owes, marked as worthless."""
        self.has_given_up = True
        headers = [_given_up(self.header.step, self.header.replica, bucket) for bucket, _ in self._buckets]
        self.said[self.num_sent :] = headers[self.num_sent :]
        with _saying_if_nobody_hears():
            for (bucket, encoding), header in list(zip(self._buckets, headers, strict=True))[self.num_sent :]:
                open_(encoding.payload_B, header)
                self._send(bucket, encoding, header)
            for (bucket, encoding), header in zip(self._buckets, headers, strict=True):
                self._route.turn_(bucket, encoding, header, self._groups)
            for _, encoding in self._buckets:
                encoding.wait()

    def _inspect_(self) -> None:
        for bucket, encoding in self._buckets:
            inspect_(self._route.forms(bucket, encoding), encoding.payloads_RB, encoding.findings_RW, self._local.is_fused)
            if self._local.is_fused:
                from thinwire.kernels.checks import judge_

                (verdict,) = self._local.verdicts.values()
                damage = Verdict.DAMAGED if self._drops else Verdict.REFUSED
                judge_(encoding.payloads_RB, encoding.replica, encoding.findings_RW, verdict, damage)

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
            if encoding.failure is not None and not is_catching_up:
                raise encoding.failure
            findings_RW = encoding.told_RW if self._is_told else encoding.findings_RW.cpu()
            received.update(findings_RW[:, : HEADER_WORDS + 1].contiguous().numpy().tobytes())
            expected = replace(self.header, bucket=bucket.index)
            for replica, found in enumerate(read_findings(self._route.forms(bucket, encoding), findings_RW, expected)):
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
        _refuse_given_up([header for header in headers if header.gave_up], self.header.step)
        self.received = received.hexdigest()
        return headers

    def apply_(self, decoding: Decoding) -> None:
        """Apply the payloads of all that are not refused."""
        with self._traffic.applying():
            for bucket, encoding in self._buckets:
                self._route.apply_(bucket, self._groups, encoding, self.refused, decoding)

    def apply_late_(self, decoding: Decoding) -> None:
        """Where the host says whose payloads count: the device may have found one of them damaged, and would apply none."""
        self._local.set_verdict_(Verdict.FINE)
        self.apply_(decoding)

    @property
    def names(self) -> Sequence[str]:
        """Of its tensors; the optimizer may have another plan by now."""
        return self._local.names

    @property
    def left_out(self) -> list[tuple[int, PayloadError]]:
        """Those whose messages to this replica alone were bad, and why."""
        return [pair for _, encoding in self._buckets for pair in encoding.left_out.items()]

    @property
    def payloads(self) -> list[Tensor]:
        """What all have alike, a row from each replica, bucket by bucket."""
        return [encoding.payloads_RB for _, encoding in self._buckets]

    def take_over_(self, given: Sequence[Tensor]) -> None:
        """Before `apply_late_`: take the payloads that another replica has applied, and has now given to this one."""
        own, sent = self.header.replica, [payloads_RB[self.header.replica].clone() for payloads_RB in self.payloads]
        for payloads_RB, theirs_RB in zip(self.payloads, given, strict=True):
            payloads_RB.copy_(theirs_RB)
        self._inspect_()
        try:
            self.check(is_catching_up=True)
        finally:
            for payloads_RB, mine_B in zip(self.payloads, sent, strict=True):
                payloads_RB[own].copy_(mine_B)
        if own in self.refused:
            for bucket, encoding in self._buckets:
                self._route.leave_out_(bucket, encoding)

    def take_back_(self) -> None:
        """Undo what was encoded; or, where that was a step ago and its gradients are gone, return what was sent."""
        self._local.set_verdict_(Verdict.REFUSED)
        for bucket, encoding in self._buckets:
            self._route.take_back_(bucket)
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
        for _, encoding in self._buckets:
            for exchange in encoding.pending:
                exchange.begin()
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


def _given_up(step: int, replica: int, bucket: Bucket) -> Header:
    return Header(_NO_DIGEST, step, replica, bucket.index, gave_up=True)


def give_up_(route: Route, step: int, replica: int) -> None:
    """Send what the others wait for, marked as worthless, where there is no attempt that could."""
    headers = [_given_up(step, replica, bucket) for bucket in route.buckets]
    with _saying_if_nobody_hears():
        for _, room, _ in _exchange_headers(route, headers):
            room.wait()


@contextmanager
def _saying_if_nobody_hears() -> Iterator[None]:
    """The error that made this replica give up is the one to be raised."""
    try:
        yield
    except ThinwireError as error:
        _log.warning("could not tell the other replicas that this one gave up: %s", error)


def _exchange_headers(route: Route, headers: Sequence[Header]) -> list[tuple[Bucket, Encoding, Header]]:
    """Begin to exchange messages with nothing but headers in them."""
    rooms = [route.room(bucket) for bucket in route.buckets]
    buckets = list(zip(route.buckets, rooms, headers, strict=True))
    for bucket, room, own in buckets:
        open_(room.payload_B, own)
        route.start_(bucket, room, own)
    for bucket, room, own in buckets:
        route.turn_(bucket, room, own, ())
    return buckets


def announce_plan(
    old_route: Route, header: Header, description: Sequence[str], transport: Transport, traffic: Traffic
) -> None:
    """Agree with the others on a new plan, or raise on all replicas.

    They may not know of it, and expect messages of the old sizes: so they get those, given up, with the new digest.
    """
    mine = [replace(header, bucket=bucket.index, gave_up=True) for bucket in old_route.buckets]
    headers = []
    for bucket, room, own in _exchange_headers(old_route, mine):
        with traffic.waiting():
            room.wait()
        inspect_(old_route.forms(bucket, room), room.payloads_RB, room.findings_RW)
        for found in read_findings(old_route.forms(bucket, room), room.findings_RW.cpu(), own):
            if isinstance(found, PayloadError):
                raise found
            headers.append(found)
    _compare_digests(headers, header, description, metered(transport, traffic))


def _refuse_given_up(headers: Sequence[Header], step: int) -> None:
    for header in headers:
        raise ExchangeError(f"replica {header.replica} gave up step {step} because of an error of its own")


def _compare_digests(headers: Sequence[Header], mine: Header, description: Sequence[str], all_gather: AllGather) -> None:
    _refuse_given_up([header for header in headers if header.digest == _NO_DIGEST], mine.step)
    if any(header.digest != mine.digest for header in headers):
        name_the_difference(description, all_gather)
