"""The module reads traces of real services, as they are published: when requests came, how long prompt and answer
were, what was shared.

Mooncake's are JSON Lines (``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``: one number per block
of 512 tokens, and equal numbers for equal beginnings); Azure's are CSV (``TIMESTAMP,ContextTokens,GeneratedTokens``).
Neither has any text. The two in ``samples/`` only look like them: `pdproxy.loadtest.synthetic` wrote them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

import msgspec

from pdproxy.loadtest.errors import TraceError

BLOCK_TOKENS = 512
"""The number of tokens in each of Mooncake's blocks."""
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SAMPLES = {
    "mooncake": Path(__file__).parent / "samples" / "mooncake_like.jsonl",
    "azure": Path(__file__).parent / "samples" / "azure_like.csv",
}


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float
    """Holds the seconds from the first row."""
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...] = ()
    """Holds the blocks with which the prompt begins, `BLOCK_TOKENS` each; equal numbers mean equal tokens."""


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


_mooncake = msgspec.json.Decoder(_MooncakeRow)


def read_trace(path: Path, *, limit: int | None = None) -> list[TraceRow]:
    """Returns the first `limit` rows, or all, in the order of time. It recognizes by itself which of the two formats
    the file has.

    A length of 0 is taken for 1, because a request cannot ask for less. Raises `TraceError`, and `OSError`.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            is_json = file.read(1) == "{"
            file.seek(0)
            rows = list(islice(_mooncake_rows(file, path) if is_json else _azure_rows(file, path), limit))
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from None
    if not rows:
        raise TraceError(f"{path}: there is nothing in it")
    return _from_zero(rows)


def _mooncake_rows(lines: Iterable[str], path: Path) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _mooncake.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        yield _row(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def _azure_rows(file: TextIO, path: Path) -> Iterator[TraceRow]:
    rows = csv.DictReader(file)
    missing = [name for name in AZURE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise TraceError(f"{path}: neither JSON Lines nor CSV with a column {missing[0]}")
    for row in rows:
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
            sizes = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}, line {rows.line_num}: {error}") from None
        yield _row(_seconds(at), *sizes)


def _row(at_s: float, prompt_tokens: int, answer_tokens: int, blocks: Sequence[int] = ()) -> TraceRow:
    return TraceRow(at_s, max(1, prompt_tokens), max(1, answer_tokens), tuple(blocks))


def _seconds(at: datetime) -> float:
    """Returns the seconds since a fixed day; times without a time zone are all in the same one."""
    return (at - datetime(2020, 1, 1, tzinfo=at.tzinfo)).total_seconds()


def _from_zero(rows: Sequence[TraceRow]) -> list[TraceRow]:
    start = min(row.at_s for row in rows)
    ordered = sorted(rows, key=lambda row: row.at_s)
    return [replace(row, at_s=row.at_s - start) for row in ordered]
