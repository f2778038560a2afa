"""No table of ours cuts a figure or a name, in a terminal of 80 columns or in a pipe, whatever is in it."""

from __future__ import annotations

import io
import random
import string
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from pdproxy.fleet.capacity import CapacityReport
from pdproxy.inspection import status_tables as shown
from pdproxy.inspection.findings import Report
from pdproxy.inspection.findings import make_table as checked_table
from pdproxy.loadtest.report import terminal
from pdproxy.loadtest.report.sides import Side, shown_of
from pdproxy.loadtest.slo import Slo
from pdproxy.simulate import tables as simulated
from scripts.dev.bench_proxy.failover import make_table as failover_table
from scripts.dev.bench_proxy.words import make_table as proxy_table
from tests.fakes.measured_runs import lively_run
from transfer.command_line.tables import Table
from transfer.geometry import capacity, kv_geometry

ROOT = Path(__file__).parents[1]
NOTHING_MEASURED = {"rows": [], "rounds": 5}
ONLY_LIVE = {"pdproxy/loadtest/bar.py"}
"""What draws with rich's own tables: a bar that is gone when its run is."""


def _capacity() -> Table:
    geometry = kv_geometry({}, bytes_per_token=1024)
    return CapacityReport(geometry, capacity(geometry, 1 << 30, 256), 1 << 30, 2)._table()


def _loadtest(make: Callable[..., Table], *, is_one: bool) -> Table:
    shown = shown_of([Side("x", (lively_run(seconds=5.0),))], Slo())
    return make(shown[0] if is_one else shown)


def _transfer() -> Table:
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    from scripts.dev.bench_transfer.report import make_table

    return make_table(NOTHING_MEASURED)


def _soak() -> Table:
    pytest.importorskip("nixl", reason="the soak needs engines (extra: engine)")
    from scripts.dev.soak.report import make_table

    return make_table({"seed": 1, "crashes": 2, "paths": {"disaggregated": 3, "local": 4}})


def _pressure() -> Table:
    pytest.importorskip("nixl", reason="the soak needs engines (extra: engine)")
    from scripts.dev.soak.pressure import PressureFindings, make_pressure_table

    return make_pressure_table(PressureFindings(1))


TABLES: dict[str, Callable[[], Table]] = {
    "pages": _capacity,
    "loadtest: runs": lambda: _loadtest(terminal.runs, is_one=False),
    "loadtest: latencies": lambda: _loadtest(terminal.latencies, is_one=True),
    "simulate": lambda: simulated.make_table("Policies", (["policy (prefill/decode)", *simulated._HEADS], [])),
    "simulate: check": lambda: simulated.make_table("x", simulated.compared_rows([])),
    "check": lambda: checked_table(Report("x")),
    "status: instances": lambda: shown.instance_table([]),
    "status: requests": lambda: shown.request_table([]),
    "bench_proxy": lambda: proxy_table(NOTHING_MEASURED),
    "bench_proxy --failover": lambda: failover_table([]),
    "bench_transfer": _transfer,
    "soak": _soak,
    "soak --pressure": _pressure,
}


def fill(table: Table, luck: random.Random, num_rows: int = 4) -> None:
    """Puts rows of long names and large figures into the table, instead of those that it has."""
    table._rows.clear()
    for _ in range(num_rows):
        cells = [_words(luck) if place in table._words else _figure(luck) for place in range(len(table._headings))]
        table.add_row(*cells)


def _figure(luck: random.Random) -> str:
    if luck.random() < 0.1:
        return ""
    return luck.choice((f"{luck.randrange(10 ** luck.randrange(1, 16)):,}", f"{luck.expovariate(1e-9):.2f}", "–"))


def _words(luck: random.Random) -> str:
    letters = string.ascii_letters + "-/_:[]"
    many = ("".join(luck.choices(letters, k=luck.randrange(1, 40))) for _ in range(luck.randrange(5)))
    return " ".join(many)


def printed(table: Table, *, is_terminal: bool) -> list[str]:
    """Returns the lines of the table as a terminal of 80 columns shows them, or as a pipe gets them."""
    out = io.StringIO()
    table.print_to(Console(file=out, width=80, force_terminal=is_terminal, color_system=None, no_color=True))
    return out.getvalue().splitlines()


