"""The module says what a report is about: one side per service under test, with a run each, or one run per rate in a
sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from pdproxy.loadtest.record import Run, RunFileError, read_run
from pdproxy.loadtest.report.words import rate
from pdproxy.loadtest.slo import Slo
from pdproxy.loadtest.summary import Summary, offered_rps, summarize

SUFFIX = ".jsonl"
ONLY_RUN = f"run{SUFFIX}"
"""The name of the file where there is one run only; then the folder's name tells what the run is."""


@dataclass(frozen=True, slots=True)
class Side:
    """Side is one service under test, with its runs in the order of their rates."""

    label: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """Shown is one run as it is in a report."""

    label: str
    side: str
    """Holds the label of the run's side; it equals `label` where the side has one run only."""
    index: int
    """Holds the number of the run's side, which decides its colour."""
    rate: float | None
    """Holds the requests per second that were asked for, or else those that were reached."""
    run: Run
    summary: Summary


@dataclass(frozen=True, slots=True)
class Chapter:
    """Chapter holds the runs that belong on the same axes."""

    title: str
    shown: tuple[Shown, ...]


def read_sides(words: Sequence[str]) -> list[Side]:
    """Returns a side for each ``PATH`` or ``LABEL=PATH``: a run's file, or a folder of such files. No two sides have
    the same label. Raises `RunFileError`, `OSError`."""
    sides: list[Side] = []
    for side in map(_read_side, words):
        taken = [one.label for one in sides]
        labels = chain([side.label], (f"{side.label} ({number})" for number in count(2)))
        sides.append(replace(side, label=next(label for label in labels if label not in taken)))
    return sides


def _read_side(word: str) -> Side:
    label, equals, name = ("", "", word) if Path(word).exists() else word.partition("=")
    path = Path(name if equals else word)
    if not path.is_dir():
        own = path.resolve().parent.name if path.name == ONLY_RUN else path.stem
        return Side(label if equals else own, (read_run(path),))
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise RunFileError(f"{path}: there is no run in it, that is, no file *{SUFFIX}")
    runs = sorted((read_run(file) for file in files), key=lambda run: rate_of(run) or 0.0)
    return Side(label if equals else path.resolve().name, tuple(runs))


def rate_of(run: Run) -> float | None:
    asked = run.head.settings.get("rate")
    return float(asked) if isinstance(asked, int | float) and asked > 0 else offered_rps(run)


def slo_of(sides: Sequence[Side]) -> Slo:
    """Returns the target that the first run was made with. Raises `SloError`."""
    asked = sides[0].runs[0].head.settings.get("slo") if sides and sides[0].runs else None
    return Slo.parse(asked if isinstance(asked, str) else "")


def shown_of(sides: Sequence[Side], slo: Slo) -> list[Shown]:
    """Returns all runs of all sides, side by side."""
    return [
        Shown(_label(side, run), side.label, index, rate_of(run), run, summarize(run, slo))
        for index, side in enumerate(sides)
        for run in side.runs
    ]


def chapters_of(sides: Sequence[Side], shown: Sequence[Shown]) -> list[Chapter]:
    """Returns one chapter for all runs where each side has one run; else one for each rate, lowest first."""
    if all(len(side.runs) == 1 for side in sides):
        return [Chapter(" and ".join(side.label for side in sides), tuple(shown))]
    by_rate: dict[str, list[Shown]] = {}
    for one in sorted(shown, key=lambda one: (one.rate or 0.0, one.index)):
        by_rate.setdefault(rate(one.rate), []).append(one)
    return [Chapter(f"{name} requests/s", tuple(some)) for name, some in by_rate.items()]


def _label(side: Side, run: Run) -> str:
    return side.label if len(side.runs) == 1 else f"{side.label} at {rate(rate_of(run))}/s"
