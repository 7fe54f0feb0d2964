"""Starting replicas on this machine, with torch's elastic launcher, and saying in one line what became of them."""

import json
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from thinwire.core.errors import ThinwireError

# Tells a replica that this launcher, not a person, reads its errors.
LAUNCHED = "THINWIRE_LAUNCHED"
# Until a replica listens to Ctrl-C itself, it may end without the traceback of an import.
_START = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); from thinwire.cli import main; main()"
# After Ctrl-C: a large checkpoint over a slow disk takes its time.
_SHUTDOWN_SECONDS = 600


class ReplicaError(ThinwireError):
    """A replica ended with an error; the message is that error."""


class InterruptedRunError(ThinwireError):
    """A signal ended the run, after the replicas had come to a clean stop. ``signal_number`` says which."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"ended by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


def launch(arguments: Sequence[str], num_replicas: int, port: int) -> None:
    """Run ``thinwire ARGUMENTS`` as ``num_replicas`` processes and wait for all of them."""
    port = _usable_port(port)
    os.environ[LAUNCHED] = "1"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_SECONDS))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_replicas,
        run_id=uuid.uuid4().hex,
        # Static, since the other kind keeps pickles in a store that listens on every interface.
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0},
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    logging.disable(logging.CRITICAL)  # what the launcher has to say is said below, in one line
    try:
        elastic_launch(config, sys.executable)("-c", _START, *arguments)
    except ChildFailedError as error:
        raise ReplicaError(_describe(*error.get_first_failure())) from None
    except SignalException as error:
        raise InterruptedRunError(int(error.sigval)) from None
    finally:
        logging.disable(logging.NOTSET)


def record_error(message: str, error_file: str) -> None:
    """In a replica: leave the error where the launcher looks for it, with the time, so that it finds the first one."""
    stamp = {"timestamp": str(int(time.time()))}
    Path(error_file).write_text(json.dumps({"message": {"message": message, "extraInfo": stamp}}))


def _usable_port(port: int) -> int:
    """This port if nobody has it, or a free one for 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ThinwireError(f"port={port} cannot be used: {error}; leave it out to take a free one") from error
        return int(probe.getsockname()[1])


def _describe(rank: int, failure: ProcessFailure) -> str:
    data = failure.error_file_data
    if data and isinstance(data.get("message"), dict):
        return str(data["message"]["message"])
    if failure.exitcode < 0:
        return f"replica {rank} was killed by {signal.Signals(-failure.exitcode).name}"
    return f"replica {rank} ended with exit code {failure.exitcode}"
