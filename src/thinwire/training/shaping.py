"""A run over a modelled link: how its replicas join, and what people are told about it."""

import hashlib

import torch

from thinwire.core.errors import AgreementError
from thinwire.exchange.transport import Transport, all_gather
from thinwire.parallel.group import join
from thinwire.parallel.place import Place
from thinwire.parallel.shaped import shape
from thinwire.planner.link_spec import parse_link
from thinwire.planner.links import format_bandwidth, format_seconds
from thinwire.training.config import LaunchConfig
from thinwire.training.errors import TrainingError


def join_over(launch: LaunchConfig, place: Place, device: torch.device) -> Transport:
    """Meet the other replicas and return the way to reach them, over the link that ``launch`` names, if it does."""
    # NCCL does not tell the host when an exchange ends, so that it could not be held back.
    backend = "gloo" if launch.link and launch.backend == "auto" else launch.backend
    if backend == "nccl" and place.num_replicas > 1 and device.type != "cuda":
        raise TrainingError(f"backend=nccl: NCCL is for GPUs, and this is a {device.type}; use --backend gloo or auto")
    transport = join(place, device, backend, launch.timeout_seconds)
    agree_on_link(launch.link, transport)
    return shape(transport, parse_link(launch.link), launch.timeout_seconds) if launch.link else transport


def agree_on_link(link: str, transport: Transport) -> None:
    """All replicas must have the same link, or none; to be asked while none is held back, or some would wait for ever."""
    digest = hashlib.sha256(link.encode()).digest()
    rows = all_gather(transport, torch.frombuffer(bytearray(digest), dtype=torch.uint8), "choice of a link")
    for replica, row in enumerate(rows.cpu()):
        if not torch.equal(row, rows[0].cpu()):
            raise AgreementError(f"replicas 0 and {replica} were started with different values of --link")


def words_for(launch: LaunchConfig) -> str:
    """What must be said with every figure of such a run."""
    if not launch.link:
        return ""
    spec = parse_link(launch.link)
    rates = dict.fromkeys("no limit" if rate is None else format_bandwidth(rate) for rate in (spec.up_bits, spec.down_bits))
    return f", held back as over {'/'.join(rates)}, {format_seconds(spec.round_trip_seconds)}: a model, not a measurement"
