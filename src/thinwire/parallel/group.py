"""Joining the other replicas, and leaving them."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.core.errors import ExchangeError, first_line
from thinwire.exchange.collective import default_transport
from thinwire.exchange.transport import SoloTransport, Transport
from thinwire.parallel.place import Place


def join(place: Place, device: torch.device, backend: str, timeout_seconds: float) -> Transport:
    """Meet the other replicas and return the way to reach them."""
    if place.num_replicas == 1:
        return SoloTransport()
    method = "env://" if place.launcher == "torchrun" else f"tcp://{place.address}"
    if backend == "auto":
        # Replicas that share a GPU cannot use NCCL.
        has_own_gpu = device.type == "cuda" and torch.cuda.device_count() >= place.num_local_replicas
        backend = "nccl" if has_own_gpu else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=method,
            rank=place.replica,
            world_size=place.num_replicas,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except (RuntimeError, ValueError) as error:
        reason = first_line(error)
        raise ExchangeError(
            f"replica {place.replica} of {place.num_replicas} could not join the others at {place.address} within "
            f"{timeout_seconds:.0f} s: {reason}; is the port open, and does GLOO_SOCKET_IFNAME name the right interface?"
        ) from error
    return default_transport(None, timeout_seconds)


def join_alone(folder: str) -> None:
    """A process group of this process alone, unless there is a group; it meets itself in a file in ``folder``."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{folder}/alone", rank=0, world_size=1)


def backend_name() -> str:
    """What carries the replicas' messages."""
    return str(dist.get_backend()) if dist.is_initialized() else "none"


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        # gloo's threads may still be at the last message: without the pause the process can abort (pytorch issue 190489).
        time.sleep(0.2)
        dist.destroy_process_group()
