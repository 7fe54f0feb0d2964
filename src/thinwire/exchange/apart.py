"""A process group for exchanges that begin in backward: they must not meet those that a training loop makes for itself."""

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from thinwire.core.errors import ExchangeError, first_line
from thinwire.exchange.agreement import AllGather, hold_roll_call

# One for all optimizers that wait as long: groups are never freed while the default one lives.
_made: "WeakKeyDictionary[dist.ProcessGroup, dict[float, dist.ProcessGroup]]" = WeakKeyDictionary()


def says_apart(is_apart: bool) -> list[str]:
    """What a rank says first of itself, so that one with such a group and one without do not wait for each other."""
    return ["islands: None", f"a process group of its own, for overlap: {is_apart}"]


def group_apart(all_gather: AllGather, timeout_seconds: float) -> dist.ProcessGroup:
    """A group of all ranks besides the default one. Collective over the latter, which ``all_gather`` leads to."""
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, {})
    waits = f"which waits for {timeout_seconds:g} s and is there: {timeout_seconds in made}"
    hold_roll_call([*says_apart(True), waits], all_gather, "rank")
    if timeout_seconds not in made:
        try:
            made[timeout_seconds] = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            raise ExchangeError(f"no process group for overlap could be made: {first_line(error)}") from error
    return made[timeout_seconds]
