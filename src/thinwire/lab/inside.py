"""What runs inside a namespace of the laboratory: a script of its own, run by path, with the standard library alone.

    inside.py hold                               make a network namespace, keep it, and run commands in it
    inside.py enter PID OWNER -- COMMAND...      become COMMAND in the network namespace of process PID, and end with the
                                                 thread of OWNER that started it (0: whatever becomes of that)
    inside.py as-root -- COMMAND...              become COMMAND as root of a user namespace of its own

Namespaces have no names: one lasts as long as its ``hold`` process, which ends when its standard input closes, that is when
its owner does, however that came about. Nothing here may import thinwire, which would import torch.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
# What a holder is called in /proc while others may enter.
_HOLDING, _ENDING = "thinwire-holds", "thinwire-ends"
# Where iproute2 may be besides PATH, which for users other than root often lacks it.
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
_COMMAND_SECONDS = 30.0
_MOST_SWEEPS = 100
# One is not enough: a process may start another after all were listed, and be gone before its namespace is looked at.
_EMPTY_SWEEPS = 3


def hold() -> int:
    """Make a namespace; then a command per line of standard input, a reply per line of standard output."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)
    outside = os.stat("/proc/self/ns/net").st_ino
    _call("unshare", _CLONE_NEWNET)
    inside = os.stat("/proc/self/ns/net").st_ino
    _call("prctl", _PR_SET_NAME, _HOLDING.encode())
    _reply({"ready": os.getpid()})
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            _reply(_write(asked["write"]) if "write" in asked else _run(asked["argv"], asked.get("input", "")))
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    _call("prctl", _PR_SET_NAME, _ENDING.encode())
    if inside != outside:
        sweep(inside)
    return 0


def _run(argv: list[str], text: str) -> dict[str, object]:
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_FOLDERS}", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, env=environment, timeout=_COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"code": 127, "out": "", "err": str(error)}
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


def _write(values: dict[str, str]) -> dict[str, object]:
    """Settings of this namespace under /proc/sys; those that could not be written are named."""
    refused = []
    for path, value in values.items():
        try:
            with open(path, "w") as file:
                file.write(value)
        except OSError:
            refused.append(path)
    return {"refused": refused}


def _reply(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def sweep(namespace: int) -> None:
    """kill -9 for every other process of this network namespace, also for those that its processes have started."""
    num_empty = 0
    for _ in range(_MOST_SWEEPS):
        found = [pid for pid in _processes() if pid != os.getpid() and _namespace_of(pid) == namespace]
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        num_empty = 0 if found else num_empty + 1
        if num_empty == _EMPTY_SWEEPS:
            return
        time.sleep(0.01)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _namespace_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


def enter(pid: int) -> None:
    """Move this process into the network namespace of a holder that is not about to end."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", namespace, _CLONE_NEWNET)
    finally:
        os.close(namespace)
    # Looked at only now: whoever was in there before the holder began to end is found by its `sweep`.
    with open(f"/proc/{pid}/comm") as file:
        name = file.read().strip()
    if name != _HOLDING:
        os._exit(137)


def die_with(owner: int) -> None:
    """Have the kernel end this process when the thread that started it ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:  # it was quicker
        os._exit(137)


def as_root() -> None:
    """Move this process into a user namespace of its own, as root there."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _call(name: str, *arguments: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _become(command: list[str]) -> int:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
    return 127


def main(arguments: list[str]) -> int:
    """See above."""
    mode = arguments[0] if arguments else ""
    try:
        if mode == "hold":
            return hold()
        if mode == "enter" and arguments[3:4] == ["--"]:
            if int(arguments[2]):
                die_with(int(arguments[2]))
            enter(int(arguments[1]))
            return _become(arguments[4:])
        if mode == "as-root" and arguments[1:2] == ["--"]:
            as_root()
            return _become(arguments[2:])
    except OSError as error:
        print(f"{mode}: {error}", file=sys.stderr)
        return 126
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
