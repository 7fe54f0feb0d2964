"""The transport over a `torch.distributed` process group: gloo, NCCL, or any backend with an all-gather of bytes.

Every wait has a deadline. A replica that has waited for a second says so in the group's store; when an exchange fails, those
who have said nothing are the ones that were waited for, and the error names them. A fast exchange never touches the store.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from thinwire.core.errors import ExchangeError, first_line
from thinwire.exchange.transport import Pending, SoloTransport, Transport

Answer = TypeVar("Answer")
_ANNOUNCE_AFTER_SECONDS = 1.0
_STORE_ANSWERS_WITHIN_SECONDS = 5.0
_num_transports: Counter[str] = Counter()
"""By the name of the group: ranks may build other groups' transports that others do not have."""


def is_distributed() -> bool:
    """Whether `torch.distributed` is there and initialised."""
    return dist.is_available() and dist.is_initialized()


def default_transport(group: dist.ProcessGroup | None, timeout_seconds: float) -> Transport:
    """The transport over this group, or over the default one if there is one; a single replica needs none."""
    if group is None and is_distributed():
        group = dist.group.WORLD
    if group is None or dist.get_world_size(group) == 1:
        return SoloTransport()
    return CollectiveTransport(group, timeout_seconds)


def answer_within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """What ``ask`` returns or raises; a `TimeoutError` if it takes longer.

    torch's store waits for ever, and deaf to Ctrl-C, while its host is there but frozen, whatever time-out it was given. So
    it is asked in a thread, which is left behind if need be.
    """
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="question to the store", daemon=True).start()
    return answer.result(seconds)


def words_of_gloo(error: BaseException) -> str:
    """What it says, without the file of its source that it begins with and the advice that it ends with."""
    return first_line(error).split("] ", 1)[-1].split(". ", 1)[0]


