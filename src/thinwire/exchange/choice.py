"""Which exchange replicas use: what may be asked for, and what `auto` chooses."""

from thinwire.core.errors import check_choice

ALL_GATHER, OWNER, AUTO = "all_gather", "owner", "auto"
EXCHANGES = (ALL_GATHER, OWNER, AUTO)
# An owner exchange has fewer bytes from 4 replicas on, but a second round trip; from here on it has less than half of them.
_LEAST_OWNERS = 8


def choose_exchange(exchange: str, num_replicas: int, delay: int, can_change: bool) -> str:
    """What ``exchange`` comes to for so many replicas, of which ``can_change`` says whether they come and go."""
    check_choice("exchange", exchange, EXCHANGES)
    if exchange == OWNER and delay:
        raise ValueError(
            f"exchange='owner' does not go with delay={delay}: owners answer within the step; use exchange='all_gather', or "
            "leave delay out"
        )
    if exchange == AUTO:
        return OWNER if num_replicas >= _LEAST_OWNERS and not delay and not can_change else ALL_GATHER
    return exchange
