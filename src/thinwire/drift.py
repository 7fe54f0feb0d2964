"""Do all replicas still hold the same parameters? A hash of them, compared every so many steps.

The hash of a tensor is made of integer sums of its bits, by rows and by columns of 256 words, each weighted by its place:
any single change shows, no order of additions matters, and nothing is copied. `DriftCheck.seconds` counts what it costs.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.errors import DriftError, check_choice, check_int
from thinwire.exchange.agreement import AllGather
from thinwire.exchange.sharding import Island
from thinwire.exchange.transport import Transport

_log = logging.getLogger("thinwire")
ON_DRIFT = ("raise", "warn", "repair")
_COLUMNS = 256
# At most 32 bits: the top bits of 64-bit words would have no room to differ in a sum of 64 bits.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# An odd number, whose multiples by the places 1, 2, 3... are spread over all 64 bits (the golden ratio).
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)


class DriftCheck:
    """``every``: steps between checks, 0 for none. ``policy``: what to do about a difference."""

    def __init__(self, every: int, policy: str) -> None:
        self.every, self.policy = check_int("check_drift_every", every, 0), check_choice("on_drift", policy, ON_DRIFT)
        self.agreed_on = 0
        """How many steps all replicas are known to have taken: whether a check is due must not be one's own opinion."""
        self.num_checks = 0
        self.num_differences = 0
        self.seconds = 0.0
        """Time spent on all checks."""

    @property
    def facts(self) -> dict[str, object]:
        """What all replicas must share."""
        return {"check_drift_every": self.every, "on_drift": self.policy}

    def is_due(self, num_steps: int) -> bool:
        """Whether it is time, so many steps having been taken."""
        return self.every > 0 and num_steps == self.agreed_on > 0 and num_steps % self.every == 0

    def run(
        self,
        tensors: Sequence[tuple[str, Tensor]],
        num_steps: int,
        transport: Transport,
        all_gather: AllGather,
        island: Island,
        policy: str | None = None,
    ) -> bool:
        """Compare; collective. Whether all hold the same. Otherwise it raises, warns or repairs, on all replicas alike;
        ``policy`` goes before that of every check."""
        policy = self.policy if policy is None else check_choice("policy", policy, ON_DRIFT)
        began = time.perf_counter()
        same = self._same(list(tensors), num_steps, transport, all_gather, island, policy)
        self.num_checks += 1
        self.num_differences += not same
        self.seconds += time.perf_counter() - began
        return same

    def _same(
        self,
        named: list[tuple[str, Tensor]],
        num_steps: int,
        transport: Transport,
        all_gather: AllGather,
        island: Island,
        policy: str,
    ) -> bool:
        hashes = [hash_of(tensor) for _, tensor in named] or [torch.zeros(2, dtype=torch.int64, device="cpu")]
        hashes_T2 = torch.stack([found.to(hashes[0].device) for found in hashes]).cpu()
        message = hash_of(hashes_T2).view(torch.uint8)
        everyone = all_gather(message, f"drift check after step {num_steps}").cpu()
        differs = any(not torch.equal(row, everyone[0]) for row in everyone)
        words = ""
        if differs:
            rows = all_gather(hashes_T2.view(-1).view(torch.uint8), "hashes of the parameters").cpu()
            majority, others = split(rows)
            table_RT2 = rows.contiguous().view(torch.int64).view(len(rows), -1, 2)
            wrong = [place for place in range(len(named)) if (table_RT2[:, place] != table_RT2[majority[0], place]).any()]
            words = (
                f"after step {num_steps} replicas {others} hold other parameters than replicas {majority}, first of all in "
                f"{named[wrong[0]][0]} ({len(wrong)} of {len(named)} tensors)"
            )
            if policy == "repair":
                for place in wrong:
                    transport.broadcast_(named[place][1], "repair of the parameters", majority[0])
        if not island.any(differs):
            return True
        words = words or f"after step {num_steps} another rank of this replica holds other parameters than its counterparts"
        if policy == "raise":
            raise DriftError(f"{words}; on_drift='repair' copies the majority's")
        _log.warning("%s%s", words, "; they were given the majority's" if policy == "repair" else "")
        return False


def hash_of(tensor: Tensor) -> Tensor:
    """Two words of 64 bits that change with any bit of the tensor."""
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    whole = len(words) - len(words) % _COLUMNS
    table, rest = words[:whole].view(-1, _COLUMNS), words[whole:]
    rows = torch.cat([table.sum(dim=1, dtype=torch.int64), rest.sum(dtype=torch.int64)[None]])
    columns = table.sum(dim=0, dtype=torch.int64)
    columns[: len(rest)] += rest
    return torch.stack([_weighted(rows), _weighted(columns)])


def _weighted(sums: Tensor) -> Tensor:
    """The sum of all, each times an odd number of its place's own; int64 wraps around, everywhere alike."""
    places = torch.arange(1, len(sums) + 1, dtype=torch.int64, device=sums.device)
    return (sums * (places * _SPREAD | 1)).sum()


def split(rows_RB: Tensor) -> tuple[list[int], list[int]]:
    """The replicas whose bytes most have, the lowest ones among equally many, and the others."""
    texts = [row.numpy().tobytes() for row in rows_RB]
    counts = Counter(texts)
    chosen = max(texts, key=lambda text: counts[text])
    majority = [replica for replica, text in enumerate(texts) if text == chosen]
    return majority, [replica for replica in range(len(texts)) if replica not in majority]
