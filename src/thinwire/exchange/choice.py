"""Which exchange replicas use: what may be asked for, and what `auto` chooses."""

from thinwire.core.errors import check_choice

ALL_GATHER, OWNER, HIERARCHICAL, AUTO = "all_gather", "owner", "hierarchical", "auto"
EXCHANGES = (ALL_GATHER, OWNER, HIERARCHICAL, AUTO)
# An owner exchange receives some nine payloads, whatever their number, and has a second round trip: from here on about
# half of an all-gather's, or less.
_LEAST_OWNERS = 20


def islands_for(exchange: str, islands: object) -> object:
    """The islands that were asked for: ranks of one host, if nothing else was said."""
    check_choice("exchange", exchange, EXCHANGES)
    return "hosts" if exchange == HIERARCHICAL and islands is None else islands


def choose_exchange(exchange: str, has_islands: bool, num_replicas: int, delay: int, can_change: bool) -> str:
    """What ``exchange`` comes to for so many replicas, each of which may be an island of ranks; ``can_change`` says whether
    they come and go."""
    if exchange == OWNER and delay:
        raise ValueError(
            f"exchange='owner' does not go with delay={delay}: owners answer within the step; use exchange='all_gather', or "
            "leave delay out"
        )
    if exchange == OWNER or (exchange == AUTO and num_replicas >= _LEAST_OWNERS and not delay and not can_change):
        return OWNER
    return HIERARCHICAL if has_islands else ALL_GATHER
