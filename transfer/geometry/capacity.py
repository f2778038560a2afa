"""The size of a PD buffer in pages: how much of a given model an operator's `--pd-buffer-size` holds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from transfer.errors import GeometryError
from transfer.geometry.groups import KvGeometry

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
_UNITS |= {f"{prefix}i{b}": 1024**power for power, prefix in enumerate("kmgt", 1) for b in ("", "b")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class PdCapacity:
    """`PdCapacity` tells what fits into one rank's PD buffer."""

    page_bytes: int
    pages: int
    chunk_size: int

    @property
    def max_prompt_tokens(self) -> int:
        """The length, in tokens, of the longest prompt whose pages are all in the buffer at once, where all layers are
        kept alike. Where they are not, `transfer.geometry.max_prompt_tokens` knows it."""
        return self.pages * self.chunk_size


def capacity(geometry: KvGeometry, buffer_bytes: int, chunk_size: int) -> PdCapacity:
    """Cuts a buffer into pages. Returns its capacity. Raises `GeometryError` when not even one page fits."""
    page_bytes = geometry.page_bytes(chunk_size)
    if page_bytes == 0:
        raise GeometryError("this model keeps no KV per token, so a PD buffer of pages is of no use to it")
    pages = buffer_bytes // page_bytes
    if pages < 1:
        raise GeometryError(
            f"a PD buffer of {buffer_bytes:,} bytes is smaller than one page of {page_bytes:,} bytes "
            f"({chunk_size} tokens × {geometry.bytes_per_token:,} bytes); "
            "enlarge --pd-buffer-size or lower --chunk-size"
        )
    return PdCapacity(page_bytes=page_bytes, pages=pages, chunk_size=chunk_size)


def parse_size(text: str | int) -> int:
    """Returns the bytes of a size such as ``"2GiB"``, ``"512MB"``, ``"1024"`` or 1024: at least 1; a fraction of a byte
    is dropped.

    KiB, MiB, GiB and TiB (or Ki, Mi, Gi, Ti) are powers of 1024; KB, MB, GB and TB are powers of 1000. ``2G`` is
    refused, because people mean either by it. Raises `GeometryError` for a text that is no size.
    """
    match = _SIZE.fullmatch(str(text))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise GeometryError(
            f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB"
        )
    num_bytes = math.floor(Decimal(match[1]) * unit)
    if num_bytes < 1:
        raise GeometryError(f"{text!r} is less than one byte")
    return num_bytes
