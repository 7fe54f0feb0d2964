"""Starting replicas on this machine, with torch's elastic launcher, and saying in one line what became of them."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from thinwire.core.errors import ThinwireError

# Tells a replica that this launcher, not a person, reads its errors.
LAUNCHED = "THINWIRE_LAUNCHED"
# The exit code of a replica whose error may pass (EX_TEMPFAIL).
MAY_PASS = 75
# Until a replica listens to Ctrl-C itself, it may end without the traceback of an import.
_START = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); from thinwire.cli import main; main()"
_START_ONE = "from thinwire.parallel.launch import start_one; start_one()"
# How long a replica may be silent before it counts as gone, and how long a meeting waits for one that is not.
_HEARTBEAT_SECONDS = 3
_STRAGGLER_SECONDS = 30
_GRACE_SECONDS, _PAUSE_SECONDS = 60.0, 0.2
# After Ctrl-C: a large checkpoint over a slow disk takes its time.
_SHUTDOWN_SECONDS = 600


class ReplicaError(ThinwireError):
    """A replica ended with an error; the message is that error. ``may_pass``: it died without a word, or
    of something like a full disk, and can be started again."""

    def __init__(self, message: str, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


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
        raise _describe(*error.get_first_failure()) from None
    except SignalException as error:
        raise InterruptedRunError(int(error.sigval)) from None
    finally:
        logging.disable(logging.NOTSET)


def launch_elastic(arguments: Sequence[str], num_replicas: int, port: int, min_replicas: int, most_restarts: int) -> None:
    """Run ``thinwire ARGUMENTS`` as replicas that come and go: a lighthouse here, and for each replica a launcher of its own
    that starts it again when it dies. Returns when all have ended; raises unless one of them came to the end."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind=f"127.0.0.1:{_usable_port(port)}",
        min_replicas=min_replicas,
        join_timeout_ms=_STRAGGLER_SECONDS * 1000,
        heartbeat_timeout_ms=_HEARTBEAT_SECONDS * 1000,
    )
    address = f"127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
    command = [sys.executable, "-c", _START_ONE, str(most_restarts)]
    replicas = [
        subprocess.Popen([*command, *arguments, f"--lighthouse={address}", f"--slot={slot}"]) for slot in range(num_replicas)
    ]
    asked = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = number
        for replica in replicas:
            replica.send_signal(number)

    before = {kind: signal.signal(kind, pass_on) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        codes = _wait_for_all(replicas)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        for replica in replicas:
            replica.kill()
        lighthouse.shutdown()
    if asked:
        raise InterruptedRunError(asked)
    if all(codes):
        raise ReplicaError("no replica came to the end; the lines above say why")
    if any(codes) and not most_restarts:
        raise ReplicaError("a replica was lost, and the others stopped with a checkpoint")


def _wait_for_all(replicas: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Their exit codes. When one has come to the end, so has the run: the others have a little time to end, too."""
    ended_at: float | None = None
    while any(replica.poll() is None for replica in replicas):
        time.sleep(_PAUSE_SECONDS)
        if ended_at is None and any(replica.poll() == 0 for replica in replicas):
            ended_at = time.monotonic()
        if ended_at is not None and time.monotonic() - ended_at > _GRACE_SECONDS:
            for replica in replicas:
                replica.terminate()
    return [replica.wait() for replica in replicas]


def start_one() -> None:
    """What the launcher of a single replica does; its first argument is how often it may start it anew."""
    most_restarts, *arguments = sys.argv[1:]
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    for num_restarts in range(int(most_restarts) + 1):
        try:
            launch(arguments, 1, 0)
            return
        except InterruptedRunError as error:
            sys.exit(128 + error.signal_number)
        except ThinwireError as error:
            print(f"thinwire: {error}", file=sys.stderr)
            # What a replica could say itself (a wrong setting) would only happen again.
            if not getattr(error, "may_pass", False) or num_restarts == int(most_restarts):
                sys.exit(1)
            time.sleep(1.0)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


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


def _describe(rank: int, failure: ProcessFailure) -> ReplicaError:
    data = failure.error_file_data
    if data and isinstance(data.get("message"), dict):
        return ReplicaError(str(data["message"]["message"]), may_pass=failure.exitcode == MAY_PASS)
    if failure.exitcode < 0:
        return ReplicaError(f"replica {rank} was killed by {signal.Signals(-failure.exitcode).name}", may_pass=True)
    return ReplicaError(f"replica {rank} ended with exit code {failure.exitcode}", may_pass=True)
