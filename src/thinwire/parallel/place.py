"""Which replica this process is, read from the environment that torchrun or SLURM sets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# SLURM gives no port; each job takes its own, away from the system's and from the ephemeral ones.
_FIRST_SLURM_PORT, _NUM_SLURM_PORTS = 20_000, 10_000


@dataclass(frozen=True)
class Place:
    """One process among ``num_replicas``; ``local`` counts those of this machine alone. ``address`` is where they meet."""

    replica: int = 0
    num_replicas: int = 1
    local_replica: int = 0
    num_local_replicas: int = 1
    launcher: str = "none"
    address: str = ""


def find_place(environment: Mapping[str, str]) -> Place:
    """torchrun's variables first, then SLURM's for a step of several tasks; else this process is alone."""
    place = _read(environment)
    if not 0 <= place.replica < place.num_replicas or place.num_local_replicas < 1:
        raise ValueError(f"{place.launcher}'s variables make this replica {place.replica} of {place.num_replicas}")
    if place.num_replicas > 1 and (place.address.startswith(":") or place.address.endswith(":")):
        raise ValueError("MASTER_ADDR and MASTER_PORT must say where the replicas meet; torchrun sets them")
    return place


def _read(environment: Mapping[str, str]) -> Place:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Place(
            replica=_number(environment, "RANK"),
            num_replicas=_number(environment, "WORLD_SIZE"),
            local_replica=_number(environment, "LOCAL_RANK", 0),
            num_local_replicas=_number(environment, "LOCAL_WORLD_SIZE", 1),
            launcher="torchrun",
            address=f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}",
        )
    # In a batch script outside srun only the job's variables are set: then nobody else was started.
    if _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        host = first_host(environment.get("SLURM_STEP_NODELIST", ""))
        port = _FIRST_SLURM_PORT + _number(environment, "SLURM_JOB_ID", 0) % _NUM_SLURM_PORTS
        return Place(
            replica=_number(environment, "SLURM_PROCID"),
            num_replicas=_number(environment, "SLURM_STEP_NUM_TASKS"),
            local_replica=_number(environment, "SLURM_LOCALID"),
            num_local_replicas=_tasks_here(environment),
            launcher="slurm",
            address=f"{host}:{port}",
        )
    return Place()


def first_host(nodes: str) -> str:
    """The first host of a SLURM list such as ``gpu[03-07,12],login1``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} names no host")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Tasks on this node, from a list such as ``4(x2),3``."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE has {part!r}, which is not a count of tasks")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(_number(environment, "SLURM_NODEID", 0), len(counts) - 1)]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a whole number, it is {value!r}") from None
