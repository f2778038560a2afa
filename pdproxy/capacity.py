"""What a decoder's PD buffer holds, told to a person or to a program. The sums are `transfer.geometry`'s."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from transfer.geometry import KvGeometry, LayerGroup, PdCapacity

_MEANING = {
    "full": "every token",
    "mla": "every token, on every rank",
    "sliding": "window of {window:,} tokens",
    "chunked": "chunk of {window:,} tokens",
    "linear": "one state",
}


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """One rank's buffer and what was put into the sum."""

    geometry: KvGeometry
    capacity: PdCapacity
    buffer_bytes: int
    tp_size: int

    def as_json(self) -> dict[str, Any]:
        """For one rank; the keys are a contract with scripts."""
        return {
            "bytes_per_token": self.geometry.bytes_per_token,
            "page_bytes": self.capacity.page_bytes,
            "pages": self.capacity.pages,
            "max_prompt_tokens": self.capacity.max_prompt_tokens,
            "groups": [asdict(group) for group in self.geometry.groups],
        }

    def print_to(self, console: Console) -> None:
        """A table of the layers, then the sums as sentences."""
        console.print(self._table())
        for line in self._lines():
            console.print(line, highlight=False)

    def _table(self) -> Table:
        where = "" if self.tp_size == 1 else f", on each of {self.tp_size} ranks"
        table = Table(title=f"KV by kind of layer{where}", title_justify="left")
        table.add_column("layers")
        table.add_column("number", justify="right")
        table.add_column("bytes/token", justify="right")
        table.add_column("bytes/sequence", justify="right")
        table.add_column("keeps")
        for group in self.geometry.groups:
            table.add_row(*_row(group))
        return table

    def _lines(self) -> list[str]:
        capacity, per_token = self.capacity, self.geometry.bytes_per_token
        unused = self.buffer_bytes - capacity.pages * capacity.page_bytes
        lines = [
            f"one page: {capacity.chunk_size:,} tokens × {per_token:,} bytes = {_size(capacity.page_bytes)}",
            f"the buffer: {_size(self.buffer_bytes)} = {capacity.pages:,} pages, {unused:,} bytes unused",
            f"longest prompt that fits: {capacity.max_prompt_tokens:,} tokens",
        ]
        if self.geometry.bytes_per_sequence:
            lines.append(f"besides, for each sequence: {_size(self.geometry.bytes_per_sequence)} of state, in no page")
        return lines


def _row(group: LayerGroup) -> tuple[str, ...]:
    return (
        group.kind,
        f"{group.num_layers:,}" if group.num_layers else "all",
        f"{group.bytes_per_token:,}",
        f"{group.bytes_per_sequence:,}",
        _MEANING[group.kind].format(window=group.window),
    )


def _size(num_bytes: int) -> str:
    """``33,554,432 bytes (32 MiB)``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes:,} bytes ({num_bytes / 1024**power:.4g} {unit})"
    return f"{num_bytes:,} bytes"
