"""The module reads from an answer's head which way it went, where a proxy of ours wrote it.

Names that come again with every answer are in memory once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from sys import intern

PHASES = ("tokenize", "slot_wait", "prefill", "kv_wait", "first_byte", "decode")


@dataclass(frozen=True, slots=True)
class Way:
    path: str = ""
    prefiller: str = ""
    decoder: str = ""
    attempt: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    """Holds the seconds of each phase."""
    num_pages: int | None = None
    num_kv_bytes: int | None = None
    transfer_s: float | None = None


NOWHERE = Way()


def read_way(header: Callable[[str], str | None]) -> Way:
    """Returns the way of an answer, and `NOWHERE` for an answer that no proxy of ours wrote. It leaves out what it
    cannot read."""
    path = header("x-pdproxy-path")
    if path is None:
        return NOWHERE
    kv = _numbers((header("x-pdproxy-kv") or "").split(";"))
    return Way(
        path=intern(path.partition(";")[0]),
        prefiller=intern(header("x-pdproxy-prefiller") or ""),
        decoder=intern(header("x-pdproxy-decoder") or ""),
        attempt=header("x-pdproxy-attempt") or "",
        phases=_phases(header("server-timing") or ""),
        num_pages=int(kv["pages"]) if "pages" in kv else None,
        num_kv_bytes=int(kv["bytes"]) if "bytes" in kv else None,
        transfer_s=kv["transfer_ms"] / 1000 if "transfer_ms" in kv else None,
    )


def _phases(timing: str) -> dict[str, float]:
    told = _numbers(part.replace(";dur", "") for part in timing.split(","))
    return {name: told[name] / 1000 for name in PHASES if name in told}


def _numbers(parts: Iterable[str]) -> dict[str, float]:
    """Returns the numbers by name out of parts that are ``name=number``."""
    numbers = {}
    for part in parts:
        name, _, value = part.strip().partition("=")
        try:
            numbers[name] = float(value)
        except ValueError:
            continue
    return numbers
