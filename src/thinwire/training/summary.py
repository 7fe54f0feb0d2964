"""Tables of a run's figures, for the terminal and for its page alike."""

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.parallel.mesh import shape_of
from thinwire.planner.links import format_bytes
from thinwire.training.config import LaunchConfig

BYTE_HEADS = ("", "sent", "received", "whole run", "times as much")


def dense_step_bytes(launch: LaunchConfig, num_ranks: int, num_parameters: int) -> float:
    """What a rank sends in a step, and receives, if the replicas reduce whole float32 gradients in a ring."""
    num_replicas, num_shards = shape_of(launch.mesh, launch.islands, num_ranks)
    return 4 * 2 * (num_replicas - 1) / num_replicas * num_parameters / num_shards


def harmless(text: str) -> str:
    """Without control characters, which a model that has not learned much writes, and a terminal would obey."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def byte_title(summary: Mapping[str, Any]) -> str:
    """What the table of bytes shows."""
    who = "replica" if summary["ranks_per_replica"] == 1 else "rank"
    return f"bytes per step and {who} (all-reduce: a ring; whole run: both ways)"


def byte_rows(summary: Mapping[str, Any]) -> Sequence[tuple[str, ...]]:
    """What the run sent and received, beside all-reduces of whole gradients."""
    own = summary["sent_bytes_per_step"] + summary["received_bytes_per_step"]
    rows = [(f"this run ({summary['optimizer']})", summary["sent_bytes_per_step"], summary["received_bytes_per_step"])]
    for kind in ("float32", "bfloat16"):
        dense = summary[f"dense_{kind}_bytes_per_step"]
        rows.append((f"{kind} all-reduce", dense, dense))
    found = []
    for name, sent, received in rows:
        times = f"{(sent + received) / own:.1f}" if own else "-"
        found.append(
            (name, format_bytes(sent), format_bytes(received), format_bytes((sent + received) * summary["steps"]), times)
        )
    return found


def time_rows(totals: Mapping[str, float]) -> list[tuple[str, float]]:
    """Where the time went, by what was done in it. What an exchange took while something else ran is not in it."""
    encoded = totals.get("encode", 0.0) - totals.get("early", 0.0)
    applied = totals.get("apply", 0.0)
    rows = [(name, totals.get(name, 0.0)) for name in ("set-up", "data", "forward", "backward")]
    rows += [("encode", encoded), ("exchange, waited for", totals.get("network", 0.0)), ("decode and update", applied)]
    rows += [("optimizer, all else", totals.get("optimizer", 0.0) - encoded - applied)]
    rows += [(name, totals.get(name, 0.0)) for name in ("evaluation", "checkpoints", "other")]
    return [(name, seconds) for name, seconds in rows if seconds > 0]
