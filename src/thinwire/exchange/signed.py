"""Messages that only those who have the key can have written: a transport around another one.

Every message carries an HMAC-SHA256 over who sent it, in which exchange of which session, and all of its bytes. The session
is made of fresh random bytes of every replica, so nothing that was sent in another exchange, by another replica or in
another run passes. The key itself is not kept, only the state of the HMAC that it begins.
"""

import hashlib
import hmac
import logging
import secrets
import struct
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.errors import AgreementError, ExchangeError
from thinwire.exchange.agreement import AllGather
from thinwire.exchange.collective import default_transport
from thinwire.exchange.traffic import Count
from thinwire.exchange.transport import Elastic, Pending, Transport, elastic, metered

LEAST_KEY_BYTES = 16
_TAG_BYTES = 32
_FRESH_BYTES = 32
_DOMAIN = b"thinwire signed exchange 1"
_GREETING, _GATHER, _ROWS, _BROADCAST, _COPY = b"G", b"A", b"R", b"B", b"C"
# number of the exchange, sender, number of replicas, bytes of the name
_PLACE = struct.Struct("<QIII")
_log = logging.getLogger("thinwire")


def check_key(name: str, key: object) -> bytes:
    """Return ``key`` if it is long enough; an error never shows it."""
    if not isinstance(key, bytes):
        raise TypeError(f"{name} must be bytes, at least {LEAST_KEY_BYTES} of them, got {type(key).__name__}")
    if len(key) < LEAST_KEY_BYTES:
        raise ValueError(f"{name} must have at least {LEAST_KEY_BYTES} bytes, got {len(key)}")
    return key


def choose_transport(
    transport: Transport | None,
    group: dist.ProcessGroup | None,
    timeout_seconds: float,
    secret: bytes | None,
    setup: Count | None = None,
) -> Transport:
    """The transport that was passed, or else the default one over ``group``; signed where there is a secret."""
    if transport is not None and group is not None:
        raise ValueError("pass process_group or transport, not both")
    if secret is not None:
        check_key("secret", secret)
    chosen = transport or default_transport(group, timeout_seconds)
    if secret is None:
        return chosen
    reach = elastic(chosen)
    return SignedTransport(chosen, secret, setup) if reach is None else SignedElasticTransport(reach, secret)


