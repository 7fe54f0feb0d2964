"""Can this machine hold a laboratory? By trying, since what a kernel and a container allow is written nowhere."""

import functools
import os
import shutil
import sys

from thinwire.lab.errors import LabError, LabUnavailableError
from thinwire.lab.holder import Holder, as_root_command
from thinwire.lab.inside import SYSTEM_FOLDERS

_TRIALS = (
    ("virtual cables (veth)", "ip", "link add name trial0 type veth peer name trial1"),
    ("bridges", "ip", "link add name trial2 type bridge"),
    ("token buckets (tbf)", "tc", "qdisc add dev trial0 root tbf rate 1mbit burst 8kb limit 64kb"),
)
_STAND_IN = "`thinwire train --link 100mbit,20ms` computes the times of a link instead"


def missing() -> str | None:
    """What this machine lacks, or None."""
    return _explore()[1]


def needs_user_namespace() -> bool:
    """Whether the commands must first become root of a user namespace; see `become_root`."""
    return _explore()[0]


def require() -> None:
    """Raise `LabUnavailableError` if something is missing."""
    if problem := missing():
        raise LabUnavailableError(f"there can be no laboratory here: {problem}; {_STAND_IN}")


def become_root(command: list[str]) -> None:
    """Become this command, as root of a user namespace; does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = as_root_command(command)
    os.execv(arguments[0], arguments)


@functools.cache
def _explore() -> tuple[bool, str | None]:
    """Whether a user namespace is needed, and what is missing even then."""
    if sys.platform != "linux":
        return False, "it needs Linux"
    for program in ("ip", "tc"):
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:{SYSTEM_FOLDERS}") is None:
            return False, f"`{program}` is not installed: it is part of iproute2"
    problem = _try(in_user_namespace=False)
    if problem is None:
        return False, None
    second_problem = _try(in_user_namespace=True)
    if second_problem is None:
        return True, None
    if os.geteuid() == 0:
        return False, f"{problem} (a container may need the capabilities SYS_ADMIN and NET_ADMIN)"
    return True, f"it needs root, or user namespaces, and these do not work: {second_problem}"


def _try(in_user_namespace: bool) -> str | None:
    """Build a little of everything; what failed, or None."""
    holder = Holder("the trial", in_user_namespace)
    try:
        holder.wait_until_ready()
        for what, program, line in _TRIALS:
            try:
                holder.batch(program, [line])
            except LabError as error:
                return f"the kernel has no {what} ({error})"
    except LabError as error:
        return str(error)
    finally:
        holder.close()
    return None
