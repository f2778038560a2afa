"""The picture shows GB/s over page size, one line per target. matplotlib is an extra of its own and imported only
here."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from scripts.dev.bench_transfer.plan import CONTIGUOUS, LAYERS, SCATTERED, SERIAL
from scripts.dev.bench_transfer.report import size

TARGETS = {"gb_s": ("ours", "o-"), "nixl_gb_s": ("bare NIXL", "s--"), "copy_gb_s": ("torch copy", "^:")}
INCHES = (6.0, 3.6)
"""The size of one panel, in inches."""


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws a panel per layout and mode, and a column of them per number of senders and kind of memory.

    The file's name decides its format. Raises `ImportError` without matplotlib, and `ValueError` for a strange format.
    """
    from matplotlib.figure import Figure

    columns = sorted({(row["memory"], row["senders"]) for row in report["rows"]})
    kinds = list(product((CONTIGUOUS, SCATTERED), (SERIAL, LAYERS)))
    figure = Figure(figsize=(INCHES[0] * max(1, len(columns)), INCHES[1] * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), max(1, len(columns)), squeeze=False)
    for (line, kind), (at, column) in product(enumerate(kinds), enumerate(columns)):
        rows = [row for row in report["rows"] if _panel(row) == (*kind, *column)]
        _draw(panels[line][at], rows, f"{', '.join(kind)}, senders: {column[1]}, {column[0]}")
    machine = report["machine"]
    figure.suptitle(f"KV transfer, {machine['cores']} cores of {machine['cpu']}, {report['date'][:10]}")
    figure.savefig(path, dpi=100)


def _panel(row: dict[str, Any]) -> tuple[str, str, str, int]:
    return row["layout"], row["mode"], row["memory"], row["senders"]


def _draw(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    pages = [row["page_bytes"] for row in rows]
    for key, (label, style) in TARGETS.items():
        axes.plot(pages, [row[key] for row in rows], style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(pages, [size(num_bytes) for num_bytes in pages])
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel="page", ylabel="GB/s")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
