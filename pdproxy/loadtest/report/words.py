"""The module says how figures are written, the same in the terminal and on the page."""

from __future__ import annotations

from datetime import UTC, datetime

from pdproxy.loadtest.record import GeneratorHealth

NOTHING = "–"


def milliseconds(seconds: float | None) -> str:
    """Returns seconds in milliseconds, with three digits or more: ``0.42``, ``4.20``, ``42.0``, ``420``, ``42,000``."""
    if seconds is None:
        return NOTHING
    ms = seconds * 1000
    return f"{ms:,.{2 if abs(ms) < 10 else 1 if abs(ms) < 100 else 0}f}"


def number(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def rate(per_s: float | None) -> str:
    """Returns a number per second: ``0.25``, ``7.50``, ``75.0``, ``7,500``."""
    return number(per_s, 2 if per_s is None or abs(per_s) < 10 else 1 if abs(per_s) < 1000 else 0)


def share(part: float | None) -> str:
    """Returns a share in percent. Near 0 and 100 it has more digits: one of ten thousand is not none, and all but one
    of them are not all."""
    if part is None:
        return NOTHING
    percent = part * 100
    return f"{percent:.{2 if 0 < percent < 1 or 99 < percent < 100 else 1}f} %"


def seconds(value: float) -> str:
    """Returns seconds as an axis shows them: ``200 µs``, ``5 ms``, ``1.5 s``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size * 0.999:
            return f"{value / size:.4g} {unit}"
    return "0" if not value else f"{value:.1g} s"


def day(at: float) -> str:
    """Returns the date and time in UTC of a time in seconds since 1970."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def late_words(health: GeneratorHealth) -> str:
    """Returns the reason why a run is not judged, with the lateness of its generator in milliseconds (p99)."""
    return f"the load generator was late by {milliseconds(health.delay_s)} ms"


def counted(counts: dict[str, int]) -> str:
    """Returns the counts as text, for instance ``timeout 3, http_503 1``."""
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or NOTHING
