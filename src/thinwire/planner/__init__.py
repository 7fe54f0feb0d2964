"""How long a training step will take on a given link, before any machine is rented.

Arithmetic over shapes and rates: nothing here talks to another process. `table` needs rich and `figure` needs matplotlib, so
neither is imported from here.
"""

from thinwire.planner.cost import DEVICES, DeviceCosts, Prediction
from thinwire.planner.links import Link, format_bandwidth, format_bytes, format_seconds, parse_bandwidth, parse_seconds
from thinwire.planner.report import Recommendation, Report, make_report, recommend, tensors_from_count

__all__ = [
    "DEVICES",
    "DeviceCosts",
    "Link",
    "Prediction",
    "Recommendation",
    "Report",
    "format_bandwidth",
    "format_bytes",
    "format_seconds",
    "make_report",
    "parse_bandwidth",
    "parse_seconds",
    "recommend",
    "tensors_from_count",
]
