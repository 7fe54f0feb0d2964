"""``thinwire page``: the page of a run, built again from what lies in its folder."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from thinwire.training.resuming import saved_config
from thinwire.training.run_page import rebuild


@dataclass(frozen=True)
class PageCommand:
    """Build the page of a run again, from its log and its settings: after it was killed, or with a newer Thinwire."""

    run: tyro.conf.Positional[Path]
    """A run folder."""
    debug: bool = False
    """Show where an error came from."""


def command(arguments: list[str]) -> int:
    """Run it."""
    asked = tyro.cli(PageCommand, prog="thinwire page", args=arguments)
    print(rebuild(asked.run, saved_config(asked.run)))
    return 0
