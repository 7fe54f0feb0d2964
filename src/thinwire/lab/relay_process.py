"""The relay in the hub, as the network sees it."""

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from thinwire.lab import relay
from thinwire.lab.errors import LabError
from thinwire.lab.holder import INTERPRETER, Holder, end
from thinwire.lab.layout import Layout, hardware_address
from thinwire.lab.shaping import bucket

_SCRIPT = Path(relay.__file__).resolve()
# For a port without a limit, whose device takes everything at once.
_UNLIMITED_QUEUE_BYTES = 16 << 20


class RelayProcess:
    """Holds frames for the delay of their links. It ends with `close`, or with the process that made it."""

    def __init__(self, hub: Holder, layout: Layout, seed: int) -> None:
        self._process = subprocess.Popen(
            hub.enter_command([*INTERPRETER, str(_SCRIPT)], dies_with_thread=False),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._ask({**describe(layout), "seed": seed})

    @property
    def pid(self) -> int:
        """Of the relay."""
        return self._process.pid

    def reshape(self, layout: Layout) -> None:
        """New links, from the next frame on."""
        self._ask(describe(layout))

    def counts(self) -> dict[str, int]:
        """Packets carried, lost as asked, and dropped since a queue was full."""
        return self._ask({})

    def processor_seconds(self) -> float:
        """What it has cost so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_alive(self) -> bool:
        """Whether it still carries frames."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it."""
        end(self._process)

    def _ask(self, question: dict[str, Any]) -> dict[str, int]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if line:
                answer: dict[str, int] = json.loads(line)
                return answer
        said = process.stderr.read().strip().splitlines()
        raise LabError(f"the relay in the hub is gone: {said[-1] if said else 'it said nothing'}")


def describe(layout: Layout) -> dict[str, Any]:
    """Ports and links as the relay reads them."""
    ports, links = [], []
    for port in layout.core_ports():
        link = port.link
        limit = _UNLIMITED_QUEUE_BYTES
        if link.down_bits is not None:
            limit = bucket(link.down_bits, link.round_trip_seconds).limit_bytes
        addresses = [hardware_address(host) for host in port.hosts]
        ports.append({"device": port.device, "addresses": addresses, "queue_bytes": limit})
        links.append((link.round_trip_seconds / 4, link.jitter_seconds, link.loss))
    return {"ports": ports, "links": links}
