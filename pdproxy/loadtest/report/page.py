"""The module makes the report as one HTML file that needs nothing else: it has no script, no font, nothing from
elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pdproxy.loadtest.report import overview
from pdproxy.loadtest.report.distributions import distributions
from pdproxy.loadtest.report.html import folded, paragraph, runs_legend, table, with_contents
from pdproxy.loadtest.report.instances import instances
from pdproxy.loadtest.report.phases import phases
from pdproxy.loadtest.report.rates import rates
from pdproxy.loadtest.report.sides import Chapter, Shown, Side, chapters_of, rate_of, shown_of
from pdproxy.loadtest.report.style import CSS
from pdproxy.loadtest.report.timelines import timelines
from pdproxy.loadtest.report.words import NOTHING, counted, day, milliseconds, number, rate, seconds, share
from pdproxy.loadtest.slo import Slo

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
HOW_IT_COUNTS = (
    "Latencies count from when a request was due, not from when it was sent: what a request waits for because the "
    "generator was held up, or the service before it, is in its latency (no coordinated omission). Percentiles are "
    "values that were really measured: p99 of fewer than a hundred is the largest of them, and p99.9 is told from a "
    "thousand on. A request that failed misses every limit of the target. Where the generator itself was late, the "
    "target is met if the value together with that lateness is within the limit, missed if the value is further beyond "
    "the limit than the lateness can explain, and otherwise not judged."
)


def page(sides: Sequence[Side], slo: Slo) -> str:
    """Returns the page as HTML. It needs at least one side with at least one run."""
    shown = shown_of(sides, slo)
    title = title_of(sides)
    body = "".join(_body(title, sides, shown, slo))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>{body}</body></html>\n"
    )


def title_of(sides: Sequence[Side]) -> str:
    """Returns the page's title: what was tested, and how."""
    if len(sides) > 1:
        return f"Load tests compared: {', '.join(side.label for side in sides[:-1])} and {sides[-1].label}"
    (side,) = sides
    asked = [rate_of(run) or 0.0 for run in side.runs]
    settings = side.runs[0].head.settings
    if len(asked) > 1:
        return f"Load test of {side.label} at {rate(min(asked))} to {rate(max(asked))} requests/s"
    if settings.get("arrivals") == "closed":
        return f"Load test of {side.label} with {settings.get('clients')} clients"
    manner = "that replays a trace, " if settings.get("arrivals") == "trace" else ""
    return f"Load test of {side.label} {manner}at {rate(asked[0])} requests/s"


def _body(title: str, sides: Sequence[Side], shown: Sequence[Shown], slo: Slo) -> Iterator[str]:
    """Yields the page's parts: what came of the test stands first, then what stands against it, then the contents."""
    yield f"<header><h1>{escape(title)}</h1>{paragraph(_when(shown))}</header><main>"
    yield from (paragraph(words, "verdict") for words in overview.verdicts(shown, slo))
    yield runs_legend((index, side.label) for index, side in enumerate(sides))
    yield _runs(shown)
    yield from (paragraph(words, "warning") for words in overview.warnings(shown))
    yield from (paragraph(words) for words in overview.notes(shown, sides))
    yield from with_contents(_parts(sides, shown, slo))
    yield "</main>"


def _runs(shown: Sequence[Shown]) -> str:
    places = overview.columns(shown)
    rows = ([row[place] for place in places] for row in overview.rows(shown))
    return table([overview.HEADINGS[place] for place in places], rows, overview.CAPTION)


def _parts(sides: Sequence[Side], shown: Sequence[Shown], slo: Slo) -> Iterator[str]:
    if len({one.rate for one in shown}) > 1:
        yield rates(shown, slo)
    yield from _chapters(chapters_of(sides, shown))
    yield "<h2>What was asked, and how it was measured</h2>"
    yield paragraph(HOW_IT_COUNTS)
    yield _generators(shown)
    yield _settings(shown)


def _when(shown: Sequence[Shown]) -> str:
    first = min(one.run.head.started_at for one in shown)
    models = dict.fromkeys(one.run.head.model for one in shown)
    targets = dict.fromkeys(one.run.head.target for one in shown)
    return f"{day(first)} · {', '.join(models)} · {', '.join(targets)}"


