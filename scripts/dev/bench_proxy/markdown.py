"""The module writes what was found into documents where they have a place for it, so that nobody copies figures by
hand.

A place is between two comments, ``<!-- bench_proxy: table -->`` and ``<!-- /bench_proxy -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scripts.dev.bench_proxy.cliff_words import axes_lines, fact_lines
from scripts.dev.bench_proxy.targets import DIRECT, OURS
from scripts.dev.bench_proxy.words import HEADINGS, cells, find, notes, num_rounds, number, way

_PLACE = re.compile(r"(<!-- bench_proxy: (?P<what>[\w-]+) -->\n).*?(<!-- /bench_proxy -->)", re.DOTALL)

Report = dict[str, Any]
Writer = Callable[[Report], Iterator[str]]

SUMMARY = (
    ("CPU ms per short request", "short-32", "cpu_ms_per_req", 3),
    ("CPU µs per token, 32 streams, no delay", "stream-32", "cpu_us_per_token", 1),
    ("CPU µs per token, 512 streams, 20 ms", "staggered-512", "cpu_us_per_token", 1),
    ("CPU ms per 32 KiB prompt", "prompt-32k-4", "cpu_ms_per_req", 3),
    ("CPU ms per 512 KiB prompt", "prompt-512k-4", "cpu_ms_per_req", 2),
    ("added TTFT p99 ms, 512 streams", "staggered-512", "added_ttft_p99_ms", 2),
    ("added token transit p99 µs, 512 streams", "staggered-512", "added_transit_p99_us", 0),
    ("RSS MB, 1,000 streams", "held-1000", "rss_mb", 0),
)
"""The columns of the summary. Each has a heading, a scenario, a member of its row, and a number of digits."""

CARRIED = (
    ("short-32", "cpu_ms_per_req", 1e3, "short requests"),
    ("stream-32", "cpu_us_per_token", 1.0, "tokens as fast as they come"),
    ("staggered-512", "cpu_us_per_token", 1.0, "tokens of streams that get one every 20 ms, 50 a second each"),
    ("prompt-32k-4", "cpu_ms_per_req", 1e3, "prompts of 32 KiB"),
    ("prompt-512k-4", "cpu_ms_per_req", 1e3, "prompts of 512 KiB"),
)
"""The lines about each unit of work. Each line has a scenario, a member of its row, the number of µs in one of its
unit, and what it is about.
"""


def fill(text: str, report: Report) -> str:
    """Returns the document with each of its places filled anew that this kind of report is for. Raises `ValueError`
    where it has none, or one for something that no report tells."""
    writers = _CLIFFS if "goals" not in report else _WRITERS
    others = _WRITERS if writers is _CLIFFS else _CLIFFS

    def fill_in(place: re.Match[str]) -> str:
        return place[0] if place["what"] in others else place[1] + _write(place["what"], report, writers) + place[3]

    filled, count = _PLACE.subn(fill_in, text)
    if not count:
        raise ValueError(
            f"there is no place for figures: <!-- bench_proxy: {'|'.join(writers)} --> … <!-- /bench_proxy -->"
        )
    return filled


def _write(what: str, report: Report, writers: Mapping[str, Writer]) -> str:
    if what not in writers:
        raise ValueError(f"nothing is called {what!r} that could be written there; there are {', '.join(writers)}")
    return "".join(f"{line}\n" for line in writers[what](report))


def _run(report: Report) -> Iterator[str]:
    machine = report["machine"]
    days = sorted({row["date"][:10] for row in report["rows"]})
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    yield (
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {machine['cores']} cores of {machine['cpu']}, Linux "
        f"{machine['kernel']}, Python {machine['python']}, pdproxy {way(machine)}; medians of {num_rounds(report)} "
        f"rounds; {packages}."
    )


def _summary(report: Report) -> Iterator[str]:
    targets = list(dict.fromkeys(row["target"] for row in report["rows"] if row["target"] != DIRECT))
    yield from _head(["proxy", *(heading for heading, *_ in SUMMARY)])
    for target in targets:
        yield _line([target, *(_summary_cell(report, target, *column[1:]) for column in SUMMARY)])


def _summary_cell(report: Report, target: str, scenario: str, member: str, digits: int) -> str:
    """Returns one cell; in brackets it has ours over theirs, where peers are compared by it."""
    row, ours = find(report, scenario, target), find(report, scenario, OURS)
    if row is None or row[member] is None:
        return "–"
    value = number(row[member], digits) + ("*" if row["is_noisy"] else "")
    ratio = None if ours is None else ours["ratios"].get(target, {}).get(member)
    return value if ratio is None else f"{value} ({ratio:.2f})"


def _table(report: Report) -> Iterator[str]:
    yield from _head(HEADINGS)
    for row in report["rows"]:
        yield _line([row["scenario"], *cells(report, row)])


def _goals(report: Report) -> Iterator[str]:
    yield from _head(["figure", "aim", "found", ""])
    for one in report["goals"]:
        verdict = ("reached" if one["holds"] else "**missed**") + (" (noisy)" if one["is_noisy"] else "")
        yield _line([one["what"], one["aim"], one["found"], verdict])


def _carries(report: Report) -> Iterator[str]:
    """Yields how many of each thing a core carries: its second over what the thing costs."""
    for scenario, member, unit_us, what in CARRIED:
        row = find(report, scenario, OURS)
        if row is not None and row[member]:
            cost_us = row[member] * unit_us
            yield f"* {what}: {1e6 / cost_us:,.0f} a second, of {cost_us:,.1f} µs each (`{scenario}`)"


def _notes(report: Report) -> Iterator[str]:
    yield from (f"* {note}" for note in notes(report))


def _cliffs_run(report: Report) -> Iterator[str]:
    machine = report["machine"]
    yield (
        f"{report['date'][:10]}, {machine['cores']} cores of {machine['cpu']}, Linux {machine['kernel']}, Python "
        f"{machine['python']}, pdproxy {way(machine)}. `*`: others were busy."
    )


def _tabular(lines: Iterator[list[str]]) -> Iterator[str]:
    yield from _head(next(lines))
    yield from map(_line, lines)


_WRITERS: dict[str, Writer] = {
    "run": _run,
    "summary": _summary,
    "table": _table,
    "goals": _goals,
    "carries": _carries,
    "notes": _notes,
}
_CLIFFS: dict[str, Writer] = {
    "cliffs-run": _cliffs_run,
    "cliffs": lambda report: _tabular(axes_lines(report)),
    "cliffs-facts": lambda report: _tabular(fact_lines(report)),
}
"""The places of `cliffs`, whose reports have nothing of the others."""


def _head(names: Sequence[str]) -> Iterator[str]:
    yield _line(names)
    yield "|" + "---|" * len(names)


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
