"""The module shows the figures in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from pdproxy.loadtest.latency import COLUMNS, Distribution, told_of
from pdproxy.loadtest.report import overview
from pdproxy.loadtest.report.phases import TITLES as PHASE_TITLES
from pdproxy.loadtest.report.sides import Shown, Side, shown_of
from pdproxy.loadtest.report.words import milliseconds, share
from pdproxy.loadtest.slo import Slo
from transfer.command_line.tables import Table

MOST_DETAILED = 2
"""The most runs that are shown in detail; more runs are compared in one table only."""


def show(sides: Sequence[Side], slo: Slo, console: Console) -> None:
    """Prints everything worth reading; what stands against it comes last."""
    shown = shown_of(sides, slo)
    if len(shown) <= MOST_DETAILED:
        for one in shown:
            latencies(one).print_to(console)
    runs(shown).print_to(console)
    for words in overview.verdicts(shown, slo):
        console.print(words, style="bold", highlight=False, markup=False, soft_wrap=True)
    for words in overview.notes(shown, sides):
        console.print(words, highlight=False, markup=False, soft_wrap=True)
    for words in overview.warnings(shown):
        console.print(words, style="bold red", highlight=False, markup=False, soft_wrap=True)


def runs(shown: Sequence[Shown]) -> Table:
    """Returns a table with a line for each run."""
    places = overview.columns(shown)
    table = Table(*(overview.HEADINGS[place] for place in places), caption=overview.CAPTION)
    for row in overview.rows(shown):
        table.add_row(*(row[place] for place in places))
    return table


def latencies(one: Shown) -> Table:
    """Returns a table with a line for each latency and each phase."""
    trusted = "" if one.summary.is_trusted else "; NOT TO BE QUOTED: the generator was late"
    table = Table("", "count", *COLUMNS.values(), "of the time", title=f"{one.label}: milliseconds{trusted}")
    for metric, found in one.summary.latencies.items():
        if found.count:
            table.add_row(*_cells(metric.upper(), found), "")
    phases = one.summary.phases or one.summary.outer_phases
    whole_s = sum((found.mean or 0.0) * found.count for found in phases.values())
    table.add_section()
    for name, found in phases.items():
        part = (found.mean or 0.0) * found.count / whole_s if whole_s else None
        table.add_row(*_cells(PHASE_TITLES.get(name, name), found), share(part))
    return table


def _cells(name: str, found: Distribution) -> list[str]:
    return [name, f"{found.count:,}", *(milliseconds(told_of(found, column)) for column in COLUMNS)]
