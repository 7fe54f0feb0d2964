"""A report as a table on a terminal. The only file of the planner that needs rich."""

import itertools

from rich.console import Console
from rich.table import Table

from thinwire.exchange.choice import ALL_GATHER, OWNER
from thinwire.planner.cost import Prediction
from thinwire.planner.links import format_bandwidth, format_bytes, format_seconds
from thinwire.planner.report import Report, recommend

_COLUMNS = ("exchange", "sent", "received", "network", "exposed", "step", "with the other", "efficiency", "slowdown")
# What terminals of fewer columns hold; rich would otherwise cut every number short.
_WIDTHS = {
    150: _COLUMNS,
    118: ("exchange", "received", "exposed", "step", "with the other", "efficiency"),
    0: ("exchange", "step", "efficiency"),
}
_NAMES = {ALL_GATHER: "all-gather", OWNER: "owner", None: ""}


def print_report(report: Report, console: Console) -> None:
    """Print every row of the report, the recommended one marked, and the recommendation."""
    advice = recommend(report)
    table = Table(
        title=f"{report.title}; links of {format_bandwidth(report.link.bits_per_second)}",
        title_justify="left",
    )
    table.add_column("method", no_wrap=True)
    columns = next(columns for width, columns in _WIDTHS.items() if console.width >= width)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for _, rows in itertools.groupby(report.predictions, key=_section):
        table.add_section()
        for row in rows:
            chosen = row == advice.prediction
            cells = _cells(row)
            label = ("> " if chosen else "  ") + row.label
            table.add_row(label, *(cells[name] for name in columns), style="bold" if chosen else None)
    console.print(table)
    console.print(advice.reason, highlight=False)


def _section(row: Prediction) -> tuple[str, int] | None:
    return None if row.topk is None else (row.method, row.topk)


def _cells(row: Prediction) -> dict[str, str]:
    other = row.other_step_seconds
    return {
        "exchange": _NAMES[row.exchange_name],
        "sent": format_bytes(row.sent_bytes),
        "received": format_bytes(row.received_bytes),
        "network": format_seconds(row.network_seconds),
        "exposed": format_seconds(row.exposed_seconds),
        "step": format_seconds(row.step_seconds),
        "with the other": "" if other is None else format_seconds(other),
        "efficiency": f"{100 * row.efficiency:.1f} %",
        "slowdown": f"{row.slowdown:.3g}x" if row.slowdown < 1000 else f"{row.slowdown:,.0f}x",
    }
