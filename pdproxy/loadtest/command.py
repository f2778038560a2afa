"""The module is the command line of ``pdproxy loadtest``: it takes options, and gives a table, files, a page and an
exit status."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pdproxy.config import options as take
from pdproxy.config.options import FILES, LENGTHS, argument, option, words
from pdproxy.launch.errors import Interrupted, LaunchError
from pdproxy.loadtest import choices
from pdproxy.loadtest.conduct import Outcome, Plan, conduct
from pdproxy.loadtest.errors import LoadTestError
from pdproxy.loadtest.fault_schedule import Fault
from pdproxy.loadtest.faults import parse_faults
from pdproxy.loadtest.generator_health import LATE_LIMIT_S
from pdproxy.loadtest.local_cluster import TESTED, ClusterOptions
from pdproxy.loadtest.record import RunFileError
from pdproxy.loadtest.report.files import write_figures, write_page
from pdproxy.loadtest.report.sides import Side, read_sides, slo_of
from pdproxy.loadtest.report.terminal import show
from pdproxy.loadtest.slo import Slo
from pdproxy.loadtest.sweep import Search
from pdproxy.loadtest.target import USUAL_EXTRA, Endpoint, Target
from pdproxy.loadtest.workload import Departure, Replay, Workload
from transfer.command_line.commands import Command, Group, takes
from transfer.command_line.json_file import console_beside
from transfer.descriptors import raise_limit

app = typer.Typer(cls=Group, add_completion=False, rich_markup_mode=None, no_args_is_help=True)
DISTRUSTED = 3
"""The exit status when the generator was late, so that its figures are not to be quoted."""
UNANSWERED = 4
"""The exit status when no request that counts was answered to its end."""
UNMET = 5
"""The exit status when no rate of a sweep met the target."""
FORESEEN = (LoadTestError, RunFileError, LaunchError, OSError)
EXTRA = 'JSON object with further members of every request; null removes one of {"temperature": 0, "ignore_eos": true}'


@app.callback()
def _commands() -> None:
    """Measure any address that speaks OpenAI's API, with prefill and decode told apart."""


