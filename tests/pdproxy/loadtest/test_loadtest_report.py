"""The report: one page that needs nothing else, every picture with its figures below it, runs on the same axes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec import structs
from rich.console import Console

from pdproxy.loadtest.record import Run, RunFileError, read_run, write_run
from pdproxy.loadtest.report import overview
from pdproxy.loadtest.report.bins import Bins
from pdproxy.loadtest.report.files import FIGURES, PAGE, write_all, write_figures
from pdproxy.loadtest.report.instances import spells
from pdproxy.loadtest.report.page import page
from pdproxy.loadtest.report.scale import Scale
from pdproxy.loadtest.report.sides import Side, chapters_of, rate_of, read_sides, shown_of, slo_of
from pdproxy.loadtest.report.svg import BOTTOM, LEFT, TOP, Panel, thinned
from pdproxy.loadtest.report.terminal import show
from pdproxy.loadtest.report.words import counted, milliseconds, rate, seconds, share
from pdproxy.loadtest.slo import Slo
from tests.fakes.measured_runs import failed, health, left, lively_run, plain, record, run_of

SLO = Slo.parse("ttft:p99<0.5,tpot:p95<0.05,e2e:p99<2,errors<1%")
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Elements(HTMLParser):
    """Checks that all that is opened is closed, in order, and keeps what is there."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.found)


def svgs(text: str) -> Iterator[ElementTree.Element]:
    """Each picture, as what it is: well-formed XML."""
    for drawn in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        yield ElementTree.fromstring(drawn)


def one_side(**fields: object) -> Side:
    return Side("1p2d", (lively_run(**fields),))  # type: ignore[arg-type]


def sweep_side(label: str, slowness: float = 1.0) -> Side:
    rates = (2.0, 4.0, 8.0)
    return Side(label, tuple(lively_run(rate=one, seconds=9, slowness=slowness * one / 4) for one in rates))


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────────────

PAGES = {
    "one run": [one_side()],
    "two runs": [one_side(), Side("0p2d", (lively_run(seed=2, slowness=1.5),))],
    "two sweeps": [sweep_side("1p1d"), sweep_side("aggregated", 2.0)],
    "a strange server": [Side("other", (run_of([record(0), plain(1, done_s=2.0), left(2), failed(3)]),))],
    "one request": [Side("one", (run_of([record(0)]),))],
    "failures alone": [Side("dead", (run_of([failed(index) for index in range(5)]),))],
    "nothing": [Side("nothing", (run_of([]),))],
    "stopped": [Side("half", (lively_run(seconds=5, is_interrupted=True),))],
}


@pytest.mark.parametrize("sides", PAGES.values(), ids=PAGES)
def test_the_page_needs_nothing_else(sides: list[Side]) -> None:
    text = page(sides, SLO)
    elements = Elements(text)
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"script", "link", "img", "iframe", "object", "form"}
    attributes = [attribute for _, attributes in elements.found for attribute in attributes]
    assert not [name for name in attributes if name in ("src", "xlink:href", "onclick", "onload")]
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    links = [attributes["href"] for _, attributes in elements.found if "href" in attributes]
    assert links == [f"#{one}" for one in ids], "the contents lead to each part of the page, and nowhere else"
    assert len(set(ids)) == len(ids) >= 2
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize("sides", PAGES.values(), ids=PAGES)
def test_pictures_are_well_formed_and_inside_their_frames(sides: list[Side]) -> None:
    for svg in svgs(page(sides, SLO)):
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        for element in svg.iter():
            for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
                if name in element.attrib:
                    assert -1 <= float(element.attrib[name]) <= max(width, height), element.attrib
            numbers = [float(one) for one in re.findall(r"-?\d+\.?\d*", element.attrib.get("d", ""))]
            assert all(-1 <= one <= max(width, height) for one in numbers)
        assert "nan" not in ElementTree.tostring(svg, "unicode").lower()


@pytest.mark.parametrize("sides", PAGES.values(), ids=PAGES)
def test_every_picture_has_its_figures_below(sides: list[Side]) -> None:
    for section in re.findall(r"<section>.*?</section>", page(sides, SLO), re.DOTALL):
        *_, after = section.split("</svg>")
        assert "<svg" in section
        assert "<tbody>" in after


