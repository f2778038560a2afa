"""The module is the benchmark's command line: it takes options, and gives a table, a JSON file, a picture and figures
for documents."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pdproxy.config.options import Json, option
from scripts.dev.bench_proxy import cliff_words
from scripts.dev.bench_proxy.cliffs import LARGE as ALL
from scripts.dev.bench_proxy.cliffs import SMALL as FEW
from scripts.dev.bench_proxy.cliffs import measure_cliffs, pick_axes
from scripts.dev.bench_proxy.failover import LARGE, SMALL, Size, measure_failover
from scripts.dev.bench_proxy.failover import make_table as make_failover_table
from scripts.dev.bench_proxy.machine import describe, version_of_python
from scripts.dev.bench_proxy.markdown import fill
from scripts.dev.bench_proxy.native import why_not_compiled
from scripts.dev.bench_proxy.plan import FULL, LONG, QUICK, Scenario, pick
from scripts.dev.bench_proxy.plot import plot
from scripts.dev.bench_proxy.report import Findings, make_report, merge
from scripts.dev.bench_proxy.run import measure
from scripts.dev.bench_proxy.targets import OTHER_PYTHON, OURS, Peer, choose
from scripts.dev.bench_proxy.words import goal_lines, make_lines, make_table, warnings
from scripts.dev.common.outcome import NO_MATPLOTLIB, can_plot, exit_status, show
from transfer.command_line.commands import Command
from transfer.command_line.json_file import console_beside, write_json
from transfer.descriptors import raise_limit

app = typer.Typer(add_completion=False, rich_markup_mode=None)
ROUNDS, QUICK_ROUNDS, FAILOVER_ROUNDS = 5, 1, 3
INTERPRETED_WORD = "interpreted"
EARLIER_WORD = "earlier="
PYTHON_WORD = "python="
MEASURED = "What is measured"
PEERS = (
    "Others to measure, each as NAME or NAME=COMMAND: vllm-router,sglang-router,smg; interpreted: pdproxy once more, "
    "not compiled; earlier=FOLDER: another checkout of pdproxy; python=COMMAND: pdproxy once more, by another "
    "Python of the same version"
)
CLIFFS = (
    "Instead: what a request costs as the fleet, the line, the models, the streams, the headers and the body grow; "
    "--scenarios names some of them"
)
FAILOVER = (
    "Instead: how long requests are held up when an engine freezes; takes --rounds, --quick, --json and --log-dir"
)
EARLIER = "Measure nothing: take what these JSON files tell, separated by commas; the last one's where two do"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@app.command(cls=Command)
def main(
    peers: Annotated[str, option("NAMES", PEERS, group=MEASURED)] = "",
    scenarios: Annotated[str, option("NAMES", "Only these, or those whose names begin so: short,staggered-512")] = "",
    rounds: Annotated[
        int | None, option("N", "Rounds per scenario [default: 5; 1 with --quick; 3 with --failover]", min=1)
    ] = None,
    workers: Annotated[
        int, option("N", "Measure pdproxy once more, with so many processes; the CPU of all counts", min=1)
    ] = 1,
    quick: Annotated[bool, option(None, "Two tiny scenarios, to see whether it works at all", "--quick")] = False,
    is_failover: Annotated[bool, option(None, FAILOVER, "--failover")] = False,
    has_cliffs: Annotated[bool, option(None, CLIFFS, "--cliffs")] = False,
    ids: Annotated[
        bool, option(None, "Engines tell a prompt's token ids where asked to, as vLLM does", "--ids/--no-ids")
    ] = True,
    is_compiled: Annotated[
        bool,
        option(None, "Make C extensions of pdproxy's hot modules, where that can be had", "--compile/--no-compile"),
    ] = True,
    earlier: Annotated[str, option("FILES", EARLIER, "--from")] = "",
    json_file: Json = None,
    plot_file: Annotated[Path | None, option("FILE", "Picture of the figures (.png, .svg, .pdf)", "--plot")] = None,
    documents: Annotated[
        list[Path] | None,
        option("FILE", "Document with places for figures, which are filled in; repeatable", "--markdown"),
    ] = None,
    log_dir: Annotated[
        Path | None, option("FOLDER", "Folder for the logs of all processes [default: a temporary one]")
    ] = None,
) -> None:
    """Measure what the proxy costs per request and per token and how much later tokens come, beside others of its
    kind.

    Everything runs on this machine: engines that compute nothing, clients, and one proxy after the other on a core of
    its own. A round in which other processes are busy is thrown away and repeated.
    """
    if is_failover:
        if peers or scenarios or earlier or plot_file or documents:
            raise typer.BadParameter("takes only --rounds, --quick, --json and --log-dir", param_hint="--failover")
        try:
            raise typer.Exit(_failover(SMALL if quick else LARGE, rounds or FAILOVER_ROUNDS, json_file, log_dir))
        except OSError as error:
            raise typer.BadParameter(str(error)) from None
    if plot_file is not None and not can_plot():
        raise typer.BadParameter(NO_MATPLOTLIB, param_hint="--plot")
    status = 0
    try:
        if has_cliffs:
            if peers or rounds or workers > 1:
                raise typer.BadParameter("takes no --peers, --rounds and --workers", param_hint="--cliffs")
            names = pick_axes(_names(scenarios))
            found = (
                _earlier(earlier)
                if earlier
                else _cliffs(names, is_compiled=is_compiled, is_quick=quick, log_dir=log_dir)
            )
            raise typer.Exit(_tell_cliffs(found, json_file, plot_file, documents or []))
        if earlier:
            report = merge([json.loads(Path(name).read_text()) for name in _names(earlier)])
        else:
            chosen = pick(QUICK if quick else FULL, _names(scenarios), () if quick else LONG)
            status, report = _measure(
                chosen,
                _names(peers),
                rounds,
                is_quick=quick,
                has_ids=ids,
                is_compiled=is_compiled,
                num_workers=workers,
                log_dir=log_dir,
            )
        _write(report, json_file, plot_file, documents or [])
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    _show(report, console_beside(json_file))
    raise typer.Exit(status or int(_is_failed(report)))


def _measure(
    chosen: tuple[Scenario, ...],
    words: list[str],
    rounds: int | None,
    *,
    is_quick: bool,
    has_ids: bool,
    is_compiled: bool,
    num_workers: int,
    log_dir: Path | None,
) -> tuple[int, dict[str, Any]]:
    """Measures, and returns the exit status and what was found. `words` name the peers. Raises `ValueError` for an
    unknown name."""
    console = Console(stderr=True)
    earlier = [Path(word.removeprefix(EARLIER_WORD)) for word in words if word.startswith(EARLIER_WORD)]
    for checkout in earlier:
        if not (checkout / "pdproxy").is_dir():
            raise ValueError(f"there is no pdproxy in {checkout}")
    python = next((word.removeprefix(PYTHON_WORD) for word in reversed(words) if word.startswith(PYTHON_WORD)), None)
    other_versions = {} if python is None else {OTHER_PYTHON: version_of_python(python)}
    peers, missing = choose(
        [word for word in words if word != INTERPRETED_WORD and not word.startswith((EARLIER_WORD, PYTHON_WORD))]
    )
    if is_compiled and (why := why_not_compiled()) is not None:
        is_compiled = False
        missing.append(f"compiling pdproxy: {why}")
    show(console, [f"skipping {why}" for why in missing], style="bold yellow")
    findings = Findings(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe(peers, other_versions, is_compiled=is_compiled),
        rounds=rounds or (QUICK_ROUNDS if is_quick else ROUNDS),
        has_ids=has_ids,
        missing=missing,
        has_interpreted=INTERPRETED_WORD in words,
        earlier=earlier[-1] if earlier else None,
        python=python,
        num_workers=num_workers,
    )
    raise_limit()
    with tempfile.TemporaryDirectory(prefix="pdproxy-bench-") as folder:
        status = _run(
            findings, chosen, peers, 0 if is_quick else (findings.rounds + 1) // 2, log_dir, Path(folder), console
        )
    return status, make_report(findings, is_complete=status == 0)


def _write(report: dict[str, Any], json_file: Path | None, plot_file: Path | None, documents: list[Path]) -> None:
    write_json(json_file, report)
    if plot_file is not None and report["rows"]:
        plot(report, plot_file)
    for document in documents:
        document.write_text(fill(document.read_text(), report))


def _is_failed(report: dict[str, Any]) -> bool:
    """Tells whether pdproxy could not be measured, went wrong or skipped what it is there for."""
    rows = [row for row in report["rows"] if row["target"] == OURS]
    return any(one["target"] == OURS for one in report["failures"]) or any(
        row["errors"] or row["is_disqualified"] for row in rows
    )


def _run(
    findings: Findings,
    chosen: tuple[Scenario, ...],
    peers: list[Peer],
    spare: int,
    log_dir: Path | None,
    work: Path,
    console: Console,
) -> int:
    """Measures, and returns the exit status, as `exit_status` does."""
    run = measure(
        chosen,
        peers,
        rounds=findings.rounds,
        spare_rounds=spare,
        has_ids=findings.has_ids,
        is_compiled=findings.machine["compiled"],
        has_interpreted=findings.has_interpreted,
        earlier=findings.earlier,
        python=findings.python,
        num_workers=findings.num_workers,
        logs=log_dir or work / "logs",
        work=work,
        found=findings.measured,
        tell=lambda text: show(console, [text]),
    )
    return exit_status(run, console)


def _earlier(files: str) -> dict[str, Any]:
    """Returns the cliffs that these files tell, the last one's where two have the same."""
    reports = [json.loads(Path(name).read_text()) for name in _names(files)]
    rows = {(row.get("axis"), row.get("size"), row.get("what")): row for report in reports for row in report["rows"]}
    last: dict[str, Any] = reports[-1]
    return last | {"rows": list(rows.values())}


