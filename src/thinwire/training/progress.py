"""What a person sees while it runs: a live display in a terminal, plain lines anywhere else. Replica 0 alone shows it."""

import time
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from thinwire.planner.links import format_bytes

_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Status:
    """The state of a run after a step."""

    step: int
    num_steps: int
    loss: float
    validation_loss: float | None
    per_second: float
    unit: str
    sent_bytes: int
    received_bytes: int
    wait_share: float | None
    seconds_left: float


class Progress(Protocol):
    """A display."""

    def update(self, status: Status) -> None:
        """Show it."""
        ...

    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None:
        """The end."""
        ...


class Silent:
    """Nothing, for all replicas but the first."""

    def update(self, status: Status) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PlainLines:
    """A line every few seconds, or every so many steps."""

    def __init__(self, console: Console, print_every: int) -> None:
        self._console, self._print_every = console, print_every
        self._last_time, self._last_step = 0.0, 0

    def update(self, status: Status) -> None:
        """Print, if it is time to."""
        due_by_steps = self._print_every and status.step // self._print_every > self._last_step // self._print_every
        due_by_time = not self._print_every and time.monotonic() - self._last_time >= _SECONDS_BETWEEN_LINES
        if due_by_steps or due_by_time or status.step == status.num_steps:
            self.say(describe(status))
            self._last_time, self._last_step = time.monotonic(), status.step

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        """Nothing is left to do."""


class LiveDisplay:
    """A bar and a table that are redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def update(self, status: Status) -> None:
        """Redraw."""
        self._live.update(_panel(status))

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        """Take the display away."""
        self._live.stop()


def choose_progress(console: Console, is_first: bool, print_every: int) -> Progress:
    """The display that fits."""
    if not is_first:
        return Silent()
    return LiveDisplay(console) if console.is_terminal else PlainLines(console, print_every)


def describe(status: Status) -> str:
    """All of it in one line."""
    return f"step {status.step}/{status.num_steps}  " + "  ".join(f"{name} {value}" for name, value in _facts(status))


def _facts(status: Status) -> list[tuple[str, str]]:
    facts = [("loss", f"{status.loss:.4f}")]
    if status.validation_loss is not None:
        facts.append(("validation", f"{status.validation_loss:.4f}"))
    facts.append((f"{status.unit}/s", f"{status.per_second:,.0f}"))
    facts.append(("sent/step", format_bytes(status.sent_bytes)))
    facts.append(("received/step", format_bytes(status.received_bytes)))
    facts.append(("network wait", "unknown" if status.wait_share is None else f"{status.wait_share:.0%}"))
    facts.append(("left", format_clock(status.seconds_left)))
    return facts


def format_clock(seconds: float) -> str:
    """Hours, minutes and seconds, or days."""
    if seconds >= 172_800:
        return f"{seconds / 86_400:,.0f} days"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _panel(status: Status) -> Table:
    outer = Table.grid(padding=(0, 1))
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        f"step {status.step}/{status.num_steps}",
        ProgressBar(total=status.num_steps, completed=status.step, width=40),
        f"{status.step / status.num_steps:.0%}",
    )
    outer.add_row(bar)
    numbers = Table(box=None, padding=(0, 2), pad_edge=False)
    facts = _facts(status)
    for name, _ in facts:
        numbers.add_column(name, justify="right", no_wrap=True)
    numbers.add_row(*(value for _, value in facts))
    outer.add_row(numbers)
    return outer
