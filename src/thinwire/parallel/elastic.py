"""Replicas that come and go: who is there is settled by torchft's *lighthouse*, a small server that all of them can reach.

::

    transport = ElasticTransport("10.0.0.1:29510", name="replica-3", num_expected=8)
    optimizer = DeMo(model.parameters(), lr=1e-3, transport=transport)
    optimizer.meet(list(model.buffers()))

Every replica sends heartbeats to the lighthouse. When an exchange fails (a replica died, or is later than the deadline), all
others hang up, ask the lighthouse who is there, connect to those over gloo and go on. From time to time they ask it without
need, so that replicas that came back, or new ones, are let in between two steps. Only coordination goes through the
lighthouse; payloads and parameters go from replica to replica, and nothing is ever unpickled.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from thinwire.core.errors import ExchangeError, TooFewReplicasError, check_float, check_int, first_line
from thinwire.exchange.collective import CollectiveTransport, answer_within, words_of_gloo
from thinwire.exchange.transport import Done, Pending

_log = logging.getLogger("thinwire")
_PIECE_BYTES = 1 << 24
_CONNECT = timedelta(seconds=5)
# A lighthouse that does not answer is asked less and less often, down to once in so many times.
_MOST_PATIENT = 32
_PAUSE_SECONDS = 0.2
_NOTICE_SECONDS = 15.0


class ElasticTransport(CollectiveTransport):
    """One replica among those that a lighthouse knows.

    Arguments:
        lighthouse: its host and port.
        name: of this replica, the same after a restart, and no other's.
        num_expected: how many replicas all wait for before the first step, for ``patience_seconds`` at most.
        min_replicas: with fewer nobody goes on; more than half of the expected ones unless given, so that two halves of a
            network that fell apart cannot go on separately.
        timeout_seconds: the longest wait in an exchange; who is later counts as absent.
        patience_seconds: the longest wait for enough replicas to meet.
        meet_every_seconds: how often replicas are let in.
    """

    def __init__(
        self,
        lighthouse: str,
        name: str,
        *,
        num_expected: int,
        min_replicas: int | None = None,
        timeout_seconds: float = 60.0,
        patience_seconds: float = 600.0,
        meet_every_seconds: float = 30.0,
    ) -> None:
        host, _, port = lighthouse.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"lighthouse={lighthouse!r} must be host:port")
        if not name:
            raise ValueError("name must not be empty: it tells this replica from the others")
        self._num_expected = check_int("num_expected", num_expected, 1)
        self._min_replicas = check_int("min_replicas", min_replicas or num_expected // 2 + 1, 1)
        if self._min_replicas > num_expected:
            raise ValueError(f"min_replicas={min_replicas} is more than num_expected={num_expected}")
        self._timeout_seconds = check_float("timeout_seconds", timeout_seconds, 1e-3)
        self._patience_seconds = check_float("patience_seconds", patience_seconds, 1e-3)
        self._meet_every_seconds = check_float("meet_every_seconds", meet_every_seconds, 0.0)
        self._address, self._name, self._own_host = f"http://{lighthouse}", name, _own_address(host, int(port))
        self.replica, self.num_replicas, self.ranks = 0, 1, []
        self.meeting = 0
        self.members: Sequence[str] = (name,)
        self.device, self._staged = torch.device("cpu"), None
        self._pg: Any = None
        self._last_meeting = time.monotonic()
        self._num_silences = 0
        self._has_left = threading.Event()
        self._beats: threading.Thread | None = None
        self._client: Any = None
        self._store = TCPStore(self._own_host, 0, is_master=True, wait_for_workers=False)

    @property
    def is_meeting_due(self) -> bool:
        """Whether it is time to let others in."""
        pause = self._meet_every_seconds * min(1 << self._num_silences, _MOST_PATIENT)
        return time.monotonic() - self._last_meeting >= pause

    def leave(self) -> None:
        """Hang up, and be no longer counted."""
        self._has_left.set()
        self._hang_up()

    # Meetings.

    def meet(self, is_broken: bool, is_running: bool) -> bool:
        """Ask the lighthouse who is there, and connect to them; see `Elastic`."""
        if is_broken:
            self._hang_up()  # the others then learn of it, if they wait for this replica
        notice = threading.Timer(_NOTICE_SECONDS, self._say_that_it_waits)
        notice.daemon = True
        notice.start()
        try:
            return self._meet(is_broken, is_running)
        finally:
            notice.cancel()

    def _say_that_it_waits(self) -> None:
        _log.warning("%s waits at the lighthouse %s for %d replicas", self._name, self._address, self._num_expected)

    def _meet(self, is_broken: bool, is_running: bool) -> bool:
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            facts = {"is_running": is_running, "is_broken": is_broken, "has_waited": waited >= self._patience_seconds / 2}
            quorum = self._ask(facts)
            self._last_meeting = time.monotonic()
            names = [member.replica_id for member in quorum.participants] if quorum is not None else []
            if is_running and not is_broken and (quorum is None or self._is_as_it_was(quorum.participants)):
                return False  # without a lighthouse they go on as they are, too
            if self._name in names and self._is_enough(quorum.participants):
                self._hang_up()
                try:
                    self._connect(quorum, names)
                    return True
                except RuntimeError as error:
                    _log.warning("could not connect to %s: %s", names, first_line(error))
                    is_broken = True
            if time.monotonic() - began > self._patience_seconds:
                came = f"the lighthouse at {self._address} named nobody"
                if names:
                    came = f"only {names} came; does another process have the name of one of them?"
                raise TooFewReplicasError(
                    f"{self._name} waited {self._patience_seconds:g} s for at least {self._min_replicas} replicas: {came}"
                )
            time.sleep(_PAUSE_SECONDS)

    def _ask(self, facts: dict[str, bool]) -> Any:
        """The lighthouse's answer, the same for all who are named in it; None if it gave none in time."""
        from torchft.coordination import LighthouseClient

        try:
            if self._client is None:
                self._client = LighthouseClient(self._address, _CONNECT)
            if self._beats is None:
                self._beats = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
                self._beats.start()
            # One that hangs would keep all waiting for as long as a question may take.
            self._client.heartbeat(self._name, timeout=_CONNECT)
            answer = self._client.quorum(
                replica_id=self._name,
                # Not less: a question that is given up still counts as asked, and its answer reaches nobody.
                timeout=timedelta(seconds=self._patience_seconds),
                store_address=f"{self._own_host}:{self._store.port}",
                data=facts,
            )
            self._num_silences = 0
            return answer
        except (RuntimeError, TimeoutError) as error:
            _log.warning("no answer from the lighthouse at %s: %s", self._address, first_line(error))
            self._client = None
            self._num_silences += 1
            return None

    def _is_as_it_was(self, participants: Sequence[Any]) -> bool:
        names = [participant.replica_id for participant in participants]
        return names == list(self.members) and not any((one.data or {}).get("is_broken") for one in participants)

    def _is_enough(self, participants: Sequence[Any]) -> bool:
        """Whether those named can go on; of what all of them know, so that all come to the same answer."""
        if len(participants) < self._min_replicas:
            return False
        facts = [participant.data or {} for participant in participants]
        is_late = any(fact.get("is_running") or fact.get("has_waited") for fact in facts)
        return is_late or len(participants) >= self._num_expected

    def _connect(self, quorum: Any, names: Sequence[str]) -> None:
        created = quorum.created.seconds * 10**9 + quorum.created.nanos
        if created <= self.meeting:
            raise RuntimeError("the lighthouse repeated an old answer")
        self.replica, self.num_replicas, self.members = names.index(self._name), len(names), tuple(names)
        if len(names) > 1:
            address, limit_seconds = quorum.participants[0].store_address, _CONNECT.total_seconds() + self._timeout_seconds
            try:
                self._pg = answer_within(limit_seconds, lambda: self._make_group(address, f"thinwire/{created}"))
            except TimeoutError as error:
                raise RuntimeError(f"{names[0]}, where they connect, did not answer in {limit_seconds:g} s") from error
        self.meeting = created

    def _make_group(self, address: str, prefix: str) -> Any:
        host, _, port = address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_CONNECT)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._timeout_seconds)
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            options._devices = [gloo.create_device(hostname=self._own_host)]
        else:
            options._devices = [gloo.create_default_device()]
        return gloo(PrefixStore(prefix, store), self.replica, self.num_replicas, options)

    def _hang_up(self) -> None:
        group, self._pg, self._staged = self._pg, None, None
        if group is not None:
            with suppress(RuntimeError):
                group.abort()

    def _beat(self) -> None:
        from torchft.coordination import LighthouseClient

        client: Any = None
        while not self._has_left.wait(_PAUSE_SECONDS):
            try:
                client = client or LighthouseClient(self._address, _CONNECT)
                client.heartbeat(self._name)
            except (RuntimeError, TimeoutError):
                client = None  # it may come back

    # What `CollectiveTransport` asks of its group.

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Pending:
        """See `CollectiveTransport`. An exchange that cannot begin fails when it is waited for, not during backward."""
        if self.num_replicas == 1:
            return Done()
        try:
            return super().start_all_gather_(messages_RB, what)
        except ExchangeError as error:
            return _Failed(error)

    def start_all_to_all_(self, sent_RB: Tensor, received_RB: Tensor, what: str) -> Pending:
        """See `start_all_gather_`."""
        if self.num_replicas == 1:
            received_RB.copy_(sent_RB)
            return Done()
        try:
            return super().start_all_to_all_(sent_RB, received_RB, what)
        except ExchangeError as error:
            return _Failed(error)

    def broadcast_(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """See `CollectiveTransport`."""
        if self.num_replicas > 1:
            super().broadcast_(tensor, what, source)

    def copy_(self, tensor: Tensor, what: str, source: int, targets: Sequence[int]) -> None:
        """From one replica straight to some others, a piece at a time, each with a deadline."""
        if self.replica != source and self.replica not in targets:
            return
        buffer = tensor.detach().to("cpu").contiguous()
        for piece in buffer.view(-1).view(torch.uint8).split(_PIECE_BYTES):
            if self.replica == source:
                for target in targets:
                    self._finish(lambda to=target, part=piece: self._group_or_fail.send([part], to, 0), what)
            else:
                self._finish(lambda part=piece: self._group_or_fail.recv([part], source, 0), what)
        if self.replica != source and buffer.data_ptr() != tensor.data_ptr():
            tensor.copy_(buffer)

    def wait_for(self, work: dist.Work, what: str, is_on_gpu: bool) -> None:
        """See `CollectiveTransport`."""
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            raise self._failure(what, time.monotonic() - began, error) from error

    def _finish(self, begin: Any, what: str) -> None:
        self.wait_for(self.start(begin, what), what, False)

    @property
    def _group_or_fail(self) -> Any:
        if self._pg is None:
            raise RuntimeError("not connected")
        return self._pg

    def _all_gather(self, everyone: Tensor, mine: Tensor) -> dist.Work | None:
        work: dist.Work = self._group_or_fail._allgather_base(everyone, mine)
        return work

    def _all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work | None:
        work: dist.Work = self._group_or_fail.alltoall_base(received, sent, [], [])
        return work

    def _broadcast(self, flat: Tensor, source: int) -> dist.Work | None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        work: dist.Work = self._group_or_fail.broadcast([flat], options)
        return work

    def _failure(self, what: str, waited_seconds: float, error: RuntimeError) -> ExchangeError:
        return ExchangeError(f"{what}: lost a replica after {waited_seconds:.1f} s ({words_of_gloo(error)})")


class _Failed:
    """An exchange that could not begin."""

    def __init__(self, error: ExchangeError) -> None:
        self._error = error

    def begin(self) -> None:
        pass

    def wait(self) -> None:
        raise self._error

    def span(self) -> None:
        return None


def _own_address(host: str, port: int) -> str:
    """Of this machine, as the lighthouse's machine would see it; nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"lighthouse={host}:{port} cannot be reached from here: {error}") from error
