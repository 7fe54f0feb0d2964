"""Ctrl-C and termination: the first request ends the run after a step, with a checkpoint; a second one ends it at once."""

import os
import signal
import time
from types import FrameType
from typing import Any

# Terminals and launchers may deliver one key press twice.
_SAME_REQUEST_SECONDS = 1.0


class StopRequest:
    """Listens for SIGINT and SIGTERM, and for the end of the launcher, as long as the context lasts.

    ``answers``: whether this process tells the person who asked that it was heard.
    """

    def __init__(self, parent: int | None, answers: bool) -> None:
        self._parent, self._answers = parent, answers
        self._asked_at: float | None = None
        self.signal_number = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for kind in (signal.SIGINT, signal.SIGTERM):
            self._before[kind] = signal.signal(kind, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is not None and time.monotonic() - self._asked_at > _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt
        if self._asked_at is None:
            self._asked_at, self.signal_number = time.monotonic(), number
            if self._answers and number == signal.SIGINT:
                os.write(2, b"\nstopping after this step, with a checkpoint; press again to end at once\n")

    def ask(self) -> None:
        """Ask for a stop from within."""
        self._asked_at = time.monotonic()

    @property
    def is_asked(self) -> bool:
        """Whether this replica was asked to stop. A launcher that was killed cannot ask."""
        return self._asked_at is not None or (self._parent is not None and os.getppid() != self._parent)
