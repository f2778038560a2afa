"""The module tells people what `cliffs` has found: a line per size and per fact, two tables for a document, and a
picture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from scripts.dev.bench_proxy.cliffs import AXES, Axis
from transfer.command_line.tables import Table

Row = dict[str, Any]
Report = dict[str, Any]

FLAT = 1.5
"""The rise up to which a figure is called flat."""
COLUMNS, PANEL_INCHES = 4, (3.2, 2.6)
DISTURBED = 0.1
"""The cores that others may keep busy before a figure is marked."""


def points(report: Report, axis: Axis) -> list[Row]:
    return [row for row in report["rows"] if row.get("axis") == axis.name]


def facts(report: Report) -> list[Row]:
    return [row for row in report["rows"] if "axis" not in row]


def rises(found: list[Row]) -> list[float]:
    """Returns each figure over the least up to its size: 1 as long as it falls or stays."""
    least = accumulate((row["cpu_us"] for row in found), min)
    return [row["cpu_us"] / low if low else 1.0 for row, low in zip(found, least, strict=True)]


def rise(found: list[Row]) -> float:
    """Returns the most by which a figure is above that of a smaller size."""
    return max(rises(found), default=1.0)


def make_table(report: Report) -> Table:
    """Returns a table with a line for each size, and one for each fact."""
    table = Table(
        *("what grows", "size", "CPU µs", "per", "ratio", "idle cores", "start s", "RSS MB", ""),
        title="pdproxy's CPU as one thing grows; ratio: over the smallest size; idle: without any load, not counted",
        caption="start: CPU until all instances get requests; * others were busy",
        names=1,
        words=(0, 3, 8),
    )
    for axis in AXES:
        for row in points(report, axis):
            table.add_row(axis.name, f"{row['size']:,}", *_cells(row))
    for row in facts(report):
        table.add_row(row["what"], "", f"{row['value']:.3g}", "", "", "", "", "", _verdict(row))
    return table


def _cells(row: Row) -> list[str]:
    mark = "*" if row["elsewhere_cores"] > DISTURBED else ""
    return [
        f"{row['cpu_us']:.1f}{mark}",
        row["unit"],
        "–" if row["ratio"] is None else f"{row['ratio']:.2f}",
        f"{row['idle_cores']:.3f}",
        f"{row['start_s']:.1f}",
        f"{row['rss_mb']:.0f}",
        f"{row['errors']} errors: {row['complaint'][:60]}" if row["errors"] else "",
    ]


def _verdict(row: Row) -> str:
    if row["most"] is None:
        return ""
    return f"at most {row['most']:g}: " + ("reached" if row["value"] <= row["most"] else "MISSED")


def is_wrong(report: Report) -> bool:
    """Tells whether a request failed, or was answered without its handoff. Then its figures say nothing."""
    return any(row.get("errors") or row.get("unproven") for row in report["rows"])


# ── for documents ───────────────────────────────────────────────────────────────────────────────────────────────────


def axes_lines(report: Report) -> Iterator[list[str]]:
    """Yields a head and a line for each axis that was measured."""
    yield ["what grows", "sizes", "CPU µs per", "", "rise", "idle cores at the largest"]
    for axis in AXES:
        if found := points(report, axis):
            marks = ["*" if row["elsewhere_cores"] > DISTURBED else "" for row in found]
            yield [
                f"`{axis.name}`: {axis.what}",
                " · ".join(f"{row['size']:,}" for row in found),
                axis.unit,
                " · ".join(f"{row['cpu_us']:.1f}{mark}" for row, mark in zip(found, marks, strict=True)),
                f"{rise(found):.2f}" + ("" if rise(found) <= FLAT else " **not flat**"),
                f"{found[-1]['idle_cores']:.3f}",
            ]


def fact_lines(report: Report) -> Iterator[list[str]]:
    """Yields a head and a line for each fact."""
    yield ["what", "found", "aim"]
    for row in facts(report):
        yield [row["what"], f"{row['value']:.3g}", _verdict(row).replace("MISSED", "**missed**")]


# ── the picture ─────────────────────────────────────────────────────────────────────────────────────────────────────


def plot(report: Report, path: Path) -> None:
    """Draws a panel for each axis: CPU over the least of any smaller size, so that whatever grows goes up, and what
    falls is level. All panels have the same height, so that flat ones look flat.

    The file's name decides its format. Raises `ImportError` without matplotlib, `ValueError` for a strange format.
    """
    from matplotlib.figure import Figure

    there = [(axis, found) for axis in AXES if (found := points(report, axis))]
    columns = min(COLUMNS, len(there))
    lines = -(-len(there) // columns)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, 0.6 + PANEL_INCHES[1] * lines), layout="constrained")
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel().tolist()
    top = 1.1 * max([2.0, *(rise(found) for _, found in there)])
    for panel, (axis, found) in zip(panels, there, strict=False):
        panel.axhspan(1, FLAT, color="#e5f3e8", zorder=0)
        panel.plot([max(row["size"], 1) for row in found], rises(found), "o-", zorder=2)
        panel.set_xscale("log")
        panel.set_ylim(0.9, top)
        panel.set_title(f"{axis.name}: CPU per {axis.unit}", fontsize=10)
        panel.set_xlabel(axis.what, fontsize=8)
        panel.grid(visible=True, alpha=0.35)
    for panel in panels[len(there) :]:
        panel.set_axis_off()
    machine = report["machine"]
    figure.suptitle(
        f"pdproxy's CPU over the least of any smaller size; green: within {FLAT:g} times  ·  {report['date'][:10]}, "
        f"{machine['cores']} cores of {machine['cpu']}"
    )
    figure.savefig(path, dpi=110)
