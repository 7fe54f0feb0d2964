"""One replica in the lab: a training run that takes steps when it is told to, and says what each of them took.

The controller (`compare.py`) writes one JSON object per line to standard input and reads one per line from standard output:

    {"steps": 3}     ->  {"steps": [...], one row per step, see `StepRow`}
    {"evaluate": 1}  ->  {"loss": 1.23}

Started in a host's namespace by ``python -m thinwire.lab.worker FOLDER CONFIG``.
"""

import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from rich.console import Console

from thinwire.core.errors import first_line
from thinwire.exchange.transport import Transport, all_gather
from thinwire.parallel.group import join, leave
from thinwire.parallel.place import find_place
from thinwire.training.config import TrainConfig
from thinwire.training.config_file import override, read_file
from thinwire.training.job import Job, choose_device, seed_everything
from thinwire.training.loop import Run
from thinwire.training.models import num_parameters

INTERFACE = "veth0"
_NETWORK_TABLE = Path("/proc/self/net/dev")


@dataclass(frozen=True)
class StepRow:
    """What one step took on one replica. Seconds of the parts are disjoint, but for ``hidden``, which is a part of backward;
    ``other`` is what nothing claims. Bytes and packets are those of the host's interface beside those of the meter."""

    seconds: float
    data: float
    forward: float
    backward: float
    encode: float
    exposed: float
    apply: float
    other: float
    hidden: float
    meter_sent: int
    meter_received: int
    sent: int
    sent_packets: int
    received: int
    received_packets: int
    num_exchanges: int
    loss: float


class Counters(NamedTuple):
    """Bytes and packets that have passed an interface."""

    received: int = 0
    received_packets: int = 0
    sent: int = 0
    sent_packets: int = 0


def read_interface(name: str = INTERFACE, table: Path = _NETWORK_TABLE) -> Counters:
    """Since the interface was made; zeros if it is not there."""
    for line in table.read_text().splitlines():
        label, _, numbers = line.partition(":")
        if label.strip() == name:
            fields = [int(number) for number in numbers.split()]
            return Counters(fields[0], fields[1], fields[8], fields[9])
    return Counters()


class Worker:
    """A run, step by step."""

    def __init__(self, run: Run, transport: Transport) -> None:
        self._run, self._transport = run, transport

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what a line says."""
        if "steps" in order:
            self._meet()
            return {"steps": [asdict(self._step()) for _ in range(order["steps"])]}
        self._run.score()
        return {"loss": self._run.state.loss}

    def _meet(self) -> None:
        """All replicas begin at the same time, on connections that are not asleep."""
        all_gather(self._transport, torch.zeros(1, dtype=torch.uint8), "begin of the steps")

    def _step(self) -> StepRow:
        run = self._run
        clock, count, wire = dict(run.clock.seconds), replace(run.method.traffic.total), read_interface()
        began = time.perf_counter()
        loss = float(run.take_step())
        seconds = time.perf_counter() - began
        run.count_step(run.state.step + 1)
        spent = {name: now - clock[name] for name, now in run.clock.seconds.items()}
        total, now_wire = run.method.traffic.total, read_interface()
        encode, early = total.encode_seconds - count.encode_seconds, total.early_seconds - count.early_seconds
        exposed, apply = total.wait_seconds - count.wait_seconds, total.apply_seconds - count.apply_seconds
        backward = spent["backward"] - early
        return StepRow(
            seconds=seconds,
            data=spent["data"],
            forward=spent["forward"],
            backward=backward,
            encode=encode,
            exposed=exposed,
            apply=apply,
            other=seconds - (spent["data"] + spent["forward"] + backward + encode + exposed + apply),
            hidden=max(0.0, total.exchange_seconds - count.exchange_seconds - exposed),
            meter_sent=total.sent_bytes - count.sent_bytes,
            meter_received=total.received_bytes - count.received_bytes,
            sent=now_wire.sent - wire.sent,
            sent_packets=now_wire.sent_packets - wire.sent_packets,
            received=now_wire.received - wire.received,
            received_packets=now_wire.received_packets - wire.received_packets,
            num_exchanges=total.num_exchanges - count.num_exchanges,
            loss=loss,
        )


def serve(folder: Path, config: TrainConfig, orders: TextIO, answers: TextIO) -> None:
    """Join the others, say that it is ready, and obey until standard input ends."""
    place = find_place(os.environ)
    job = Job(config, place, folder)
    torch.set_num_threads(config.launch.threads or 1)
    device = choose_device(job)
    seed_everything(config.run.seed)
    transport = join(place, device, "gloo", config.launch.timeout_seconds)
    with ExitStack() as stack, open(os.devnull, "w") as nowhere:
        run = Run(job, device, transport, None, Console(file=nowhere), stack)
        worker = Worker(run, transport)
        _say(answers, {"parameters": num_parameters(run.method.model)})
        for line in orders:
            _say(answers, worker.obey(json.loads(line)))
    leave()


def _say(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def main() -> None:
    """The program: its arguments are the run folder and the file with the configuration."""
    # What libraries print must not come between the answers.
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    folder, config_file = map(Path, sys.argv[1:])
    try:
        serve(folder, override(TrainConfig(), read_file(config_file), str(config_file)), sys.stdin, answers)
        code = 0
    except Exception as error:  # the controller reads it
        _say(answers, {"error": first_line(error)})
        code = 1
    answers.flush()
    os._exit(code)  # a gloo process may abort while the interpreter takes its threads down (pytorch issue 190489)


if __name__ == "__main__":
    main()
