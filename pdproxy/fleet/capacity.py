"""The report on what a decoder's PD buffer holds is made here, for a person or for a program.

`transfer.geometry` computes the numbers. Where layers are unlike, the report has two sets of them. One is for engines
that put a chunk of all layers into a page. The other is for engines that page layers of one kind together, so that for
windowed layers only the tail of a prompt takes room.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from transfer.command_line.tables import Table
from transfer.geometry import (
    KvGeometry,
    LayerGroup,
    PageGroup,
    PdCapacity,
    group_page_bytes,
    max_prompt_tokens,
    page_groups,
)

_MEANING = {
    "full": "every token",
    "mla": "every token, on every rank",
    "sliding": "window of {window:,} tokens",
    "chunked": "chunk of {window:,} tokens",
    "linear": "one state",
}


@dataclass(frozen=True, slots=True)
class GroupedCapacity:
    """GroupedCapacity describes the same buffer for engines whose page is one chunk of one page group."""

    page_bytes: int
    pages: int
    page_groups: tuple[PageGroup, ...]
    max_prompt_tokens: int | None
    """The longest prompt that fits, in tokens; None means that prompts of any length fit."""


def grouped_capacity(geometry: KvGeometry, buffer_bytes: int, chunk_size: int) -> GroupedCapacity | None:
    """Returns the capacity by page groups, or None where it makes no difference: one group, whose layers keep every
    token."""
    groups = page_groups(geometry.groups, chunk_size)
    if len(groups) == 1 and groups[0].window is None:
        return None
    page_bytes = group_page_bytes(geometry.groups, chunk_size)
    pages = buffer_bytes // page_bytes
    return GroupedCapacity(page_bytes, pages, groups, max_prompt_tokens(groups, pages, chunk_size))


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """CapacityReport holds the capacity of one rank's buffer and the numbers that it was computed from."""

    geometry: KvGeometry
    capacity: PdCapacity
    buffer_bytes: int
    tp_size: int
    unknown_type: str | None = None
    """The model type, where transformers does not know it."""

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers for one rank; the keys are a contract with scripts. ``grouped`` is there where layers are
        unlike, and ``warning`` where the figures may be wrong."""
        told = {
            "bytes_per_token": self.geometry.bytes_per_token,
            "page_bytes": self.capacity.page_bytes,
            "pages": self.capacity.pages,
            "max_prompt_tokens": self.capacity.max_prompt_tokens,
            "groups": [asdict(group) for group in self.geometry.groups],
        }
        if self.unknown_type is not None:
            told["warning"] = doubt(self.unknown_type)
        return told if self.grouped is None else told | {"grouped": asdict(self.grouped)}

    @property
    def grouped(self) -> GroupedCapacity | None:
        return grouped_capacity(self.geometry, self.buffer_bytes, self.capacity.chunk_size)

    def print_to(self, console: Console) -> None:
        """Prints a table of the layers, then the results as sentences."""
        self._table().print_to(console)
        for line in self._lines():
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        where = "" if self.tp_size == 1 else f", on each of {self.tp_size} ranks"
        headings = ("layers", "number", "bytes/token", "bytes/sequence", "keeps")
        table = Table(*headings, title=f"KV by kind of layer{where}", words=(0, 4))
        for group in self.geometry.groups:
            table.add_row(*_row(group))
        return table

    def _lines(self) -> list[str]:
        capacity, per_token = self.capacity, self.geometry.bytes_per_token
        unused = self.buffer_bytes - capacity.pages * capacity.page_bytes
        lines = [] if self.unknown_type is None else [doubt(self.unknown_type)]
        lines += [
            f"one page: {capacity.chunk_size:,} tokens × {per_token:,} bytes = {_size(capacity.page_bytes)}",
            f"the buffer: {_size(self.buffer_bytes)} = {capacity.pages:,} pages, {unused:,} bytes unused",
            f"longest prompt that fits: {capacity.max_prompt_tokens:,} tokens",
        ]
        if self.geometry.bytes_per_sequence:
            lines.append(f"besides, for each sequence: {_size(self.geometry.bytes_per_sequence)} of state, in no page")
        return lines if self.grouped is None else lines + _grouped_lines(self.grouped, capacity.chunk_size)


def doubt(model_type: str) -> str:
    """Returns a sentence on the figures of a model whose type transformers does not know."""
    return (
        f"transformers does not know the model type {model_type!r}: these figures hold if every layer keeps K and V of "
        "every token, as its config's numbers say; if not, give --bytes-per-token"
    )


def _grouped_lines(grouped: GroupedCapacity, chunk_size: int) -> list[str]:
    """Returns the results by page groups as lines of text, with a line for each kind of group."""
    longest = grouped.max_prompt_tokens
    counts = Counter(grouped.page_groups)
    return [
        "",
        f"{_whose(grouped)}: pages for each group of layers, and only a prompt's tail of windowed ones",
        f"one page: {chunk_size:,} tokens of one group = {_size(grouped.page_bytes)}; the groups:",
        *(f"  {count} × {_group(group)}" for group, count in counts.items()),
        f"the buffer: {grouped.pages:,} pages",
        "prompts of any length fit" if longest is None else f"longest prompt that fits: {longest:,} tokens",
    ]


def _whose(grouped: GroupedCapacity) -> str:
    """Returns whose pages these are. The built-in engine refuses models with layers that keep a state."""
    if any(group.kind == "linear" for group in grouped.page_groups):
        return "as an engine would have it that pages states, which the built-in engine does not"
    return "as the built-in engine has it"


def _group(group: PageGroup) -> str:
    layers = f"{group.num_layers:,} {group.kind} layers" if group.num_layers else f"all {group.kind} layers"
    if group.kind == "linear":
        return f"{layers}: {group.state_pages:,} pages for a whole sequence"
    return f"{layers}: {_MEANING[group.kind].format(window=group.window)}"


def _row(group: LayerGroup) -> tuple[str, ...]:
    return (
        group.kind,
        f"{group.num_layers:,}" if group.num_layers else "all",
        f"{group.bytes_per_token:,}",
        f"{group.bytes_per_sequence:,}",
        _MEANING[group.kind].format(window=group.window),
    )


def _size(num_bytes: int) -> str:
    """Returns a size as text, such as ``33,554,432 bytes (32 MiB)``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes:,} bytes ({num_bytes / 1024**power:.4g} {unit})"
    return f"{num_bytes:,} bytes"
