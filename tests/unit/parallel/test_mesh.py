"""Meshes as texts."""

import pytest

from thinwire.parallel.mesh import MeshShape, parse_mesh


def test_axes_in_any_order_and_one_alone() -> None:
    assert parse_mesh("replicate=2,shard=4") == MeshShape(2, 4) == parse_mesh(" shard=4, replicate=2 ")
    assert parse_mesh("replicate=3") == (3, 1)
    assert parse_mesh("shard=3").num_ranks == 3


@pytest.mark.parametrize(
    "text", ["", "2x4", "replicate", "replicate=0", "replicate=-1", "shard=two", "tp=2", "shard=2,shard=2"]
)
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be like replicate=2,shard=4"):
        parse_mesh(text)
