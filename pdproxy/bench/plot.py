"""The picture: what each proxy costs and adds, as a multiple of ours. matplotlib is an extra, imported only here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from pdproxy.bench.targets import OURS

MISSING = "a picture needs matplotlib: pip install 'pdproxy[bench]'"
PANELS = (
    ("cpu_ms_per_req", "CPU per request"),
    ("ttft_p99_ms", "TTFT p99"),
    ("transit_p99_us", "token transit p99"),
    ("rss_mb", "resident memory"),
)
INCHES = (0.9, 2.6)
"""Of one scenario across, of one panel down."""
MIN_WIDTH_INCHES = 6.0


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(report: dict[str, Any], path: Path) -> None:
    """A panel per figure, a group of bars per scenario, a bar per peer: ours over the peer's, less is better.

    The file's format goes by its name. Raises `ImportError` without matplotlib, `ValueError` for a strange format.
    """
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if row["target"] == OURS]
    width = max(MIN_WIDTH_INCHES, INCHES[0] * len(rows))
    figure = Figure(figsize=(width, INCHES[1] * len(PANELS)), layout="constrained")
    panels = figure.subplots(len(PANELS), 1, squeeze=False)
    for (axes,), (key, title) in zip(panels, PANELS, strict=True):
        _draw(axes, rows, key, title)
    machine = report["machine"]
    figure.suptitle(f"pdproxy over its peers, {machine['cores']} cores of {machine['cpu']}, {report['date'][:10]}")
    figure.savefig(path, dpi=100)


def _draw(axes: Any, rows: list[dict[str, Any]], key: str, title: str) -> None:
    peers = sorted({peer for row in rows for peer in row["ratios"]})
    width = 0.8 / max(1, len(peers))
    for index, peer in enumerate(peers):
        heights = [row["ratios"].get(peer, {}).get(key) or 0.0 for row in rows]
        axes.bar([at + index * width for at in range(len(rows))], heights, width, label=peer)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(rows))], [row["scenario"] for row in rows], rotation=30)
    axes.set(title=title, ylabel="ours / theirs")
    axes.grid(visible=True, axis="y", alpha=0.3)
    if peers:
        axes.legend()