class StrangersError(ExchangeError):
    """So many replicas do not have the key."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class SignedTransport:
    """Signs what it sends through ``inner``, and refuses what is not signed; alone, it does nothing.

    Building one is collective: the replicas greet each other, and ``setup`` counts the bytes of that.
    """

    def __init__(self, inner: Transport, key: bytes, setup: Count | None = None) -> None:
        self._signer = hmac.new(check_key("key", key), digestmod=hashlib.sha256)
        self._inner = inner
        self.replica, self.num_replicas = inner.replica, inner.num_replicas
        self.ranks = list(getattr(inner, "ranks", ()))
        self.overhead_bytes = _TAG_BYTES
        """What is added to every message."""
        self.num_refused = [0] * self.num_replicas
        """Messages of each replica that were not signed as they must be."""
        # Replicas exchange in the same order, so the count is the same on all; what fails before it is sent does not count.
        self._num_exchanges = 0
        self._session = b""
        if self.num_replicas > 1:
            self._session = self._greet(setup or Count())

    def _greet(self, setup: Count) -> bytes:
        """Make the session of everyone's fresh random bytes, and prove to each other that all know it and have the key.

        Both messages are as long as a roll call: a replica that has no secret at all then finds other bytes where it
        expects a roll call, and says so, while messages of another length can make gloo abort.
        """
        gather = _asking_for_keys(metered(self._inner, setup))
        fresh_B = torch.frombuffer(bytearray(secrets.token_bytes(_FRESH_BYTES)), dtype=torch.uint8)
        session = hashlib.sha256(gather(fresh_B, "greeting of the replicas").cpu().numpy().tobytes()).digest()
        what, signed_B = "proof of the key", torch.frombuffer(bytearray(session + bytes(_TAG_BYTES)), dtype=torch.uint8)
        self._sign_(signed_B, _GREETING, 0, what)
        rows = [torch.cat([signed_B[:-_TAG_BYTES], proof_B]) for proof_B in gather(signed_B[-_TAG_BYTES:], what).cpu()]
        strange = [sender for sender, row in enumerate(rows) if not self._is_signed(row, _GREETING, 0, sender, what)]
        if strange:
            raise StrangersError(
                len(strange),
                f"replica {self.replica} does not have the same key as replicas {strange}; every replica needs the same one",
            )
        return session

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Pending:
        """Begin one all-gather. A message on a GPU is brought to the host first, and waited for."""
        if self.num_replicas == 1:
            return self._inner.start_all_gather_(messages_RB, what)
        number = self._num_exchanges
        signed_RB = self._room_for(messages_RB)
        signed_RB[self.replica, :-_TAG_BYTES] = messages_RB[self.replica]
        self._sign_(signed_RB[self.replica], _GATHER, number, what)
        self._num_exchanges += 1
        inner = self._inner.start_all_gather_(signed_RB, what)
        return _Signed(inner, lambda: self._open_(signed_RB, messages_RB, _GATHER, number, what))

    def start_all_to_all_(self, sent_RB: Tensor, received_RB: Tensor, what: str) -> Pending:
        """Begin one all-to-all; the tag of each row says for whom it is."""
        if self.num_replicas == 1:
            return self._inner.start_all_to_all_(sent_RB, received_RB, what)
        number = self._num_exchanges
        leaving_RB, arriving_RB = self._room_for(sent_RB), self._room_for(received_RB)
        leaving_RB[:, :-_TAG_BYTES] = sent_RB
        for receiver, signed_B in enumerate(leaving_RB):
            self._sign_(signed_B, _ROWS, number, _to(receiver, what))
        self._num_exchanges += 1
        received_RB[self.replica].copy_(sent_RB[self.replica])
        inner = self._inner.start_all_to_all_(leaving_RB, arriving_RB, what)
        mine = _to(self.replica, what)
        return _Signed(inner, lambda: self._open_(arriving_RB, received_RB, _ROWS, number, mine))

    def _room_for(self, messages_RB: Tensor) -> Tensor:
        return torch.empty(self.num_replicas, messages_RB.shape[1] + _TAG_BYTES, dtype=torch.uint8, device="cpu")

    def _open_(self, signed_RB: Tensor, messages_RB: Tensor, kind: bytes, number: int, what: str) -> list[int]:
        """Take over what the others have sent, zeros where it is not signed; who these were."""
        refused = []
        for sender, signed_B in enumerate(signed_RB):
            if sender == self.replica:
                continue
            if self._is_signed(signed_B, kind, number, sender, what):
                messages_RB[sender].copy_(signed_B[:-_TAG_BYTES])
            else:
                messages_RB[sender].zero_()
                refused.append(sender)
                self.num_refused[sender] += 1
                _log.warning("%s: %s", what, _not_signed(sender))
        return refused

    def broadcast_(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Overwrite ``tensor`` with one replica's, if that has signed it."""
        if self.num_replicas == 1:
            return

        def broadcast_(signed_B: Tensor) -> None:
            self._num_exchanges += 1
            self._inner.broadcast_(signed_B, what, source)

        self._hand_over_(tensor, _BROADCAST, self._num_exchanges, what, source, broadcast_)

    def _hand_over_(
        self, tensor: Tensor, kind: bytes, number: int, what: str, source: int, move_: Callable[[Tensor], None]
    ) -> None:
        """Overwrite ``tensor`` with the source's, which ``move_`` brings here with its tag."""
        signed_B = torch.zeros(tensor.numel() * tensor.element_size() + _TAG_BYTES, dtype=torch.uint8, device="cpu")
        if self.replica == source:
            signed_B[:-_TAG_BYTES] = tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._sign_(signed_B, kind, number, what)
        move_(signed_B)
        if self.replica == source:
            return
        if not self._is_signed(signed_B, kind, number, source, what):
            self.num_refused[source] += 1
            raise ExchangeError(f"{what}: {_not_signed(source)}")
        tensor.copy_(signed_B[:-_TAG_BYTES].view(tensor.dtype).view(tensor.shape))

    def _sign_(self, signed_B: Tensor, kind: bytes, number: int, what: str) -> None:
        """Write the tag behind the message that is there."""
        tag = self._tag(signed_B[:-_TAG_BYTES], kind, number, self.replica, what)
        signed_B[-_TAG_BYTES:] = torch.frombuffer(bytearray(tag), dtype=torch.uint8)

    def _is_signed(self, signed_B: Tensor, kind: bytes, number: int, sender: int, what: str) -> bool:
        message_B, found = signed_B[:-_TAG_BYTES], signed_B[-_TAG_BYTES:].numpy().tobytes()
        return hmac.compare_digest(found, self._tag(message_B, kind, number, sender, what))

    def _tag(self, message_B: Tensor, kind: bytes, number: int, sender: int, what: str) -> bytes:
        """Every part but the last has a length that is fixed or stated, so no two messages are signed as the same bytes."""
        name = what.encode()
        signer = self._signer.copy()
        signer.update(_DOMAIN + kind + _PLACE.pack(number, sender, self.num_replicas, len(name)) + name + self._session)
        signer.update(message_B.numpy().data)
        return signer.digest()


