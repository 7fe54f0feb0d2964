"""Loaded into every replica of `chaos.py`: a thread that cuts the process's connections to other replicas when told to."""

import os
import socket
import threading
import time
from pathlib import Path


def _cut(kind: str) -> None:
    """Shut down all connections to peers, in both directions or in one."""
    how = socket.SHUT_WR if kind == "half-close" else socket.SHUT_RDWR
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as found:
                if found.family == socket.AF_INET and found.type == socket.SOCK_STREAM:
                    found.getpeername()
                    found.shutdown(how)
        except OSError:
            continue


def _obey(orders: Path) -> None:
    order = orders / str(os.getpid())
    while True:
        time.sleep(0.1)
        if order.exists():
            kind = order.read_text()
            order.unlink()
            _cut(kind)


if "CHAOS_ORDERS" in os.environ:
    threading.Thread(target=_obey, args=(Path(os.environ["CHAOS_ORDERS"]),), daemon=True).start()
