"""The log has text for people or JSON for machines; one line per request says where its time went.

Every line written while a request is served carries the request's id, whichever part of the proxy writes it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal

import msgspec

from pdproxy.telemetry import request_id
from pdproxy.telemetry.observer import LegObserver
from pdproxy.telemetry.record import RequestRecord
from transfer import logs
from transfer.logs import MAX_LINE_BYTES, LogWriter

LogFormat = Literal["text", "json"]

log = logging.getLogger("pdproxy.requests")

_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")
r"""Matches printable ASCII without blanks, ``"``, ``=`` and ``\\``."""


class LegLog:
    """LegLog writes the line of each leg, which is for debugging only. Implements `LegObserver`."""

    def leg_finished(self, leg: str, instance: str, outcome: str) -> None:
        log.debug("leg=%s instance=%s outcome=%s", leg, instance, outcome)


class RequestLog:
    """RequestLog writes the line of each request. Implements `RequestObserver`.

    A canary's line is for debugging only.
    """

    def request_finished(self, record: RequestRecord) -> None:
        level = logging.INFO if record.is_counted else logging.DEBUG
        if log.isEnabledFor(level):
            log.log(level, Facts(record.facts()))


def leg_logs() -> list[LegObserver]:
    """Returns who writes a log of legs, where its present level asks for one."""
    return [LegLog()] if log.isEnabledFor(logging.DEBUG) else []


class Facts:
    """Facts is a log message that is a table: ``name=value …`` in text, one member for each in JSON.

    Seconds become milliseconds. `facts` must not change any more.
    """

    title = "request"
    """The message of the line in JSON."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts

    @property
    def members(self) -> dict[str, Any]:
        """The facts as members of a JSON object."""
        members: dict[str, Any] = {}
        for name, value in self._facts.items():
            if _is_seconds(name, value):
                members[_in_ms(name)] = round(value * 1000, 1)
            else:
                members[name] = value
        return members

    def __str__(self) -> str:
        written = []
        for name, value in self._facts.items():
            if _is_seconds(name, value):
                written.append(f"{_in_ms(name)}={value * 1000:.1f}")
            else:
                written.append(f"{name}={_plain(value)}")
        return " ".join(written)


def _is_seconds(name: str, value: Any) -> bool:
    return isinstance(value, float) and name.endswith("_s")


@cache
def _in_ms(name: str) -> str:
    return f"{name.removesuffix('_s')}_ms"


def _plain(value: Any) -> str:
    """Returns the value as text, quoted unless plain, so that a client's text never looks like another field or
    line."""
    if not isinstance(value, str):
        return str(value)
    return value if _PLAIN.fullmatch(value) else json.dumps(value)


class TextFormatter(logs.LineFormatter):
    """TextFormatter writes one line. The request's id is at its end, where there is one and the line does not tell it
    anyway."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        text, current = super().formatMessage(record), request_id.current.get()
        return f"{text} request_id={current}" if current and not isinstance(record.msg, Facts) else text


class JsonFormatter(logging.Formatter):
    """JsonFormatter writes one JSON object per line: time (ISO 8601, UTC), level, logger, then message and request_id,
    or the facts."""

    def format(self, record: logging.LogRecord) -> str:
        written = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told: dict[str, Any] = {"time": written, "level": record.levelname.lower(), "logger": record.name}
        if isinstance(record.msg, Facts):
            told |= {"message": record.msg.title, **record.msg.members}
        else:
            told["message"] = record.getMessage()
            if current := request_id.current.get():
                told["request_id"] = current
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return _line(told).decode()


def _line(told: Mapping[str, Any]) -> bytes:
    """Returns the JSON object. Where it is too long for one line, its texts are shortened until it is not."""
    line, limit = msgspec.json.encode(told, enc_hook=str), MAX_LINE_BYTES
    while len(line) >= MAX_LINE_BYTES and limit > 0:
        limit //= 2
        fitting = {name: logs.shortened(text, limit) if isinstance(text, str) else text for name, text in told.items()}
        line = msgspec.json.encode(fitting, enc_hook=str)
    return line


def configure(level: str, log_format: LogFormat = "text") -> LogWriter:
    """Sends the log to stderr, from `level` upwards, without ever waiting for whoever reads it."""
    writer = logs.configure(level, JsonFormatter() if log_format == "json" else TextFormatter())
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return writer


def num_dropped() -> int:
    """Returns the number of log records that were dropped because stderr did not take them."""
    return sum(writer.num_dropped for writer in logs.writers())