def _chapters(chapters: Sequence[Chapter]) -> Iterator[str]:
    """Yields the chapters. In a sweep, the chapter of the highest rate that met the target is open, because it tells
    the most; where none met it, the first one is open."""
    if len(chapters) == 1:
        yield _pictures(chapters[0])
        return
    met = [chapter for chapter in chapters if any(one.summary.is_slo_met for one in chapter.shown)]
    at_first = met[-1] if met else chapters[0]
    for chapter in chapters:
        is_open = " open" if chapter is at_first else ""
        heading = f"<summary>{escape(chapter.title)}</summary>"
        yield f'<details class="chapter"{is_open}>{heading}{_pictures(chapter)}</details>'


def _pictures(chapter: Chapter) -> str:
    """Returns the pictures of a chapter. Each side has one colour; several runs of a side at the same rate share it."""
    parts = [*distributions(chapter.shown), timelines(chapter.shown), instances(chapter.shown), phases(chapter.shown)]
    return "".join((*parts, _stretches(chapter.shown), _rest(chapter.shown)))


def _stretches(shown: Sequence[Shown]) -> str:
    """Returns the table of the stretches from one event to the next, or nothing if there are none."""
    rows = [
        [
            one.label,
            f"{seconds(part.begin_s)} – {seconds(part.end_s)}",
            part.after or "the beginning",
            f"{part.num_requests:,}",
            f"{part.num_failed:,}",
            *(milliseconds(value) for value in (part.ttft.p50, part.ttft.p99, part.e2e.p50, part.e2e.p99)),
        ]
        for one in shown
        for part in one.summary.stretches
    ]
    if not rows:
        return ""
    headings = ["", "time", "after", "due", "failed", "TTFT p50 ms", "p99", "E2E p50 ms", "p99"]
    return f"<h3>From one event to the next</h3>{table(headings, rows)}"


def _rest(shown: Sequence[Shown]) -> str:
    """Returns the table of what is not drawn."""
    rows = [
        [
            one.label,
            counted(one.summary.errors),
            counted(one.summary.paths),
            counted({**one.summary.prefillers, **one.summary.decoders}),
            number(one.summary.prompt_tps, 0),
            number(one.summary.answer_tps, 0),
            share(one.summary.cached_share),
            milliseconds(one.summary.transfer.p50),
            number(one.summary.kv_bytes / 2**20 if one.summary.kv_bytes else None),
        ]
        for one in shown
    ]
    headings = ["", "failures by code", "paths", "answers by instance", "prompt tokens/s", "answer tokens/s"]
    headings += ["cached", "KV transfer p50 ms", "KV MiB"]
    return f"<h3>Answers and tokens</h3>{table(headings, rows)}"


def _generators(shown: Sequence[Shown]) -> str:
    rows = []
    for one in shown:
        health = one.summary.generator
        late = (health.late_p50_s, health.late_p99_s, health.late_max_s)
        lag = (health.lag_p50_s, health.lag_p99_s, health.lag_max_s)
        figures = [milliseconds(value) for value in (*late, *lag, health.limit_s)]
        rows.append([one.label, share(health.cpu_share), *figures, "yes" if health.is_trusted else "no"])
    headings = ["generator", "of a core", "late p50 ms", "p99", "max", "lag p50 ms", "p99", "max", "allowed", "kept up"]
    return table(headings, rows, "Late: from when a request was due to when it was sent. Lag: of its event loop.")


def _settings(shown: Sequence[Shown]) -> str:
    names = dict.fromkeys(name for one in shown for name in one.run.head.settings)
    rows = [["seed", *(str(one.run.head.seed) for one in shown)]]
    rows += [[name, *(_setting(one, name) for one in shown)] for name in names]
    settings = table(["", *(one.label for one in shown)], rows)
    return folded("settings", settings.replace("<table>", '<table class="words">', 1), is_open=len(shown) < 3)


def _setting(one: Shown, name: str) -> str:
    value = one.run.head.settings.get(name)
    return NOTHING if value is None or value == "" else str(value)
