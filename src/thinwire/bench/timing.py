"""Times: contenders take turns, so that what else the machine does meets all of them."""

import time
from collections.abc import Sequence

import torch

from thinwire.bench.contenders import Contender

_IDLE_CYCLES = 10_000_000


class Stopwatch:
    """Marks on a device's time line, milliseconds between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        """Now, in the order of the device's work."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Between each mark and the next."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [_between(first, second) for first, second in pairs]


def _between(first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        return float(first.elapsed_time(second))
    return (float(second) - float(first)) * 1000  # type: ignore[arg-type]


def take_turns(
    contenders: Sequence[Contender], device: torch.device, num_rounds: int, num_warmups: int
) -> list[list[dict[str, float]]]:
    """The times of every part, per contender and round."""
    times: list[list[dict[str, float]]] = [[] for _ in contenders]
    for round_ in range(num_warmups + num_rounds):
        for contender, rows in zip(contenders, times, strict=True):
            contender.prepare()
            _keep_busy(device)
            watch = Stopwatch(device)
            watch.mark()
            with torch.no_grad():
                for part in contender.parts.values():
                    part()
                    watch.mark()
            found = watch.milliseconds()
            if round_ >= num_warmups:
                rows.append(dict(zip(contender.parts, found, strict=True)))
    return times


def _keep_busy(device: torch.device) -> None:
    """Let a GPU idle for some milliseconds, in which the host runs ahead: launching is then not part of anyone's time."""
    if device.type == "cuda":
        torch.cuda._sleep(_IDLE_CYCLES)


def peak_extra_bytes(contender: Contender, device: torch.device) -> int | None:
    """What is held at most during a step besides parameters, gradients and state; None where the device does not tell."""
    if device.type != "cuda":
        return None
    contender.prepare()
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.no_grad():
        for part in contender.parts.values():
            part()
    torch.cuda.synchronize(device)
    return contender.held_bytes + int(torch.cuda.max_memory_allocated(device) - held)


def copy_bandwidth(device: torch.device, num_bytes: int = 1 << 31) -> float:
    """Bytes per second of a large copy, reading and writing counted: the ceiling of a memory-bound step."""
    source = torch.zeros(num_bytes // 4 if device.type == "cuda" else num_bytes // 64, device=device)
    target = torch.empty_like(source)
    found = []
    for _ in range(8):
        watch = Stopwatch(device)
        watch.mark()
        target.copy_(source)
        watch.mark()
        found += watch.milliseconds()
    return 2 * source.numel() * 4 / (min(found[2:]) / 1000)
