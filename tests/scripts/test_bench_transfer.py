"""The benchmark: what it reports of what it timed, and that it runs, can be stopped, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from scripts.dev.bench_transfer import command
from scripts.dev.bench_transfer.copying import PlainCopy
from scripts.dev.bench_transfer.machine import set_ucx
from scripts.dev.bench_transfer.measures import latency
from scripts.dev.bench_transfer.ours import layout_of
from scripts.dev.bench_transfer.plan import (
    CONTIGUOUS,
    FULL,
    KIB,
    LAYERS,
    MIB,
    NUM_LAYERS,
    QUICK,
    SCATTERED,
    SERIAL,
    Case,
    order,
)
from scripts.dev.bench_transfer.plot import plot
from scripts.dev.bench_transfer.processes import Children
from scripts.dev.bench_transfer.report import Findings, OnMemory, make_lines, make_report, make_table, shortfalls
from scripts.dev.bench_transfer.samples import Measured, Sample, Timed, p99
from scripts.dev.bench_transfer.slab import checksum, fill
from scripts.dev.bench_transfer.stage import Stage, span
from scripts.dev.common.errors import BenchError
from transfer.memory.buffer import PagedBuffer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench_transfer.py"
CASE = Case(64 * KIB, CONTIGUOUS, SERIAL, 1, 64 * MIB)
PATIENCE_S = 20.0


class TestConversation:
    def test_a_turn_sends_what_is_new(self, tmp_path: Path) -> None:
        """Without the decoder's prefix cache it sends the whole prompt, every time."""
        result = subprocess.run(
            [sys.executable, SCRIPT, "--conversation", "--seed", "1", "--json", tmp_path / "found.json"],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert result.returncode == 0, result.stderr
        found = json.loads((tmp_path / "found.json").read_text())["conversation"]
        for turn in found["without"]:
            assert (turn["sent_pages"], turn["cached_pages"]) == (turn["prompt_pages"], 0)
        for turn in found["with"]:
            assert turn["sent_pages"] + turn["cached_pages"] == turn["prompt_pages"]
            assert (turn["cached_pages"] == 0) == (turn["turn"] == 1)
        assert found["with"][-1]["sent_pages"] < found["without"][-1]["sent_pages"] / 5
        assert "turn 6:  224 pages of prompt" in result.stdout

    def test_it_is_not_drawn(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(command.app, ["--conversation", "--plot", str(tmp_path / "x.png")])
        assert (result.exit_code, "not drawn" in result.output) == (2, True)


class TestBusy:
    def test_both_kinds_of_data_plane_are_measured(self) -> None:
        """The figures are all that stdout gets."""
        result = subprocess.run(
            [sys.executable, SCRIPT, "--busy", "--rounds", "1", "--json"],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)["busy"]
        for kind in ("thread", "process"):
            assert all(len(found[kind][f"{name}_ms"]) == 1 for name in ("idle", "busy", "elsewhere"))
            assert found[kind]["ratio"] > 0
            assert f"data plane as a {kind}: " in result.stderr

    def test_one_at_a_time(self) -> None:
        result = CliRunner().invoke(command.app, ["--conversation", "--busy"])
        assert (result.exit_code, "one at a time" in result.output) == (2, True)


class TestPlan:
    @pytest.mark.parametrize("plan", [FULL, QUICK])
    def test_every_case_can_be_cut_into_its_pages(self, plan: Any) -> None:
        assert len(set(plan.cases)) == len(plan.page_sizes) * 4 * len(plan.senders)
        for case in plan.cases:
            assert case.pages_per_sender * case.senders * case.page_bytes == plan.total_bytes
            assert layout_of(case.page_bytes, NUM_LAYERS).page_bytes == case.page_bytes
        page_bytes = plan.layered_bytes // plan.layered_pages
        assert layout_of(page_bytes, plan.layered_layers).page_bytes == page_bytes

    def test_the_full_one_covers_what_is_promised(self) -> None:
        assert (FULL.page_sizes[0], FULL.page_sizes[-1]) == (16 * KIB, 8 * MIB)
        assert FULL.senders == (1, 2, 4)
        assert (FULL.layered_bytes, FULL.layered_layers) == (256 * MIB, 32)

    def test_scattered_pages_hang_on_the_seed_and_the_sender_alone(self) -> None:
        first, again = order(SCATTERED, 100, 7, 0), order(SCATTERED, 100, 7, 0)
        assert first.pairs() == again.pairs()
        assert sorted(first.ordinals) == sorted(first.local_pages) == list(range(100))
        assert first.pairs() != order(SCATTERED, 100, 8, 0).pairs()
        assert first.pairs() != order(SCATTERED, 100, 7, 1).pairs()
        assert (np.diff(first.local_pages) == 1).sum() < 10
        assert order(CONTIGUOUS, 3, 7, 0).pairs() == [(0, 0), (1, 1), (2, 2)]

    def test_a_page_that_no_layers_fit_into(self) -> None:
        with pytest.raises(ValueError, match="1000 bytes are no page of 8 layers"):
            layout_of(1000, 8)


class TestSlab:
    def test_the_checksum_tells_pages_orders_and_seeds_apart(self) -> None:
        slab, other = PagedBuffer(4, 4096), PagedBuffer(4, 4096)
        fill(slab, 1)
        fill(other, 2)
        ascending, swapped = np.array([0, 1]), np.array([1, 0])
        assert checksum(slab, ascending) == checksum(slab, ascending)
        sums = [checksum(slab, ascending), checksum(slab, swapped), checksum(other, ascending)]
        assert len(set(sums)) == 3

    @pytest.mark.parametrize("by_layer", [False, True])
    @pytest.mark.parametrize("layout", [CONTIGUOUS, SCATTERED])
    def test_the_plain_copy_puts_every_page_where_it_belongs(self, layout: str, by_layer: bool) -> None:
        copy = PlainCopy(6, 64, "cpu", 8)
        fill(copy.source, 3)
        where = order(layout, 6, 5, 0)
        copy.prepare(layout, where, by_layer=by_layer)
        copy.copy()
        for ordinal, page in where.pairs():
            assert copy.target.pages[ordinal].equal(copy.source.pages[page])


def measured(ours: list[float], nixl: list[float], case: Case = CASE) -> Measured:
    samples = [[Sample(seconds, 0.5 * seconds, 0.25 * seconds) for seconds in times] for times in (ours, nixl)]
    return Measured(case, samples[0], samples[1], [Sample(0.01, 0.01) for _ in ours])


def findings(*cases: Measured, **parts: Any) -> Findings:
    machine = {"cores": 2, "cpu": "a CPU", "gpu": None, "nixl": "1", "torch": "2", "python": "3"}
    machine |= {"copy_gb_s": 10.0, "busy_elsewhere_cores": 0.25}
    device = OnMemory("DRAM", list(cases), **parts)
    return Findings(QUICK, 7, "2026-01-01T00:00:00+00:00", machine, {"UCX_TLS": "tcp"}, [device])


class TestReport:
    def test_ratios_are_taken_round_by_round(self) -> None:
        # A slow machine in the second round: medians of rates would say 2/3, the rounds say 1/2.
        report = make_report(findings(measured([0.2, 0.6, 0.2], [0.1, 0.3, 0.15])), is_complete=True)
        (row,) = report["rows"]
        assert row["ratio_to_nixl"] == pytest.approx(0.5)
        assert row["by_round"]["ratio_to_nixl"] == pytest.approx([0.5, 0.5, 0.75])
        assert row["gb_s"] == pytest.approx(CASE.total_bytes / 1e9 / 0.2)
        assert row["ratio_to_copy"] == pytest.approx(0.05)
        assert (row["page_bytes"], row["pages"], row["layout"], row["rounds"]) == (65536, 1024, CONTIGUOUS, 3)

    def test_cpu_is_that_of_both_ends(self) -> None:
        (row,) = make_report(findings(measured([0.2], [0.1])), is_complete=True)["rows"]
        assert row["sender_cpu_s_per_gb"] == pytest.approx(0.1 * 1e9 / CASE.total_bytes)
        assert row["cpu_s_per_gb"] == pytest.approx(0.15 * 1e9 / CASE.total_bytes)
        assert row["nixl_cpu_s_per_gb"] == pytest.approx(0.075 * 1e9 / CASE.total_bytes)

    def test_what_falls_short_is_said(self) -> None:
        idle = {"seconds": 1.0, "sender_percent": 0.2, "receiver_percent": 1.5}
        small = latency([300.0], [100.0], [50.0], 65536)
        layers = {"bytes": 256 * MIB, "layers": 32, "exposed_ms": 5.0, "exposed_layers": 2.5, "at_end_ms": 64.0}
        slow = measured([0.2], [0.1]), measured([0.2], [0.1], Case(16 * KIB, SCATTERED, LAYERS, 1, 64 * MIB))
        report = make_report(findings(*slow, latency=small, layerwise=layers, idle=idle), is_complete=True)
        assert shortfalls(report) == [
            "1 of 1 cases with pages of 64 KiB and more are below 0.95 of bare NIXL's GB/s; "
            "the lowest is 0.50 (64 KiB contiguous, whole pages, 1 sender, DRAM)",
            "a small push takes 200 µs more than over bare NIXL, not 150",
            "layer by layer, 2.50 layers' time is not hidden",
            "an idle receiver uses 1.50 % of a core",
        ]
        assert len(make_table(report).rows) == 2
        text = "\n".join(make_lines(report))
        assert "added 200 µs (p99 200); with the reservation 250 µs" in text
        assert "UCX_TLS=tcp" in text

    def test_an_interrupted_run_has_something_to_tell(self) -> None:
        report = make_report(findings(), is_complete=False)
        assert (report["rows"], report["latency"], report["is_complete"]) == ([], None, False)
        assert not shortfalls(report)
        assert make_lines(report)
        json.dumps(report)

    def test_a_gpu_has_rows_and_figures_of_its_own(self) -> None:
        found = findings(measured([0.1], [0.1]))
        found.devices.append(OnMemory("VRAM", [measured([0.1], [0.1])], idle={"seconds": 1.0}))
        report = make_report(found, is_complete=True)
        assert [row["memory"] for row in report["rows"]] == ["DRAM", "VRAM"]
        assert report["vram"]["idle"] == {"seconds": 1.0}
        assert report["idle"] is None

    def test_what_is_added_is_taken_push_by_push(self) -> None:
        figures = latency([110.0, 220.0, 130.0], [100.0, 200.0, 100.0], [1.0, 2.0, 3.0], 65536)
        assert figures["added_us_median"] == 20.0
        assert figures["added_us_p99"] == 30.0
        assert figures["added_with_reservation_us_median"] == 22.0

    def test_p99(self) -> None:
        assert p99(list(range(1, 101))) == 99
        assert p99([5.0]) == 5.0


class TestMachine:
    def test_the_users_settings_stay(self) -> None:
        environment = {"UCX_TLS": "rc", "HOME": "/"}
        assert set_ucx(environment, has_gpu=True) == {"UCX_TLS": "rc", "UCX_NET_DEVICES": "lo"}
        assert set_ucx({}, has_gpu=True)["UCX_TLS"] == "tcp,sm,self,cuda_copy,cuda_ipc"


class Scripted:
    """A child that answers from a table."""

    def __init__(self, **answers: Any) -> None:
        self.name = "sender 1"
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []

    async def ask(self, command: str, *arguments: Any) -> Any:
        self.asked.append((command, *arguments))
        return self.answers.get(command)


class TestStage:
    LAP: ClassVar = {"started": 1.0, "ended": 3.0, "cpu_s": 0.5}

    def stage(self, arrived: int) -> Stage:
        receiver: Any = Scripted(lay_out=["host", 1], checksum=arrived, cpu=2.0, pages=[4, 5])
        sender: Any = Scripted(checksum=77, open=self.LAP, send=self.LAP, send_bare=self.LAP)
        copier: Any = Scripted(copy=self.LAP)
        return Stage(Children(receiver, [sender], copier), 3)

    async def test_other_bytes_than_were_sent_end_the_run(self) -> None:
        stage = self.stage(arrived=78)
        await stage.prepare(CASE)
        with pytest.raises(BenchError, match="our transfer did not deliver what sender 1 sent"):
            await stage.check()

    async def test_bare_nixl_writes_into_the_pages_that_ours_was_granted(self) -> None:
        stage = self.stage(arrived=77)
        await stage.prepare(CASE)
        await stage.check()
        sender: Any = stage.senders[0]
        assert ("prepare_bare", [4, 5]) in sender.asked

    async def test_reserving_costs_cpu_but_not_time(self) -> None:
        stage = self.stage(arrived=77)
        await stage.prepare(CASE)
        sample, reserving = await stage.ours()
        assert sample == Sample(2.0, 1.0, 0.0)
        assert [lap.seconds for lap in reserving] == [2.0]

    def test_a_transfer_by_several_lasts_from_the_first_to_the_last(self) -> None:
        assert span([Timed(1.0, 3.0, 0.0), Timed(2.0, 5.0, 0.0)]) == 4.0


class TestPicture:
    def test_it_is_refused_before_anything_is_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(command, "can_plot", lambda: False)
        monkeypatch.setattr(command, "exit_status", lambda *args: pytest.fail("it measures"))
        result = CliRunner().invoke(command.app, ["--plot", "x.png"], env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert "pip install 'pdproxy[bench]'" in result.output

    def test_a_panel_for_each_kind_and_a_line_for_each_target(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: list[tuple[int, list[int], list[float], str]] = []
        saved: list[Path] = []

        class Axes:
            def __init__(self, index: int) -> None:
                self.index = index

            def plot(self, pages: list[int], rates: list[float], style: str, label: str) -> None:
                drawn.append((self.index, pages, rates, label))

            def __getattr__(self, name: str) -> Any:
                return lambda *args, **options: None

        class Figure:
            def __init__(self, **options: Any) -> None: ...

            def subplots(self, lines: int, columns: int, squeeze: bool) -> list[list[Axes]]:
                return [[Axes(line * columns + column) for column in range(columns)] for line in range(lines)]

            def suptitle(self, text: str) -> None: ...

            def savefig(self, path: Path, dpi: int) -> None:
                saved.append(path)

        library: Any = ModuleType("matplotlib.figure")
        library.Figure = Figure
        monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
        monkeypatch.setitem(sys.modules, "matplotlib.figure", library)
        big = Case(MIB, CONTIGUOUS, SERIAL, 1, 64 * MIB)
        report = make_report(findings(measured([0.1], [0.1]), measured([0.2], [0.1], big)), is_complete=True)
        plot(report, Path("x.png"))
        assert saved == [Path("x.png")]
        assert [line for line in drawn if line[1]] == [
            (0, [64 * KIB, MIB], [row[key] for row in report["rows"]], label)
            for key, label in (("gb_s", "ours"), ("nixl_gb_s", "bare NIXL"), ("copy_gb_s", "torch copy"))
        ]


@pytest.fixture
def deadline_s() -> float:
    """A lifetime that no other process of this machine has: its children are told by it."""
    return 100 + (os.getpid() * 1000 + time.monotonic_ns() % 1000) / 1e9


def start(deadline_s: float, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, str(SCRIPT), "--quick", "--rounds", "1", "--deadline-s", repr(deadline_s), *options]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")


def children_of(deadline_s: float) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # gone meanwhile
        if "scripts.dev.bench_transfer.peer" in text and text.split()[-1] == str(deadline_s + 30.0):
            found.append(text)
    return found


@pytest.fixture
def bench(deadline_s: float, tmp_path: Path) -> Iterator[SimpleNamespace]:
    process = start(deadline_s, "--seed", "7", "--json", str(tmp_path / "report.json"))
    yield SimpleNamespace(process=process, json=tmp_path / "report.json")
    process.kill()
    process.communicate()


def wait_for(bench: SimpleNamespace, word: str) -> None:
    for line in bench.process.stderr:
        if word in line:
            return
    pytest.fail(f"it ended before it said {word!r}")


@pytest.mark.engine
def test_a_quick_run(bench: SimpleNamespace, deadline_s: float) -> None:
    output, errors = bench.process.communicate(timeout=120)
    print(output)
    assert bench.process.returncode == 0, errors
    report = json.loads(bench.json.read_text())
    assert (report["is_complete"], report["seed"], report["rounds"]) == (True, 7, 1)
    kinds = [(r["page_bytes"], r["layout"], r["mode"], r["senders"]) for r in report["rows"] if r["memory"] == "DRAM"]
    assert kinds == [(c.page_bytes, c.layout, c.mode, c.senders) for c in QUICK.cases]
    for row in report["rows"]:
        assert row["pages"] * row["page_bytes"] == row["bytes"]
        assert all(row[name] > 0 for name in ("gb_s", "ratio_to_nixl", "ratio_to_copy", "cpu_s_per_gb"))
    assert report["latency"]["pushes"] == QUICK.pushes
    assert report["layerwise"]["layers"] == QUICK.layered_layers
    assert report["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert "ours/NIXL" in output
    assert not children_of(deadline_s)


@pytest.mark.engine
def test_ctrl_c_ends_every_process_and_writes_what_is_known(bench: SimpleNamespace, deadline_s: float) -> None:
    wait_for(bench, "idle")
    assert len(children_of(deadline_s)) == 2 + max(QUICK.senders)
    bench.process.send_signal(signal.SIGINT)
    bench.process.communicate(timeout=PATIENCE_S)
    assert bench.process.returncode == 128 + signal.SIGINT
    report = json.loads(bench.json.read_text())
    assert (report["is_complete"], report["rows"]) == (False, [])
    assert not children_of(deadline_s)


@pytest.mark.engine
def test_a_process_ends_with_its_input_as_when_its_parent_was_killed() -> None:
    words = [sys.executable, "-m", "scripts.dev.bench_transfer.peer", "copier", "cpu", "60"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b'["cpu"]\n["nonsense"]\n')
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["value"] > 0
        assert "nonsense" in json.loads(child.stdout.readline())["error"]
        child.stdin.close()
        assert child.wait(PATIENCE_S) == 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