def columns(lines: list[str], bar: str) -> list[list[list[str]]]:
    """Returns the pieces of text in each column of each of the tables that were drawn below one another; `bar` is
    between the cells."""
    parts: list[list[list[str]]] = []
    is_inside = False
    for line in lines:
        if line.startswith(bar):
            cells = [cell.strip() for cell in line.strip(bar).split(bar)]
            if not is_inside:
                parts.append([[] for _ in cells])
            for column, cell in zip(parts[-1], cells, strict=True):
                column.append(cell)
        is_inside = line.startswith(bar)
    return parts


def squeezed(pieces: list[str]) -> str:
    return "".join("".join(pieces).split())


def check_whole(table: Table, *, is_terminal: bool) -> None:
    """Checks that every cell and heading is there to the last character, and that no figure is broken."""
    lines = printed(table, is_terminal=is_terminal)
    shown = "\n".join(lines)
    assert "…" not in shown
    expected = [list(column) for column in zip(*table.rows, strict=True)]
    heads = columns(lines, "┃") or [[[""] for _ in part] for part in columns(lines, "│")]
    parts = [places for places, _ in table._parts(80 if is_terminal else None)]
    for places, head, body in zip(parts, heads, columns(lines, "│"), strict=True):
        for place, heading, pieces in zip(places, head, body, strict=True):
            assert squeezed(heading) == squeezed([table._headings[place]]), shown
            if place in table._words:
                assert squeezed(pieces) == squeezed(expected[place]), shown
            else:
                assert [one for one in pieces if one] == [one for one in expected[place] if one], shown
    filled = {place for place, heading in enumerate(table._headings) if heading or any(expected[place])}
    assert filled <= {place for places in parts for place in places}
    if is_terminal:
        assert all(cell_len(line) <= 80 for line in lines), shown


@pytest.mark.parametrize("is_terminal", [True, False], ids=["80 columns", "a pipe"])
@pytest.mark.parametrize("name", TABLES)
def test_no_figure_and_no_name_is_cut(name: str, is_terminal: bool) -> None:
    table = TABLES[name]()
    for _ in range(10):
        seed = random.randrange(1_000_000)
        print(f"seed {seed}")
        fill(table, random.Random(seed))
        check_whole(table, is_terminal=is_terminal)


def test_a_pipe_gets_every_row_in_one_line() -> None:
    table = TABLES["bench_proxy"]()
    fill(table, random.Random(1), num_rows=3)
    (part,) = columns(printed(table, is_terminal=False), "│")
    assert [len(column) for column in part] == [3] * len(table._headings)


def test_a_table_that_fits_is_left_as_it_is() -> None:
    table = Table("name", "figure", title="A title")
    table.add_row("decode-0", "1,234")
    assert printed(table, is_terminal=True) == printed(table, is_terminal=False)


def test_names_are_not_broken_while_there_is_room_for_figures_beside_them() -> None:
    table = Table("layout", "mode", *"abcdefgh", names=2, words=(0, 1))
    table.add_row("contiguous and then some more words", "serial", *["1,234,567"] * 8)
    shown = printed(table, is_terminal=True)
    assert len([line for line in shown if "│ contiguous and then some more words │ serial │" in line]) == 4


def test_a_name_in_brackets_is_no_markup() -> None:
    table = Table("name", "figure")
    table.add_row("[red]x[/red]", ":smile:")
    assert "│ [red]x[/red] │ :smile: │" in printed(table, is_terminal=True)


def test_a_row_has_a_cell_for_each_heading() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table("a", "b").add_row("1")


def test_nobody_draws_a_table_in_another_way() -> None:
    """rich's own tables are cut where they have no room."""
    sources = (path for folder in ("pdproxy", "transfer", "scripts") for path in (ROOT / folder).rglob("*.py"))
    drawing = {str(path.relative_to(ROOT)) for path in sources if "rich.table" in path.read_text()}
    assert drawing - ONLY_LIVE == {"transfer/command_line/tables.py"}