class SignedElasticTransport(SignedTransport):
    """The same where replicas come and go: every meeting begins a session, so that all must have the key."""

    def __init__(self, inner: Elastic, key: bytes) -> None:
        super().__init__(inner, key)
        self._elastic = inner

    @property
    def meeting(self) -> int:
        """See `Elastic`."""
        return self._elastic.meeting

    @property
    def members(self) -> Sequence[str]:
        """See `Elastic`."""
        return self._elastic.members

    @property
    def is_meeting_due(self) -> bool:
        """See `Elastic`."""
        return self._elastic.is_meeting_due

    def meet(self, is_broken: bool, is_running: bool) -> bool:
        """See `Elastic`."""
        if not self._elastic.meet(is_broken, is_running):
            return False
        self.replica, self.num_replicas = self._elastic.replica, self._elastic.num_replicas
        self.num_refused, self._num_exchanges, self._session = [0] * self.num_replicas, 0, b""
        if self.num_replicas == 1:
            return True
        try:
            self._session = self._greet(Count())
        except StrangersError as error:
            if 2 * error.number < self.num_replicas:
                raise  # those who have the key meet again, until the strangers have left
            raise AgreementError(str(error)) from error
        return True

    def copy_(self, tensor: Tensor, what: str, source: int, targets: Sequence[int]) -> None:
        """See `Elastic`. Within a session no two copies have the same name, which takes the place of a number."""
        if self.replica == source or self.replica in targets:
            self._hand_over_(
                tensor, _COPY, 0, what, source, lambda signed_B: self._elastic.copy_(signed_B, what, source, targets)
            )

    def leave(self) -> None:
        """Hang up, and be no longer counted."""
        self._elastic.leave()


def _asking_for_keys(gather: AllGather) -> AllGather:
    """With the likeliest reason, if it fails: a replica without a key finds bytes that it does not expect, and leaves."""

    def gather_or_ask(message_B: Tensor, what: str) -> Tensor:
        try:
            return gather(message_B, what)
        except ExchangeError as error:
            raise ExchangeError(f"{error}; has every replica the secret?") from error

    return gather_or_ask


def _not_signed(replica: int) -> str:
    return (
        f"what came from replica {replica} was not signed by it for this exchange: it was changed on its way, had been sent "
        "before, or the replica is at another step"
    )


def _to(receiver: int, what: str) -> str:
    return f"{what}, for replica {receiver}"


class _Signed:
    """An exchange under way; ``refused`` are the replicas whose messages did not pass, once it is over."""

    def __init__(self, inner: Pending, open_: Callable[[], list[int]]) -> None:
        self._inner, self._open_ = inner, open_
        self.refused: list[int] = []

    def begin(self) -> None:
        self._inner.begin()

    def span(self) -> tuple[float, float] | None:
        return self._inner.span()

    def wait(self) -> None:
        self._inner.wait()
        self.refused = self._open_()