def test_what_a_run_says_of_itself_cannot_become_markup() -> None:
    run = lively_run(seconds=3, model="<script>alert(1)</script>", settings={"slo": "", "label": "<img src=x>"})
    text = page([Side("<b>bold</b>", (run,))], SLO)
    assert "<script" not in text
    assert "<img" not in text
    assert "<b>" not in text
    assert "&lt;b&gt;bold&lt;/b&gt;" in text


def test_the_figures_on_the_page_are_those_of_the_summary() -> None:
    side = one_side()
    (one,) = shown_of([side], SLO)
    words = Elements(page([side], SLO)).words
    for metric in ("ttft", "tpot", "e2e"):
        found = one.summary.latencies[metric]
        for value in (found.p50, found.p99, found.max):
            assert milliseconds(value) in words
    assert f"{one.summary.num_failed:,}" in words


def test_faults_are_marked_in_the_timelines_and_told_in_figures() -> None:
    text = page([one_side()], SLO)
    flags = [svg for svg in svgs(text) if any(one.get("class") == "flag" for one in svg.iter())]
    assert len(flags) >= 5
    assert "kill decode-0" in text
    assert "From one event to the next" in text


def test_runs_of_two_sides_are_on_the_same_axes() -> None:
    text = page(PAGES["two runs"], SLO)
    shares = next(svg for svg in svgs(text) if svg.attrib["aria-label"] == "TTFT, share of answers")
    lines = [one.get("class") for one in shares.iter() if (one.get("class") or "").startswith("line")]
    assert lines == ["line c0", "line c1"]


def test_a_sweep_has_goodput_against_rate_and_a_chapter_for_each() -> None:
    sides = PAGES["two sweeps"]
    text = page(sides, SLO)
    assert "Goodput against rate" in text
    assert [chapter.title for chapter in chapters_of(sides, shown_of(sides, SLO))] == [
        "2.00 requests/s",
        "4.00 requests/s",
        "8.00 requests/s",
    ]
    elements = Elements(text)
    chapters = [attributes for tag, attributes in elements.found if tag == "details" and "class" in attributes]
    assert len(chapters) == 3
    assert sum("open" in attributes for attributes in chapters) == 1
    assert "Goodput against rate" not in page(PAGES["one run"], SLO)


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        ({"rate": 8.0}, "Load test of 1:1 at 8.00 requests/s"),
        ({"clients": 4, "arrivals": "closed"}, "Load test of 1:1 with 4 clients"),
        ({"arrivals": "trace"}, "Load test of 1:1 that replays a trace, at 1.00 requests/s"),
    ],
)
def test_the_title_says_what_was_tested(settings: dict[str, Any], title: str) -> None:
    side = Side("1:1", (run_of([record(0), record(1)], wall_s=2.0, settings=settings),))
    assert f"<title>{title}</title>" in page([side], SLO)
    assert "<h1>Load test of 1:1 at 2.00 to 8.00 requests/s</h1>" in page([sweep_side("1:1")], SLO)


def test_a_percentile_is_told_where_there_are_values_enough_for_it() -> None:
    def side(num: int) -> Side:
        return Side("x", (run_of([record(index, ttft_s=0.1 + index / 10_000) for index in range(num)]),))

    shown = shown_of([side(999), side(1000)], Slo())
    assert overview.HEADINGS[9:12] == ("TTFT p50", "TTFT p99", "TTFT p99.9")
    assert [row[11] for row in overview.rows(shown)] == ["–", "200"]
    assert 11 in overview.columns(shown)
    few = page([side(20)], Slo())
    assert '<th scope="col">p99</th>' in few
    assert '<th scope="col">TTFT p50</th><th scope="col">TTFT p99</th><th scope="col">TPOT p50</th>' in few


def test_a_late_generators_figures_are_said_to_be_worth_nothing() -> None:
    late = Side("late", (run_of([record(0)], health=health(late_p99_s=0.5)),))
    text = page([late], SLO)
    assert '<p class="warning">* late: not to be quoted. The generator was late: p99 of its sends 500 ms' in text
    assert text.index('class="verdict"') < text.index("TTFT p50") < text.index('class="warning"') < text.index("<nav")
    assert "not to be quoted" not in page(PAGES["one run"], SLO)


