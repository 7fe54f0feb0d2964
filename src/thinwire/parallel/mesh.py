"""How many replicas there are, and how many ranks share one, as one text: ``replicate=2,shard=4``."""

from typing import NamedTuple

REPLICATE, SHARD = "replicate", "shard"


class MeshShape(NamedTuple):
    """``replicate`` replicas, each on ``shard`` ranks."""

    replicate: int
    shard: int = 1

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.replicate * self.shard


def shape_of(mesh: str, islands: int, num_ranks: int) -> MeshShape:
    """That of a run: sharded replicas, islands of so many ranks, or a replica per rank."""
    if mesh:
        return parse_mesh(mesh)
    return MeshShape(num_ranks // islands, islands) if islands else MeshShape(num_ranks)


def parse_mesh(text: str) -> MeshShape:
    """``replicate=2,shard=4`` or a part of it; an axis that is not named has one rank."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, number = item.strip().partition("=")
        if name not in (REPLICATE, SHARD) or name in sizes or not number.isdecimal() or int(number) < 1:
            raise ValueError(
                f"mesh={text!r} must be like replicate=2,shard=4: replicas, and ranks that share one, each at least 1; "
                f"{item.strip()!r} is not of that form"
            )
        sizes[name] = int(number)
    return MeshShape(sizes.get(REPLICATE, 1), sizes.get(SHARD, 1))
