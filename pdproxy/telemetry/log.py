"""One line per request that says where its time went, in ``key=value`` form, for people and machines alike."""

from __future__ import annotations

import json
import logging
from typing import Any

from pdproxy.telemetry.record import RequestRecord

log = logging.getLogger("pdproxy.requests")


class RequestLog:
    """Implements `Observer`. A canary's line is for debugging only."""

    def leg_finished(self, leg: str, instance: str, outcome: str) -> None:
        log.debug("leg=%s instance=%s outcome=%s", leg, instance, outcome)

    def request_finished(self, record: RequestRecord) -> None:
        log.log(logging.INFO if record.is_counted else logging.DEBUG, "%s", line(record.facts()))


def line(facts: dict[str, Any]) -> str:
    """``name=value …``; seconds become milliseconds, and text that needs it is quoted."""
    return " ".join(_pair(name, value) for name, value in facts.items())


def _pair(name: str, value: Any) -> str:
    if isinstance(value, float) and name.endswith("_s"):
        return f"{name.removesuffix('_s')}_ms={value * 1000:.1f}"
    return f"{name}={_quoted(value) if isinstance(value, str) else value}"


def _quoted(text: str) -> str:
    """Quoted unless plain, so that a client's text can never look like another field, or another line."""
    is_plain = text.isascii() and text.isprintable() and not set(text) & set(' ="\\')
    return text if text and is_plain else json.dumps(text)


def configure(level: str) -> None:
    """Log to stderr."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpcore").setLevel(logging.WARNING)