def test_wrong_answers_are_told() -> None:
    same = [record(index, question=1, answer_digest="aa") for index in range(4)]
    wrong = [*same, record(4, question=1, answer_digest="bb")]
    (said,) = [words for words in notes(Side("x", (run_of(wrong),))) if "answers" in words]
    assert said == "x: answers to the same question: 1 of 5 differ"
    other = Side("y", (run_of([record(0, question=1, answer_digest="aa")]),))
    assert "answers of x and of y to the same question: 0 of 5 differ" in notes(Side("x", (run_of(same),)), other)


def test_runs_that_were_not_asked_alike_are_told() -> None:
    def side(label: str, **settings: object) -> Side:
        return Side(label, (run_of([record(0)], settings={"sizes": "8 → 8", "warmup_s": 2.0, **settings}),))

    assert not [words for words in notes(side("x", rate=2.0), side("y", rate=4.0)) if "asked alike" in words]
    (said,) = [words for words in notes(side("x"), side("y", sizes="9 → 8", clients=3)) if "asked alike" in words]
    assert said == "x and y were not asked alike: sizes, clients differ; see the settings"


def test_where_the_prefill_of_one_engine_alone_is_to_be_found() -> None:
    (said,) = notes(Side("x", (run_of([record(0, path="local"), record(1, path="local"), failed(2)]),)))[1:]
    assert said == "x: 2 answers are of one engine alone: their prefill is in the handover's time"


def test_answers_that_came_whole_at_once_are_told() -> None:
    run = run_of([record(0), record(1, tpot_s=0.0), plain(2, done_s=3.0)])
    assert notes(Side("x", (run,))) == [
        "x: 1 of 3 answers came whole at once, so that their TPOT is 0 and tells nothing of the engine"
    ]
    assert notes(Side("x", (run_of([record(0)]),))) == []


def test_the_warm_up_is_drawn_as_such() -> None:
    def shaded(side: Side) -> int:
        return sum(one.get("class") == "bar warmup" for svg in svgs(page([side], SLO)) for one in svg.iter())

    assert shaded(one_side()) == 0
    assert shaded(one_side(warmup_s=5.0)) >= 6
    assert "warm-up, which does not count" in page([one_side(warmup_s=5.0)], SLO)


@pytest.mark.parametrize(("num_slots", "is_drawn"), [(16, True), (4096, False)])
def test_slots_are_drawn_where_something_else_is_to_be_seen_beside_them(num_slots: int, *, is_drawn: bool) -> None:
    run = lively_run()
    moments = [structs.replace(one, capacity={"decode-0": num_slots}) for one in run.moments]
    text = page([Side("x", (structs.replace(run, moments=moments),))], SLO)
    (slots,) = [svg for svg in svgs(text) if svg.attrib["aria-label"] == f"slots held of {num_slots:,}"]
    assert any(one.get("class") == "line faint" for one in slots.iter()) == is_drawn


def test_failures_are_told_where_they_have_no_latency() -> None:
    assert "5 failed requests have none" not in page([one_side()], SLO)
    records = [record(0), *(failed(index) for index in range(1, 6))]
    assert "5 failed requests have none" in page([Side("x", (run_of(records),))], SLO)


def notes(*sides: Side) -> list[str]:
    return list(overview.notes(shown_of(sides, Slo()), sides))


def test_verdicts() -> None:
    def verdicts(*sides: Side, slo: Slo = SLO) -> list[str]:
        return list(overview.verdicts(shown_of(sides, slo), slo))

    fast = Side("fast", tuple(run_of([record(0), record(1)], settings={"rate": one}) for one in (2.0, 4.0)))
    slow = Side("slow", (run_of([record(0, ttft_s=0.7), record(1)]),))
    dead = Side("dead", (run_of([failed(0)]), run_of([failed(0)])))
    assert verdicts(fast, slow, dead) == [
        f"fast: up to 4.00 requests/s met {SLO}; good there: 1.69/s",
        "slow: missed TTFT p99 < 0.5 s: it was 700 ms; 50.0 % of the requests were good",
        f"dead: no rate met {SLO}",
    ]
    uneven = [run_of([record(0, ttft_s=ttft_s)], settings={"rate": at}) for at, ttft_s in ((2.0, 0.7), (4.0, 0.1))]
    (said,) = verdicts(Side("uneven", tuple(uneven)))
    assert said.startswith("uneven: up to 4.00 requests/s met")
    assert said.endswith("; but 2.00 did not")
    assert verdicts(fast, slo=Slo()) == []
    late = {"health": health(late_p99_s=0.45)}
    unsure = Side("unsure", (fast.runs[0], run_of([record(0, ttft_s=0.2)], settings={"rate": 4.0}, **late)))
    said, nothing, _, none_better = verdicts(unsure, Side("late", unsure.runs[1:]), fast)
    assert said == (
        f"unsure: at least up to 2.00 requests/s met {SLO}; good there: 1.69/s; "
        "4.00 is not judged: the load generator was late by 451 ms"
    )
    assert nothing == "late: not judged: the load generator was late by 451 ms; TTFT p99 < 0.5 s: it was 200 ms"
    assert none_better == "None of these is shown to be better than another: not all of unsure and late is judged"
    beyond = Side("beyond", (*unsure.runs, run_of([record(0, ttft_s=2.0)], settings={"rate": 3.0})))
    assert verdicts(beyond, fast)[0].startswith("beyond: up to 2.00 requests/s met")
    assert len(verdicts(beyond, fast)) == 2, "what lies above a rate that missed it changes nothing"
    alone = Side("dead", (run_of([failed(0)]),))
    assert verdicts(alone, slo=Slo.parse("e2e:p99<1")) == [
        "dead: missed E2E p99 < 1 s: too many failed, or nothing was measured; 0.0 % of the requests were good"
    ]


