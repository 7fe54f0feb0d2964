"""Networks as people write them: a number of hosts, a link for all or one for each, islands with an uplink."""

from collections.abc import Sequence

from thinwire.lab.layout import Island, Layout
from thinwire.planner.link_spec import UNSHAPED, LinkSpec, parse_link

DEFAULT_HOSTS, DEFAULT_LINK = 2, "100mbit,20ms"
_SEPARATOR = ";"


def parse_layout(hosts: int | None, link: str | None, links: str | None, islands: int | None, uplink: str | None) -> Layout:
    """The options ``--hosts``, ``--link``, ``--links``, ``--islands`` and ``--uplink``, None where one is left out.

    Islands take the hosts in order, in parts of equal size, the first ones larger if need be."""
    if (islands is None) != (uplink is None):
        raise ValueError(
            "--islands and --uplink belong together: give a number of islands and the link of each to the others"
        )
    if links is not None:
        if link is not None:
            raise ValueError("give --link for all hosts or --links for each, not both")
        each = parse_links(links, "--links")
        if hosts is not None and hosts != len(each):
            raise ValueError(f"--links has {len(each)} links, but there are {hosts} hosts")
    else:
        default = DEFAULT_LINK if islands is None else UNSHAPED
        num_hosts = DEFAULT_HOSTS if hosts is None else hosts
        each = [parse_link(default if link is None else link, "--link")] * num_hosts
    if islands is None or uplink is None:
        return Layout(tuple(each))
    if not 2 <= islands <= len(each):
        raise ValueError(f"--islands must be from 2 to the number of hosts, {len(each)}, got {islands}")
    uplinks = parse_links(uplink, "--uplink")
    if len(uplinks) not in (1, islands):
        raise ValueError(f"--uplink has {len(uplinks)} links for {islands} islands: give one for all, or one for each")
    return Layout(tuple(each), _divide(len(each), uplinks * (islands // len(uplinks))))


def parse_links(text: str, name: str) -> list[LinkSpec]:
    """Links with ``;`` between them."""
    return [parse_link(part.strip(), name) for part in text.split(_SEPARATOR)]


def _divide(num_hosts: int, uplinks: Sequence[LinkSpec]) -> tuple[Island, ...]:
    size, larger = divmod(num_hosts, len(uplinks))
    found, first = [], 0
    for number, uplink in enumerate(uplinks):
        last = first + size + (number < larger)
        found.append(Island(tuple(range(first, last)), uplink))
        first = last
    return tuple(found)