class CollectiveTransport:
    """One replica per rank of a process group; ``noun`` is what errors call them."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float, noun: str = "replicas") -> None:
        self._group = group
        self._timeout_seconds = timeout_seconds
        self.replica = dist.get_rank(group)
        if self.replica < 0:
            raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
        self.num_replicas = dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        # Ranks build the transports of a group in the same order, so the count is the same on all of them.
        number = _num_transports[group.group_name]
        _num_transports[group.group_name] += 1
        self._roster = _Roster(_store_of(group), f"thinwire/{number}", self.replica, self.num_replicas, noun)
        self.device = _message_device(group)
        """Where messages must lie; None if any place will do."""
        self._staged: _UnderWay | None = None

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Pending:
        """Begin one all-gather, in place where the group can reach the device of the messages.

        A message that must first come from a GPU to the host is on its way when this returns, and is sent when the next
        exchange begins or the first wait does: so the host need not wait for the GPU here, and the order of the exchanges
        is the same on all replicas.
        """
        self._begin_staged()
        gathered_RB = self._room_for(messages_RB)
        if gathered_RB is not messages_RB:
            gathered_RB[self.replica].copy_(messages_RB[self.replica], non_blocking=messages_RB.is_cuda)
        return self._begin_when_there(
            what, gathered_RB, messages_RB, lambda: self._all_gather(gathered_RB.view(-1), gathered_RB[self.replica])
        )

    def start_all_to_all_(self, sent_RB: Tensor, received_RB: Tensor, what: str) -> Pending:
        """Begin one all-to-all; as for `start_all_gather_`, messages on a GPU may be sent later."""
        self._begin_staged()
        leaving_RB, arriving_RB = self._room_for(sent_RB), self._room_for(received_RB)
        if leaving_RB is not sent_RB:
            leaving_RB.copy_(sent_RB, non_blocking=sent_RB.is_cuda)
        return self._begin_when_there(
            what, arriving_RB, received_RB, lambda: self._all_to_all(arriving_RB.view(-1), leaving_RB.view(-1))
        )

    def _room_for(self, messages_RB: Tensor) -> Tensor:
        """The messages themselves where the group can reach them, else room for them where it can."""
        if self.device is None or self.device == messages_RB.device:
            return messages_RB
        is_pinned = messages_RB.is_cuda and self.device.type == "cpu"
        return torch.empty(messages_RB.shape, dtype=messages_RB.dtype, device=self.device, pin_memory=is_pinned)

    def _begin_when_there(
        self, what: str, arriving_RB: Tensor, messages_RB: Tensor, begin: Callable[[], dist.Work | None]
    ) -> Pending:
        exchange = _UnderWay(self, what, arriving_RB, messages_RB, begin)
        if arriving_RB.device.type == "cpu" and messages_RB.is_cuda:
            self._staged = exchange
        else:
            exchange.begin()
        return exchange

    def _begin_staged(self) -> None:
        if self._staged is not None:
            self._staged.begin()
            self._staged = None  # not before: were it interrupted, later exchanges would go first

    def _all_gather(self, everyone: Tensor, mine: Tensor) -> dist.Work | None:
        # torch 2.13 renames all_gather_into_tensor to all_gather_single and warns of the old name, which 2.11 still needs.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work: dist.Work | None = gather(everyone, mine, group=self._group, async_op=True)
        return work

    def _all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        return work

    def _broadcast(self, flat: Tensor, source: int) -> dist.Work | None:
        rank = dist.get_global_rank(self._group, source)
        work: dist.Work | None = dist.broadcast(flat, rank, self._group, async_op=True)
        return work

    def broadcast_(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Overwrite ``tensor`` with one replica's, as bytes, since no backend knows every dtype."""
        self._begin_staged()
        buffer = tensor.detach().to(self.device or tensor.device).contiguous()
        flat = buffer.view(-1).view(torch.uint8)
        self.run(lambda: self._broadcast(flat, source), what, flat.is_cuda)
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.copy_(buffer)

    def run(self, begin: Callable[[], dist.Work | None], what: str, is_on_gpu: bool) -> None:
        """Begin any collective of the group, and wait for it as `wait_for` does."""
        self.wait_for(self.start(begin, what), what, is_on_gpu)

    def wait_for(self, work: dist.Work, what: str, is_on_gpu: bool) -> None:
        """Wait until ``work`` is done, or raise an `ExchangeError` that says for whom it waited."""
        began = time.monotonic()
        announcement = threading.Timer(_ANNOUNCE_AFTER_SECONDS, self._roster.announce)
        announcement.daemon = True
        announcement.start()
        try:
            if is_on_gpu:
                work.wait()  # with a deadline the host would wait for the device; the group's own time-out ends it
            else:
                work.wait(timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            raise self._failure(what, time.monotonic() - began, error) from error
        finally:
            announcement.cancel()
            self._roster.num_finished += 1

    def start(self, begin: Callable[[], dist.Work | None], what: str) -> dist.Work:
        """Hand an exchange to the group."""
        try:
            work = begin()
        except RuntimeError as error:
            raise self._failure(what, 0.0, error) from error
        if work is None:
            raise ExchangeError(f"{what}: the process group did not start it")
        return work

    def _failure(self, what: str, waited_seconds: float, error: RuntimeError) -> ExchangeError:
        missing = self._roster.who_is_missing()
        return ExchangeError(f"{what}: {missing} after {waited_seconds:.1f} s ({words_of_gloo(error)})")


class _UnderWay:
    """An exchange that is under way, or will be once its messages have come from the GPU."""

    def __init__(
        self,
        transport: CollectiveTransport,
        what: str,
        arriving_RB: Tensor,
        messages_RB: Tensor,
        start: Callable[[], dist.Work | None],
    ) -> None:
        self._transport, self._what, self._start = transport, what, start
        self._arriving_RB, self._messages_RB = arriving_RB, messages_RB
        self._copied = torch.cuda.current_stream(messages_RB.device).record_event() if messages_RB.is_cuda else None
        self._work: dist.Work | None = None
        self._began = self._ended = 0.0

    def begin(self) -> None:
        """Hand it to the group, if that has not been done."""
        self._begin()

    def _begin(self) -> dist.Work:
        if self._work is None:
            if self._copied is not None and self._arriving_RB.device.type == "cpu":
                self._copied.synchronize()
            self._began = time.monotonic()
            self._work = self._transport.start(self._start, self._what)
            if self._arriving_RB.device.type == "cpu":
                self._work.get_future().add_done_callback(self._end)
        return self._work

    def _end(self, _: object) -> None:
        self._ended = time.monotonic()

    def span(self) -> tuple[float, float] | None:
        return (self._began, self._ended) if self._ended else None

    def wait(self) -> None:
        self._transport.wait_for(self._begin(), self._what, self._arriving_RB.is_cuda)
        if self._arriving_RB is not self._messages_RB:
            self._messages_RB.copy_(self._arriving_RB, non_blocking=self._messages_RB.is_cuda)


class _Roster:
    """Who waits in which exchange, kept in the group's store: one key per replica, written only when a wait is long."""

    def __init__(self, store: Store | None, prefix: str, replica: int, num_replicas: int, noun: str) -> None:
        self._store, self._prefix, self._replica, self._num_replicas = store, prefix, replica, num_replicas
        self._noun, self._is_host = noun, dist.is_initialized() and dist.get_rank() == 0
        self.num_finished = 0

    def announce(self) -> None:
        """Say that this replica waits in its current exchange."""
        if self._store is None:
            return
        try:
            self._store.set(self._key(self._replica), str(self.num_finished))
        except RuntimeError:
            self._store = None  # the host of the store is gone; the failing exchange will say the rest

    def who_is_missing(self) -> str:
        """A phrase that names the replicas that have not come to the current exchange."""
        try:
            missing = answer_within(_STORE_ANSWERS_WITHIN_SECONDS, self._missing)
        except TimeoutError:
            host = "rank 0 (or its launcher), who hosts the store, does not answer"
            return f"lost the connection to other {self._noun}, and {host},"
        except RuntimeError:
            return f"lost the connection to the other {self._noun}, and to the host of the store,"
        if missing is None:
            return f"lost the connection to the other {self._noun}, and the store cannot say to which,"
        if not missing:
            return f"all {self._noun} wait, though perhaps in different exchanges; it failed"
        return f"waited for {self._noun} {missing}, which did not come or died,"

    def _missing(self) -> list[int] | None:
        self.announce()
        time.sleep(1.5 * _ANNOUNCE_AFTER_SECONDS)  # the others fail in the same moment: give them time to say so
        store = self._store
        if store is None:
            return None
        missing = [replica for replica in range(self._num_replicas) if not self._is_here(replica, store)]
        if self._is_host:
            time.sleep(_ANNOUNCE_AFTER_SECONDS)  # the others ask now, and the store may end with this process
        return missing

    def _is_here(self, replica: int, store: Store) -> bool:
        key = self._key(replica)
        return replica == self._replica or (store.check([key]) and int(store.get(key)) >= self.num_finished)

    def _key(self, replica: int) -> str:
        return f"{self._prefix}/{replica}"


def _store_of(group: dist.ProcessGroup) -> Store | None:
    # torch has no public name for it; without it errors are less precise, and nothing else changes.
    find = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    return find(group) if find is not None else None


def _message_device(group: dist.ProcessGroup) -> torch.device | None:
    """Where messages must lie: the CPU for gloo, this rank's GPU where only NCCL is there, None if any place will do."""
    backends = dist.get_backend_config(group)
    if "nccl" not in backends:
        return torch.device("cpu")
    return None if "cpu:" in backends else torch.device("cuda", torch.cuda.current_device())