# ── sides, files, terminal ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_written_can_be_compared(tmp_path: Path) -> None:
    for name, side in (("a", one_side()), ("b", sweep_side("b"))):
        for path in write_all(tmp_path / name, side, SLO, is_sweep=name == "b"):
            assert path.is_file()
    first, second, third = read_sides([f"{tmp_path / 'a'}", f"two={tmp_path / 'b'}", f"{tmp_path / 'a' / 'run.jsonl'}"])
    assert (first.label, second.label, third.label) == ("a", "two", "a (2)")
    assert [rate_of(run) for run in second.runs] == [2, 4, 8]
    assert first.runs == third.runs
    assert slo_of([first]) == Slo.parse("ttft:p99<0.5,e2e:p99<2")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "rate-00002.000.jsonl",
        "rate-00004.000.jsonl",
        "rate-00008.000.jsonl",
        PAGE,
        FIGURES,
    ]


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "rate=4"
    write_all(folder, one_side(), SLO)
    (side,) = read_sides([str(folder)])
    assert side.label == "rate=4"


def test_a_folder_without_runs(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="there is no run in it"):
        read_sides([str(tmp_path)])
    with pytest.raises(FileNotFoundError):
        read_sides([str(tmp_path / "none.jsonl")])


def test_the_figures_as_json(tmp_path: Path) -> None:
    dead = Side("dead", (run_of([failed(0)]),))
    write_figures(tmp_path / "x.json", [one_side(), dead], SLO)
    found = json.loads((tmp_path / "x.json").read_text())
    assert [one["label"] for one in found["runs"]] == ["1p2d", "dead"]
    lively, failing = (one["figures"] for one in found["runs"])
    assert lively["latencies"]["ttft"]["p99"] > 0.1
    assert list(lively["phases"]) == ["tokenize", "slot_wait", "prefill", "kv_wait", "first_byte", "decode"]
    assert failing["slo"][0]["value"] is None
    assert failing["errors"] == {"http_503": 1}


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text("before")

    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="no room"):
        write_figures(path, [one_side()], SLO)
    assert path.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]


def test_a_run_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    run = lively_run(seconds=4)
    write_run(run, tmp_path / "run.jsonl")
    again = read_run(tmp_path / "run.jsonl")
    sides = [Side("x", (run,))], [Side("x", (again,))]
    assert page(sides[0], SLO) == page(sides[1], SLO)


@pytest.mark.parametrize("sides", PAGES.values(), ids=PAGES)
def test_the_terminal_shows_the_same_figures(sides: list[Side]) -> None:
    text = shown(sides)
    for row in overview.rows(shown_of(sides, SLO)):
        assert row[0] in text
        assert row[-2] in text, "p99 of E2E"
    for words in overview.verdicts(shown_of(sides, SLO), SLO):
        assert words in text


def test_the_terminal_warns() -> None:
    late: Run = run_of([record(0)], health=health(late_p99_s=0.5))
    assert "NOT TO BE QUOTED" in shown([Side("late", (late,))])
    assert "not to be quoted" in shown([Side("late", (late,))])


