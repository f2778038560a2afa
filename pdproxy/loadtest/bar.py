"""The module shows a run while it goes on: a terminal gets a bar with live rates, and everything else gets a line now
and then."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from pdproxy.loadtest.live import Progress
from pdproxy.loadtest.report.words import NOTHING, milliseconds, rate

LINE_EVERY_S = 10.0
"""The seconds between two lines where there is no terminal; those lines are for a log."""


class Bar:
    """Bar shows the progress of a run; use it with `with`, and let the driver call `tell`. It draws when it is told and
    at no other time: a thread that draws would take time from the generator when a request is due.

    Mutable state: what is on the screen; when the last line was written.
    """

    def __init__(self, console: Console, what: str) -> None:
        self._console = console
        self._what = what
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._told_s = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, progress: Progress) -> None:
        if self._live is not None:
            self._live.update(self._drawn(progress), refresh=True)
        elif progress.at_s - self._told_s >= LINE_EVERY_S:
            self._told_s = progress.at_s
            self._console.print(f"{self._what}: {words(progress)}", highlight=False, markup=False, soft_wrap=True)

    def _drawn(self, progress: Progress) -> Table:
        grid = Table.grid(padding=(0, 1))
        completed, total = how_far(progress)
        grid.add_row(self._what, ProgressBar(total=total, completed=completed, width=24, pulse=total is None))
        grid.add_row("", words(progress))
        return grid


def how_far(progress: Progress) -> tuple[float, float | None]:
    """Returns what is done and the whole, both in seconds or both in requests. The whole is None where it is not
    known."""
    if progress.duration_s is not None:
        return min(progress.at_s, progress.duration_s), progress.duration_s
    return float(progress.num_ended), None if progress.num_expected is None else float(progress.num_expected)


def words(progress: Progress) -> str:
    ttft = f"{milliseconds(progress.ttft_p50_s)} / {milliseconds(progress.ttft_p95_s)} ms"
    parts = [
        f"{progress.at_s:.0f} s",
        f"{progress.num_sent:,} sent, {progress.num_open:,} open",
        f"{rate(progress.sent_per_s)}/s asked, {rate(progress.ended_per_s)}/s ended",
        f"{rate(progress.tokens_per_s)} tokens/s",
        f"TTFT {ttft if progress.ttft_p50_s is not None else NOTHING}",
        f"{progress.num_failed:,} failed" if progress.num_failed else "",
        f"{progress.num_aborted:,} left" if progress.num_aborted else "",
    ]
    return " · ".join(part for part in parts if part)
