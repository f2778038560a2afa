"""The module draws the picture: what pdproxy costs and adds, over each peer's. matplotlib is an extra, imported only
here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.dev.bench_proxy.targets import OURS

PANELS = (
    ("cpu_ms_per_req", "CPU per request"),
    ("ttft_p50_ms", "TTFT p50"),
    ("ttft_p99_ms", "TTFT p99"),
    ("transit_p50_us", "token transit p50"),
    ("transit_p99_us", "token transit p99"),
    ("rss_mb", "memory"),
)
LINE_INCHES, MARGIN_INCHES, PANEL_INCHES, NAMES_INCHES = 0.34, 1.9, 2.1, 1.3
TICKS = (0.25, 0.5, 1, 2, 4)
REACH = (0.45, 2.2)
"""The limits, as ratios, of a panel in which nothing lies further out."""
EDGES = (0.2, 5.0)
"""The widest limits of a panel, as ratios. Whatever is further out is drawn on them."""
MARKERS = "osD^vP"
DODGE = 0.17
LESS, MORE = "#e5f3e8", "#fbeae6"


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws a panel per figure, a line per scenario, a point per peer at ours over the peer's: below 1 ours is less.
    What is far off either way lies on the edge.

    The file's name decides its format. Raises `ImportError` without matplotlib, `ValueError` for a strange format.
    """
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if row["target"] == OURS and row["ratios"]]
    peers = list(dict.fromkeys(peer for row in rows for peer in row["ratios"]))
    size = (NAMES_INCHES + PANEL_INCHES * len(PANELS), MARGIN_INCHES + LINE_INCHES * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True, squeeze=False)[0]
    reach = _reach(rows)
    for axes, (key, title) in zip(panels, PANELS, strict=True):
        _rule(axes, reach)
        _draw(axes, rows, peers, key, reach)
        axes.set_title(title, fontsize=10)
    panels[0].set_yticks(range(len(rows)), [row["scenario"] + "*" * row["is_noisy"] for row in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    machine = report["machine"]
    figure.suptitle(
        f"pdproxy's figure over each peer's: in the green pdproxy's is less  ·  {report['date'][:10]}, "
        f"{machine['cores']} cores of {machine['cpu']}" + "  ·  * noisy" * any(row["is_noisy"] for row in rows)
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False)
    figure.savefig(path, dpi=110)


def _reach(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Returns the limits of the axis; they are the same for all panels, so that they can be compared."""
    ratios = [one[key] for row in rows for one in row["ratios"].values() for key, _ in PANELS if one[key]]
    low, high = (
        min([REACH[0], *(ratio * 0.85 for ratio in ratios)]),
        max([REACH[1], *(ratio * 1.18 for ratio in ratios)]),
    )
    return max(low, EDGES[0]), min(high, EDGES[1])


def _rule(axes: Any, reach: tuple[float, float]) -> None:
    """Draws what a panel has before there is anything in it."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = reach
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.axvspan(low, 1, color=LESS, zorder=0)
    axes.axvspan(1, high, color=MORE, zorder=0)
    axes.axvline(1, color="black", linewidth=0.8, zorder=1)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, alpha=0.35, zorder=1)
    axes.set_axisbelow(True)


def _draw(axes: Any, rows: list[dict[str, Any]], peers: list[str], key: str, reach: tuple[float, float]) -> None:
    """Draws the points; peers' points lie beside each other, so that equal ones are seen."""
    for index, peer in enumerate(peers):
        beside = (index - (len(peers) - 1) / 2) * DODGE
        ratios = [(row["ratios"].get(peer, {}).get(key), line + beside) for line, row in enumerate(rows)]
        there = [(min(max(ratio, reach[0]), reach[1]), at) for ratio, at in ratios if ratio]
        axes.scatter(
            [ratio for ratio, _ in there],
            [at for _, at in there],
            marker=MARKERS[index % len(MARKERS)],
            s=28,
            edgecolors="white",
            linewidths=0.5,
            zorder=3,
            clip_on=False,
            label=peer,
        )
