"""The module is the command line of ``pdproxy loadtest``: it takes options, and gives a table, files, a page and an
exit status."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pdproxy.launch.errors import Interrupted, LaunchError
from pdproxy.launch.options import WORK_DIR
from pdproxy.loadtest import choices
from pdproxy.loadtest.arrivals import Process
from pdproxy.loadtest.conduct import Outcome, Plan, conduct
from pdproxy.loadtest.errors import LoadTestError
from pdproxy.loadtest.fault_schedule import Fault
from pdproxy.loadtest.faults import parse_faults
from pdproxy.loadtest.generator_health import LATE_LIMIT_S
from pdproxy.loadtest.local_cluster import ClusterOptions
from pdproxy.loadtest.record import RunFileError
from pdproxy.loadtest.report.files import write_figures, write_page
from pdproxy.loadtest.report.sides import Side, read_sides, slo_of
from pdproxy.loadtest.report.terminal import show
from pdproxy.loadtest.slo import Slo
from pdproxy.loadtest.sweep import Search
from pdproxy.loadtest.target import USUAL_EXTRA, Endpoint, Target
from pdproxy.loadtest.workload import Replay, Workload

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
HELP = {"help_option_names": ["-h", "--help"]}
DISTRUSTED = 3
"""The exit status when the generator was late, so that its figures are not to be quoted."""
FORESEEN = (LoadTestError, RunFileError, LaunchError, OSError)
FILE_WIDTH = 160
LENGTHS = "tokens: 512, uniform:16,900 or lognormal:512,0.8[,MOST]"


@app.callback()
def _commands() -> None:
    """Load tests that know of prefill and decode. Any address that speaks OpenAI's API can be asked."""


