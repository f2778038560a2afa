"""Findings are what a check has found, in words and as plain data. The module does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console

from transfer.command_line.tables import Table

Problem = Literal[
    "busy",
    "chunk_size",
    "configuration",
    "engine_refused",
    "failed",
    "key",
    "kv_lost",
    "local",
    "misfit",
    "model",
    "no_handoff",
    "not_found",
    "not_tried",
    "pages_left",
    "proxy",
    "receiver_ports",
    "role",
    "silent",
    "slow",
    "tls",
    "tokenizer",
    "unlike_its_kind",
    "unreachable",
]
"""The names of what can be wrong, for scripts. The words beside them may change, and these do not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding is one thing that is wrong: with which `instances` (none for the whole fleet), why, and what to do."""

    problem: Problem
    instances: tuple[str, ...]
    why: str
    what_to_do: str
    is_warning: bool = False
    """True where requests are served all the same."""


@dataclass(slots=True)
class InstanceResult:
    """InstanceResult is what an instance said of itself."""

    name: str
    role: str
    url: str
    engine: str
    answers: bool = False
    look_s: float | None = None
    """The seconds that its answers took together."""
    models: tuple[str, ...] = ()
    num_pages: int | None = None
    chunk_size: int | None = None
    num_pairs: int = 0
    num_good_pairs: int = 0


@dataclass(frozen=True, slots=True)
class PairResult:
    """PairResult is what became of one small request through a prefiller and a decoder."""

    prefiller: str
    decoder: str
    is_good: bool
    seconds: float


@dataclass(slots=True)
class Report:
    """Report is all that a check has found."""

    source: str
    """The proxy, or the configuration, whose fleet was checked."""
    instances: list[InstanceResult] = field(default_factory=list)
    pairs: list[PairResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Tells whether nothing is wrong; warnings are allowed."""
        return all(finding.is_warning for finding in self.findings)

    def add(
        self, problem: Problem, instances: Iterable[str], why: str, what_to_do: str, *, is_warning: bool = False
    ) -> None:
        """Adds a finding, unless there is the same already."""
        found = Finding(problem, tuple(instances), why, what_to_do, is_warning)
        if found not in self.findings:
            self.findings.append(found)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.is_good,
            "source": self.source,
            "instances": [asdict(one) for one in self.instances],
            "pairs": [asdict(one) for one in self.pairs],
            "findings": [asdict(one) for one in self.findings],
        }

    def print_to(self, console: Console) -> None:
        make_table(self).print_to(console)
        for finding in sorted(self.findings, key=lambda one: one.is_warning):
            who = f"{' and '.join(finding.instances)}: " if finding.instances else ""
            kind = "warning" if finding.is_warning else "problem"
            said = f"{kind} ({finding.problem}): {who}{finding.why}\n    {finding.what_to_do}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
        num_wrong = sum(not finding.is_warning for finding in self.findings)
        last = (
            "nothing is wrong" if self.is_good else f"{num_wrong} {'is' if num_wrong == 1 else 'are'} to be put right"
        )
        num_good = sum(pair.is_good for pair in self.pairs)
        tried = f"{num_good} of {len(self.pairs)} pairs served a small request"
        console.print(f"{self.source}: {tried}; {last}", markup=False, highlight=False, soft_wrap=True)


def make_table(report: Report) -> Table:
    """Returns a table of the instances."""
    headings = ("instance", "role", "engine", "answers", "look ms", "models", "pages", "chunk", "pairs")
    table = Table(*headings, words=(0, 1, 2, 3, 5))
    for one in report.instances:
        table.add_row(
            one.name,
            one.role,
            one.engine,
            "yes" if one.answers else "no",
            "" if one.look_s is None else f"{one.look_s * 1000:.1f}",
            _shortened(one.models),
            _told(one.num_pages),
            _told(one.chunk_size),
            f"{one.num_good_pairs}/{one.num_pairs}",
        )
    return table


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _told(number: int | None) -> str:
    return "" if number is None else str(number)
