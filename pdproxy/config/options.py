"""The module defines what several commands take: kinds of values, and options with their help, type and check.

Code outside the options uses the same names for the kinds of values.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Process = Literal["poisson", "gamma", "constant"]
"""The ways in which requests follow one another."""


FLEET, FILES, JUDGED = "The fleet", "Files and logs", "What is good enough"
PACE = "When requests are sent"
LENGTHS = "512, uniform:16,900, lognormal:MEDIAN,SIGMA[,MOST] or mixed:USUAL,OTHER,SHARE"


def option(metavar: str | None, text: str, *flags: str, group: str | None = None, **more: Any) -> Any:
    """Returns an option of a command: its value as a person writes it, its help, and its flags where the parameter's
    name does not say them. `group` is a heading in the help, for the options that follow as well.
    """
    return typer.Option(*flags, metavar=metavar, help=text, rich_help_panel=group, **more)


def argument(metavar: str, text: str, group: str) -> Any:
    return typer.Argument(metavar=metavar, help=text, rich_help_panel=group, show_default=False)


Prefillers = Annotated[int, option("N", "Number of prefillers", "--prefillers", min=1)]
Decoders = Annotated[int, option("N", "Number of decoders", "--decoders", min=1)]
Args = tuple[str, ...]
EngineArgs = Annotated[Args, option("ARGS", 'Further options of all engines, as "--max-model-len 2048"; repeatable')]
ProxyArgs = Annotated[Args, option("ARGS", 'Further options of pdproxy serve, as "--max-queue 64"; repeatable')]
WorkDir = Annotated[Path, option("FOLDER", "Folder of the tiny model and of generated configurations")]

Rate = Annotated[float | None, option("RATE", "Requests per second, whatever becomes of others", group=PACE, min=1e-6)]
Arrivals = Annotated[Process, option(None, "Way in which requests of a --rate follow one another")]
Burstiness = Annotated[float, option("N", "Variance of gamma arrivals' gaps, at mean 1; Poisson's is 1", min=1e-6)]
Clients = Annotated[int | None, option("N", "Number of clients who each wait for an answer, instead of --rate", min=0)]
Think = Annotated[float, option("SECONDS", "Mean time that one of --clients thinks before its next request", min=0)]
Trace = Annotated[str | None, option("PATH", "Trace of requests (Mooncake's, Azure's); or a sample: mooncake, azure")]
Seed = Annotated[int | None, option("N", "Seed of everything that is left to chance [default: a new one]")]
PromptLengths = Annotated[str, option("LENGTHS", f"Tokens of a prompt: {LENGTHS}", group="What is asked")]
AnswerLengths = Annotated[str, option("LENGTHS", f"Tokens of an answer: {LENGTHS}")]
SLO = "Target for the latencies: ttft:p99<0.5,tpot:p95<50ms,e2e:p99<10,errors<1%"
SloText = Annotated[str, option("TARGET", SLO, group=JUDGED)]
JSON = "One JSON document with the figures, to FILE, or to stdout where no FILE is named"
Json = Annotated[Path | None, option("[FILE]", JSON, "--json", group=FILES)]
"""The file of the JSON document. Stdout, which is ``-``, gets nothing besides."""
FAULTS = 'Faults by second: "30 kill decode-0; 60 start decode-0; 40 freeze prefill-0 for 5"'
FaultsText = Annotated[str, option("FAULTS", FAULTS, group="Trouble on purpose")]


def words(flag: str, texts: Sequence[str], error: type[Exception]) -> tuple[str, ...]:
    """Splits the values of a repeatable option into words as a shell would. Raises `error`."""
    try:
        return tuple(word for text in texts for word in shlex.split(text))
    except ValueError as wrong:
        raise error(f"{flag}: {wrong}") from None
