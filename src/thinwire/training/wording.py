"""How a run speaks of itself."""

from thinwire.parallel.mesh import shape_of
from thinwire.training.config import LaunchConfig, OptimConfig


def count(number: int, noun: str) -> str:
    """``1 replica``, ``2 replicas``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def method_words(optim: OptimConfig) -> str:
    """The optimizer, and what of DeMo decides about the bytes: ``demo (muon rule, top 64 of 64 x 64)``."""
    if optim.optimizer != "demo":
        return optim.optimizer
    rest = f", {optim.rest_update} for the rest" if optim.rest_update else ""
    by_name = f", by name {optim.topk_of}" if optim.topk_of else ""
    return f"demo ({optim.update} rule{rest}, top {optim.topk} of {optim.chunk} x {optim.chunk}{by_name})"


def replica_words(launch: LaunchConfig, num_ranks: int) -> str:
    """How many there are, and of how many ranks."""
    shape = shape_of(launch.mesh, launch.islands, num_ranks)
    each = f" of {shape.shard} ranks each" if shape.shard > 1 or launch.islands else ""
    return count(shape.replicate, "island" if launch.islands else "replica") + each
