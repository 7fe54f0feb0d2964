"""Where the time of a run goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP_PHASES = ("data", "forward", "backward", "optimizer", "network")
PHASES = ("set-up", *STEP_PHASES, "evaluation", "checkpoints")


class Clock:
    """Seconds per phase. ``wait_for_device``: called at the end of each, where a GPU computes on its own."""

    def __init__(self, wait_for_device: Callable[[], None] | None = None) -> None:
        self._wait_for_device = wait_for_device
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time spent inside."""
        began = time.perf_counter()
        try:
            yield
            if self._wait_for_device is not None:
                self._wait_for_device()
        finally:
            self.seconds[name] += time.perf_counter() - began

    def end_set_up(self) -> None:
        """All that passed until now was set-up."""
        self.seconds["set-up"] = self.elapsed_seconds

    def move(self, seconds: float, source: str, target: str) -> None:
        """Time counted as one phase was really another's."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def step_seconds(self) -> float:
        """Spent in steps and between them, and not in set-up, evaluations and checkpoints."""
        return self.elapsed_seconds - sum(self.seconds[name] for name in PHASES if name not in STEP_PHASES)

    @property
    def training_seconds(self) -> float:
        """All but the set-up."""
        return self.elapsed_seconds - self.seconds["set-up"]

    @property
    def elapsed_seconds(self) -> float:
        """Since the clock was made."""
        return time.perf_counter() - self._began

    def table(self) -> dict[str, float]:
        """Seconds per phase, and what none of them claims."""
        known = sum(self.seconds.values())
        return {**self.seconds, "other": max(0.0, self.elapsed_seconds - known)}