@app.command("run", cls=Command)
@takes(cluster=ClusterOptions, pace=choices.PaceOptions)
def run_test(
    url: Annotated[str | None, argument("URL", "Address to test, as http://host:port; or --cluster", TESTED)] = None,
    *,
    cluster: ClusterOptions,
    model: Annotated[str | None, option("NAME", "Name of the model in the API [default: its first]")] = None,
    endpoint: Annotated[Endpoint, option(None, "Endpoint that is asked")] = "completions",
    api_key: Annotated[str | None, option("KEY", "API key of the address", envvar="OPENAI_API_KEY")] = None,
    header: Annotated[list[str] | None, option("NAME:VALUE", "Header of every request; repeatable")] = None,
    timeout: Annotated[float, option("SECONDS", "Longest time for one request", min=0.1)] = 600.0,
    pace: choices.PaceOptions,
    trace: take.Trace = None,
    trace_limit: Annotated[int | None, option("N", "Rows of the trace that are used [default: all]", min=1)] = None,
    speed: Annotated[float, option("FACTOR", "Factor by which the trace is replayed faster")] = 1.0,
    scale: Annotated[float, option("FACTOR", "Factor by which the trace's lengths are multiplied")] = 1.0,
    requests: Annotated[int | None, option("N", "Number of requests in all", min=1)] = None,
    duration: Annotated[
        float | None, option("SECONDS", "Length of the test, or of each --sweep rate [default: 60, or --requests]")
    ] = None,
    warmup: Annotated[float, option("SECONDS", "Time at the start, of each --sweep rate, that does not count")] = 0.0,
    seed: take.Seed = None,
    prompt: take.PromptLengths = "256",
    answer: take.AnswerLengths = "64",
    lengths_from: Annotated[str | None, option("PATH", "Trace whose lengths replace --prompt and --answer")] = None,
    max_prompt: Annotated[int | None, option("N", "Most tokens of a prompt; longer ones are cut")] = None,
    max_answer: Annotated[int | None, option("N", "Most tokens of an answer; longer ones are cut")] = None,
    token_ids: Annotated[str | None, option("FIRST:LAST", "Ids of which prompts are made [default: words]")] = None,
    extra: Annotated[str | None, option("JSON", EXTRA)] = None,
    stream_share: Annotated[float, option("SHARE", "Share of the requests that are streamed, 0 to 1")] = 1.0,
    prefix_groups: Annotated[int | None, option("N", "Number of texts, with one of which each prompt begins")] = None,
    prefix_tokens: Annotated[int, option("N", "Tokens of each of the --prefix-groups")] = 128,
    turns: Annotated[str | None, option("LENGTHS", f"Turns of a conversation: {LENGTHS} [default: one]")] = None,
    message: Annotated[str, option("LENGTHS", f"Tokens of each later turn: {LENGTHS}")] = "uniform:16,64",
    turn_think: Annotated[float, option("SECONDS", "Mean time before a conversation's next turn")] = 1.0,
    questions: Annotated[int | None, option("N", "Number of different questions, whose answers must agree")] = None,
    faults: take.FaultsText = "",
    abort_share: Annotated[float, option("SHARE", "Share of the requests, 0 to 1, whose client leaves early")] = 0.0,
    abort_phases: Annotated[str, option("PHASES", f"Phases where clients leave [default: {','.join(Departure)}]")] = "",
    slo: take.SloText = "",
    sweep: Annotated[bool, option(None, "Find the highest rate that meets --slo, from --rate", "--sweep")] = False,
    max_rate: Annotated[float, option("RATE", "Highest rate that --sweep tries")] = 4096.0,
    precision: Annotated[float, option("SHARE", "Share of the found rate to which --sweep is exact")] = 0.05,
    max_runs: Annotated[int, option("N", "Most rates that --sweep tries", min=1)] = 16,
    late_limit: Annotated[float, option("SECONDS", "Lateness of the generator (p99) that is too much")] = LATE_LIMIT_S,
    label: Annotated[
        str | None, option("NAME", "Name in the report [default: the cluster or URL]", group=FILES)
    ] = None,
    out: Annotated[Path | None, option("FOLDER", "Folder for all that is written [default: loadtest-TIME]")] = None,
    json_file: take.Json = None,
) -> None:
    """Ask, measure, and write it down: every request, the figures, and a page with pictures.

    Latencies count from when a request was due. Ctrl-C ends it, and what was measured is written. Exit status 3: the
    generator was late, so that its figures are not to be quoted. Exit status 4: no request was answered. Exit status 5:
    no rate of a sweep met the target.
    """
    console = Console(stderr=True)
    with _told(console):
        if (url is None) == (not cluster.what):
            raise LoadTestError("give an address, or --cluster to start what is to be tested")
        seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
        console.print(f"seed {seed}", highlight=False)
        replay = None if trace is None else Replay(rows=choices.rows(trace, trace_limit), speed=speed, scale=scale)
        workload = Workload(
            seed=seed,
            pace=pace.of(replay),
            sizes=choices.sizes(prompt, answer, lengths_from),
            num_requests=requests,
            duration_s=60.0 if duration is None and requests is None and trace is None else duration,
            warmup_s=warmup,
            stream_share=stream_share,
            prefixes=choices.prefixes(prefix_groups, prefix_tokens),
            conversations=choices.conversations(turns, message, turn_think),
            aborts=choices.aborts(abort_share, abort_phases),
            num_questions=questions,
            max_prompt_tokens=max_prompt,
            max_answer_tokens=max_answer,
        )
        target = partial(
            Target,
            endpoint=endpoint,
            token_ids=choices.token_ids(token_ids),
            api_key=api_key,
            headers=choices.headers(header or ()),
            extra=choices.extra(extra, USUAL_EXTRA),
            timeout_s=timeout,
        )
        plan = Plan(
            workload=workload,
            target=target,
            url=url,
            model=model,
            api_key=api_key,
            slo=Slo.parse(slo),
            slo_words=slo,
            search=_search(pace.rate, max_rate, precision, max_runs) if sweep else None,
            cluster=replace(
                cluster,
                engine_args=words("--engine-args", cluster.engine_args, LoadTestError),
                proxy_args=words("--proxy-args", cluster.proxy_args, LoadTestError),
            )
            if cluster.what
            else None,
            faults=_faults(faults, workload, is_sweep=sweep),
            label=label or cluster.what or url or "",
            folder=out or Path(f"loadtest-{datetime.now(UTC):%Y%m%d-%H%M%S}"),
            late_limit_s=late_limit,
        )
        raise typer.Exit(_run(plan, console, json_file))