def _cliffs(names: Sequence[str], *, is_compiled: bool, is_quick: bool, log_dir: Path | None) -> dict[str, Any]:
    """Measures the cliffs, and returns what was found."""
    console, rows = Console(stderr=True), list[dict[str, Any]]()
    raise_limit()
    is_compiled = is_compiled and why_not_compiled() is None
    with tempfile.TemporaryDirectory(prefix="pdproxy-bench-") as folder:
        work = measure_cliffs(
            names,
            FEW if is_quick else ALL,
            is_compiled=is_compiled,
            logs=log_dir or Path(folder, "logs"),
            work=Path(folder),
            rows=rows,
            tell=lambda text: show(console, [text]),
        )
        status = exit_status(work, console)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "is_complete": status == 0,
        "machine": describe(is_compiled=is_compiled),
        "rows": rows,
    }


def _tell_cliffs(report: dict[str, Any], json_file: Path | None, plot_file: Path | None, documents: list[Path]) -> int:
    """Shows and writes down the cliffs. Returns the exit status."""
    write_json(json_file, report)
    if plot_file is not None and report["rows"]:
        cliff_words.plot(report, plot_file)
    for document in documents:
        document.write_text(fill(document.read_text(), report))
    cliff_words.make_table(report).print_to(console_beside(json_file))
    return int(not report["is_complete"] or cliff_words.is_wrong(report))


def _failover(size: Size, rounds: int, json_file: Path | None, log_dir: Path | None) -> int:
    """Measures the failover, and returns the exit status: 1 where a request failed as well."""
    console, rows = Console(stderr=True), list[dict[str, Any]]()

    def tell(text: str) -> None:
        show(console, [text])

    tell(f"the proxy runs with {' '.join(size.options)}, else with its defaults")
    with tempfile.TemporaryDirectory(prefix="pdproxy-bench-") as folder:
        status = exit_status(measure_failover(size, rounds, log_dir or Path(folder), rows, tell), console)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe(),
        "rounds": rounds,
        "size": asdict(size),
        "options": size.options,
        "rows": rows,
    }
    write_json(json_file, report)
    if rows:
        make_failover_table(rows).print_to(console_beside(json_file))
    for row in rows:
        if row["failed"]:
            tell(f"{row['frozen']} frozen, {row['answers']}: {row['failed']} failed: {row['complaint']}")
    return status or int(any(row["failed"] for row in rows))


def _show(report: dict[str, Any], console: Console) -> None:
    make_table(report).print_to(console)
    show(console, [*make_lines(report), *goal_lines(report)])
    show(console, warnings(report), style="yellow")
