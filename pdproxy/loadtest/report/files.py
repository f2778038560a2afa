"""The module writes what a load test leaves in its folder: every request, the figures, and the page."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdproxy.loadtest.record import Run, write_run
from pdproxy.loadtest.report.page import page
from pdproxy.loadtest.report.sides import ONLY_RUN, SUFFIX, Side, rate_of, shown_of
from pdproxy.loadtest.slo import Slo
from transfer.command_line.json_file import STDOUT

PAGE, FIGURES = "report.html", "summary.json"


def write_all(folder: Path, side: Side, slo: Slo, *, is_sweep: bool = False) -> list[Path]:
    """Writes a file for each run, the figures and the page, and returns the paths. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / (_name_at_rate(run) if is_sweep else ONLY_RUN) for run in side.runs]
    for run, path in zip(side.runs, written, strict=True):
        write_run(run, path)
    write_figures(folder / FIGURES, [side], slo)
    write_page(folder / PAGE, [side], slo)
    return [*written, folder / FIGURES, folder / PAGE]


def _name_at_rate(run: Run) -> str:
    """Returns a file's name under which files sort by their rates."""
    return f"rate-{rate_of(run) or 0.0:09.3f}{SUFFIX}"


def write_figures(path: Path, sides: Sequence[Side], slo: Slo) -> None:
    """Writes the figures as JSON, to a file or to `STDOUT`: ``runs`` has an entry for each side and rate."""
    runs = [{"label": one.side, "rate": one.rate, "figures": one.summary} for one in shown_of(sides, slo)]
    plain = msgspec.json.encode({"slo": str(slo), "runs": runs})
    text = msgspec.json.format(plain, indent=2) + b"\n"
    if path == STDOUT:
        sys.stdout.write(text.decode())
    else:
        _replace(path, text)


def write_page(path: Path, sides: Sequence[Side], slo: Slo) -> None:
    _replace(path, page(sides, slo).encode())


def _replace(path: Path, content: bytes) -> None:
    """Writes the whole file; if it cannot be written, the old one stays."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