@app.command("run", context_settings=HELP)
def run_test(
    url: Annotated[str | None, typer.Argument(help="http://host:port; none with --house", show_default=False)] = None,
    # ── whom ──
    house: Annotated[
        str | None,
        typer.Option(
            help="start it here: PREFILLERS:DECODERS of the built-in engine and the proxy, 0:2 for two engines that do "
            "both halves; or a file as for pdproxy up"
        ),
    ] = None,
    house_model: Annotated[Path | None, typer.Option(help="model folder [default: a tiny random model]")] = None,
    engine_args: Annotated[list[str] | None, typer.Option(help="of the house's engines; repeatable")] = None,
    proxy_args: Annotated[list[str] | None, typer.Option(help="of its pdproxy serve; repeatable")] = None,
    work_dir: Annotated[Path, typer.Option(help="where the tiny model is kept")] = WORK_DIR,
    model: Annotated[str | None, typer.Option(help="name in the API [default: the first that there is]")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="what is asked")] = "completions",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="of the address")] = None,
    header: Annotated[list[str] | None, typer.Option(help="NAME:VALUE with every request; repeatable")] = None,
    extra: Annotated[
        str | None,
        typer.Option(
            help="JSON object, further members of every request; null takes one of "
            '{"temperature": 0, "ignore_eos": true} away'
        ),
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option(help="FIRST:LAST: prompts are ids out of these, exact to the token, not words")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds, of one request")] = 600.0,
    # ── when ──
    rate: Annotated[float | None, typer.Option(help="requests per second, whatever becomes of the others")] = None,
    arrivals: Annotated[Process, typer.Option(help="how they follow one another")] = "poisson",
    burstiness: Annotated[float, typer.Option(help="gamma: variance of gaps of mean 1; poisson's is 1")] = 1.0,
    ramp: Annotated[float, typer.Option(help="seconds in which the rate is reached")] = 0.0,
    from_rate: Annotated[float, typer.Option(help="from this one")] = 0.0,
    clients: Annotated[int | None, typer.Option(help="instead: so many, each of whom waits for its answer")] = None,
    think: Annotated[float, typer.Option(help="and then thinks for so many seconds, on average")] = 0.0,
    trace: Annotated[
        str | None,
        typer.Option(help="instead: what a trace says (Mooncake's JSONL, Azure's CSV; mooncake, azure: small samples)"),
    ] = None,
    trace_limit: Annotated[int | None, typer.Option(min=1, help="its first so many rows")] = None,
    speed: Annotated[float, typer.Option(help="so many times as fast as the trace")] = 1.0,
    scale: Annotated[float, typer.Option(help="of the trace's lengths")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="so many in all")] = None,
    duration: Annotated[float | None, typer.Option(help="seconds; with --sweep, of each rate [default: 60]")] = None,
    warmup: Annotated[float, typer.Option(help="seconds of it that do not count; with --sweep, of each rate")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="of all that is left to chance [default: a new one]")] = None,
    # ── what ──
    prompt: Annotated[str, typer.Option(help=LENGTHS)] = "256",
    answer: Annotated[str, typer.Option(help=LENGTHS)] = "64",
    lengths_from: Annotated[str | None, typer.Option(help="both drawn from this trace's")] = None,
    max_prompt: Annotated[int | None, typer.Option(help="tokens; longer ones are cut")] = None,
    max_answer: Annotated[int | None, typer.Option(help="tokens; longer ones are cut")] = None,
    stream_share: Annotated[float, typer.Option(help="of the requests, that are streamed")] = 1.0,
    prefix_groups: Annotated[int | None, typer.Option(help="prompts begin with one of so many texts")] = None,
    prefix_tokens: Annotated[int, typer.Option(help="of so many tokens")] = 128,
    turns: Annotated[str | None, typer.Option(help=f"conversations of so many turns; as {LENGTHS}")] = None,
    message: Annotated[str, typer.Option(help=f"what is said from the second turn on; {LENGTHS}")] = "uniform:16,64",
    turn_think: Annotated[float, typer.Option(help="seconds before that, on average")] = 1.0,
    questions: Annotated[
        int | None, typer.Option(help="only so many different ones, asked again and again; their answers must agree")
    ] = None,
    abort_share: Annotated[float, typer.Option(help="of the requests, that their client leaves early")] = 0.0,
    abort_phases: Annotated[str, typer.Option(help="in these: queued,prefill,first_token,mid_stream")] = "",
    faults: Annotated[
        str, typer.Option(help='done to the house: "30 kill decode-0; 60 start decode-0; 40 freeze prefill-0 for 5"')
    ] = "",
    # ── enough? ──
    slo: Annotated[str, typer.Option(help="the target: ttft:p99<0.5,tpot:p95<50ms,e2e:p99<10,errors<1%")] = "",
    sweep: Annotated[
        bool, typer.Option("--sweep", help="find the highest rate that meets it: from --rate, doubling, then halving")
    ] = False,
    max_rate: Annotated[float, typer.Option(help="of the sweep")] = 4096.0,
    precision: Annotated[float, typer.Option(help="of what it finds")] = 0.05,
    max_runs: Annotated[int, typer.Option(min=1, help="rates it looks at")] = 16,
    late_limit: Annotated[
        float, typer.Option(help="seconds: a generator that is later, at the 99th percentile, does not vouch for it")
    ] = LATE_LIMIT_S,
    label: Annotated[str | None, typer.Option(help="what it is called [default: the house, or the address]")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for all that is written [default: loadtest-TIME]")] = None,
) -> None:
    """Ask, measure, and write it down: every request, the figures, and a page with pictures.

    Latencies count from when a request was due. Ctrl-C ends it, and what was measured is written. Exit status 3: the
    generator was late, so that its figures are not to be quoted.
    """
    console = Console(stderr=True)
    with _told(console):
        if (url is None) == (house is None):
            raise LoadTestError("give an address, or --house to start what is to be tested")
        seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
        console.print(f"seed {seed}", highlight=False)
        replay = None if trace is None else Replay(rows=choices.rows(trace, trace_limit), speed=speed, scale=scale)
        workload = Workload(
            seed=seed,
            pace=choices.pace(
                rate=rate,
                arrivals=arrivals,
                burstiness=burstiness,
                ramp_s=ramp,
                from_rate=from_rate,
                clients=clients,
                think_s=think,
                replay=replay,
            ),
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
        ids, members = choices.token_ids(token_ids), choices.extra(extra, USUAL_EXTRA)
        named = choices.headers(header or ())

        def target(address: str, name: str) -> Target:
            return Target(
                url=address,
                model=name,
                endpoint=endpoint,
                token_ids=ids,
                api_key=api_key,
                headers=named,
                extra=members,
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
            search=_search(rate, max_rate, precision, max_runs) if sweep else None,
            cluster=None
            if house is None
            else ClusterOptions(
                what=house,
                model=house_model,
                work_dir=work_dir,
                engine_args=_words("--engine-args", engine_args or ()),
                proxy_args=_words("--proxy-args", proxy_args or ()),
            ),
            faults=_faults(faults, workload, is_sweep=sweep),
            label=label or house or url or "",
            folder=out or Path(f"loadtest-{datetime.now(UTC):%Y%m%d-%H%M%S}"),
            late_limit_s=late_limit,
        )
        raise typer.Exit(_run(plan, console))


@app.command(context_settings=HELP)
def compare(
    paths: Annotated[
        list[str], typer.Argument(help="a run's file, or the folder of a run or sweep; LABEL=PATH gives it a name")
    ],
    slo: Annotated[str | None, typer.Option(help="the target [default: the first one's own]")] = None,
    html: Annotated[Path, typer.Option(help="where to write the page")] = Path("comparison.html"),
    json_file: Annotated[Path | None, typer.Option("--json", help="where to write the figures")] = None,
) -> None:
    """Runs that were measured earlier side by side, on the same axes."""
    console = Console(stderr=True)
    with _told(console):
        sides = read_sides(paths)
        target = slo_of(sides) if slo is None else Slo.parse(slo)
        write_page(html, sides, target)
        if json_file is not None:
            write_figures(json_file, sides, target)
        show(sides, target, _paper())
        console.print(f"wrote {html}", highlight=False)
        is_trusted = all(run.health.is_trusted for side in sides for run in side.runs)
        raise typer.Exit(0 if is_trusted else DISTRUSTED)


def _run(plan: Plan, console: Console) -> int:
    """Conducts the test and returns the exit status. Whatever ends the test, this function shows what was measured; by
    then it has been written."""
    outcome = Outcome(Side(plan.label, ()))
    _allow_many_sockets()
    try:
        asyncio.run(conduct(plan, outcome, console))
    except (Interrupted, asyncio.CancelledError, KeyboardInterrupt) as stop:
        console.print("stopped" if not isinstance(stop, Interrupted) else str(stop))
        outcome.signum = outcome.signum or 2
    finally:
        if outcome.side.runs:
            show([outcome.side], plan.slo, _paper())
            console.print(f"wrote {plan.folder}/", highlight=False, markup=False, soft_wrap=True)
    if outcome.signum is not None:
        return 128 + outcome.signum
    return 0 if all(run.health.is_trusted for run in outcome.side.runs) else DISTRUSTED


@contextlib.contextmanager
def _told(console: Console) -> Iterator[None]:
    """Prints each error that a user can put right in one line, and exits with status 2; errors of the house give status
    1."""
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


def _paper() -> Console:
    """Returns the console for the tables; a file gets lines as wide as the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def _search(rate: float | None, most: float, precision: float, most_runs: int) -> Search:
    if rate is None:
        raise LoadTestError("--sweep begins at --rate")
    return Search(rate, most, precision, most_runs)


def _faults(text: str, workload: Workload, *, is_sweep: bool) -> tuple[Fault, ...]:
    """Returns the faults. Raises `LoadTestError` if one of them comes after the run's end, or if there are any in a
    sweep."""
    faults = parse_faults(text)
    if faults and is_sweep:
        raise LoadTestError("--faults are for one run, and --sweep makes many of the same house")
    if workload.duration_s is not None and faults and faults[-1].at_s >= workload.duration_s:
        raise LoadTestError(f"{faults[-1]}: it is over by then, after {workload.duration_s:g} s")
    return faults


def _words(option: str, texts: list[str] | tuple[()]) -> tuple[str, ...]:
    """Splits the texts into words as a shell would. Raises `LoadTestError`."""
    try:
        return tuple(word for text in texts for word in shlex.split(text))
    except ValueError as error:
        raise LoadTestError(f"{option}: {error}") from None


def _allow_many_sockets() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