def shown(sides: list[Side]) -> str:
    console = Console(file=io.StringIO(), width=400)
    show(sides, SLO, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ── how it is drawn ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "scale",
    [
        Scale.linear(0.0, 37.0),
        Scale.linear(5.0, 5.0),
        Scale.rising([3.0, 0.2]),
        Scale.rising([]),
        Scale.durations([0.001, 0.4, 90.0]),
        Scale.durations([0.02]),
        Scale.durations([0.02, 0.021]),
        Scale.durations([]),
        Scale.durations([1e-9, 1e6]),
        Scale.percents(5),
        Scale.percents(1_000_000),
    ],
)
def test_scales_have_lines_inside_them_in_order(scale: Scale) -> None:
    values = [tick.value for tick in scale.ticks]
    assert 2 <= len(values) <= 16
    assert values == sorted(values)
    assert all(scale.low <= value <= scale.high * 1.0001 for value in values)
    places = [scale.at(value) for value in values]
    assert places == sorted(places)
    assert (scale.at(scale.low), scale.at(scale.high)) == (0.0, 1.0)
    assert (scale.at(scale.low - 1), scale.at(scale.high * 2 + 1)) == (0.0, 1.0)


def test_each_nine_is_as_wide_as_the_next() -> None:
    scale = Scale.percents(1_000_000)
    assert scale.at(99.9) - scale.at(99) == pytest.approx(scale.at(99) - scale.at(90))


@pytest.mark.parametrize(("count", "high"), [(5, 90), (100, 99), (999, 99), (1000, 99.9), (100_000, 99.99)])
def test_the_tail_is_drawn_as_far_as_there_are_values(count: int, high: float) -> None:
    assert Scale.percents(count).high == high


def test_a_point_is_where_its_values_are() -> None:
    panel = Panel(title="", x=Scale.linear(0, 10), y=Scale.linear(0, 2), width=400, height=200)
    assert panel.place((0, 0)) == (LEFT, 200 - BOTTOM)
    assert panel.place((10, 2)) == (panel.right, TOP)
    assert panel.place((5, 1)) == ((LEFT + panel.right) / 2, (TOP + 200 - BOTTOM) / 2)


def test_of_many_points_none_is_lost_that_stands_out() -> None:
    points = [(float(index), 9.0 if index in (17, 502, 999) else 1.0) for index in range(1000)]
    kept = thinned(points, 100)
    assert len(kept) <= 100
    assert [x for x, y in kept if y > 1] == [17, 502, 999]
    assert kept == sorted(kept)
    assert thinned(points, 1000) == points


@pytest.mark.parametrize(("span_s", "most", "width_s", "num"), [(30, 60, 0.5, 60), (31, 60, 1, 31), (0, 9, 0.25, 1)])
def test_time_is_cut_into_pieces_that_people_think_in(span_s: float, most: int, width_s: float, num: int) -> None:
    assert Bins.over(span_s, most) == Bins(width_s, num)


def test_what_is_outside_of_all_pieces_is_left_out() -> None:
    assert Bins(1.0, 3).sorted_in([-0.1, 0.0, 0.9, 2.5, 3.0], float) == [[0.0, 0.9], [], [2.5]]


def test_spells_of_an_instance() -> None:
    moments = lively_run(seconds=12).moments
    assert list(spells(moments, "decode-0")) == [(0.0, 4.25, "ready"), (4.25, 10.0, "down"), (10.0, 11.75, "ready")]
    assert list(spells(moments, "nobody")) == []
    assert list(spells([], "decode-0")) == []


def test_words() -> None:
    found = [milliseconds(value) for value in (None, 0.0, 0.0004249, 0.0042, 0.042, 0.42, 42.0)]
    assert found == ["–", "0.00", "0.42", "4.20", "42.0", "420", "42,000"]
    assert [rate(value) for value in (None, 0.25, 75.04, 7500.0)] == ["–", "0.25", "75.0", "7,500"]
    assert [share(value) for value in (None, 0.0, 0.0001, 0.5, 0.9999, 1.0)] == [
        *("–", "0.0 %", "0.01 %", "50.0 %", "99.99 %", "100.0 %")
    ]
    assert [seconds(value) for value in (0, 2e-5, 0.005, 1.5, 60)] == ["0", "20 µs", "5 ms", "1.5 s", "60 s"]
    assert counted({}) == "–"
    assert counted({"timeout": 3, "http_503": 1}) == "timeout 3, http_503 1"