@app.command(cls=Command)
def compare(
    paths: Annotated[list[str], argument("PATH", "File of a run, or folder of a run or sweep; or LABEL=PATH", FILES)],
    html: Annotated[Path, option("FILE", "File for the page")] = Path("comparison.html"),
    json_file: take.Json = None,
    slo: Annotated[str | None, option("TARGET", f"{take.SLO} [default: the first run's]", group=take.JUDGED)] = None,
) -> None:
    """Compare runs that were measured earlier, side by side and on the same axes."""
    console = Console(stderr=True)
    with _told(console):
        sides = read_sides(paths)
        target = slo_of(sides) if slo is None else Slo.parse(slo)
        write_page(html, sides, target)
        if json_file is not None:
            write_figures(json_file, sides, target)
        show(sides, target, console_beside(json_file))
        console.print(f"wrote {html}", highlight=False)
        is_trusted = all(run.health.is_trusted for side in sides for run in side.runs)
        raise typer.Exit(0 if is_trusted else DISTRUSTED)


def _run(plan: Plan, console: Console, json_file: Path | None) -> int:
    """Conducts the test and returns the exit status. Whatever ends the test, this function shows what was measured; by
    then it has been written."""
    outcome = Outcome(Side(plan.label, ()))
    raise_limit()
    try:
        asyncio.run(conduct(plan, outcome, console))
    except (Interrupted, asyncio.CancelledError, KeyboardInterrupt) as stop:
        console.print("stopped" if not isinstance(stop, Interrupted) else str(stop))
        outcome.signum = outcome.signum or 2
    finally:
        if outcome.side.runs:
            if json_file is not None:
                write_figures(json_file, [outcome.side], plan.slo)
            show([outcome.side], plan.slo, console_beside(json_file))
            console.print(f"wrote {plan.folder}/", highlight=False, markup=False, soft_wrap=True)
    if outcome.signum is not None:
        return 128 + outcome.signum
    records = [record for run in outcome.side.runs for record in run.measured]
    if not any(record.is_ok or record.aborted for record in records):
        why = f"none of the {len(records):,} requests was answered" if records else "no request came after the warm-up"
        console.print(f"loadtest: {why}, so that nothing was measured", style="red", highlight=False)
        return UNANSWERED
    if not all(run.health.is_trusted for run in outcome.side.runs):
        return DISTRUSTED
    return UNMET if outcome.has_met_none else 0


@contextlib.contextmanager
def _told(console: Console) -> Iterator[None]:
    """Prints each error that a user can put right in one line, and exits with status 2; errors of the cluster give
    status 1."""
    try:
        yield
    except (*FORESEEN, ExceptionGroup) as error:
        found = list(_leaves(error))
        if not all(isinstance(one, FORESEEN) for one in found):
            raise
        for one in found:
            console.print(f"loadtest: {one}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(found[0], LaunchError) else 2) from None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yields the errors that task groups have wrapped."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _search(rate: float | None, most: float, precision: float, most_runs: int) -> Search:
    if rate is None:
        raise LoadTestError("--sweep begins at --rate")
    return Search(rate, most, precision, most_runs)


def _faults(text: str, workload: Workload, *, is_sweep: bool) -> tuple[Fault, ...]:
    """Returns the faults. Raises `LoadTestError` if one of them comes after the run's end, or if there are any in a
    sweep."""
    faults = parse_faults(text)
    if faults and is_sweep:
        raise LoadTestError("--faults are for one run, and --sweep makes many of the same cluster")
    if workload.duration_s is not None and faults and faults[-1].at_s >= workload.duration_s:
        raise LoadTestError(f"{faults[-1]}: it is over by then, after {workload.duration_s:g} s")
    return faults
