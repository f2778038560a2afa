"""The module keeps what is logged as a warning, so that a check can tell it as a finding."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Noted(logging.Handler):
    """_Noted keeps the warnings that are logged, in words."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def warnings_noted() -> Iterator[list[str]]:
    """Keeps the proxy's own warnings in the list that it gives, instead of the log, whatever the log's level is."""
    logger, noted = logging.getLogger("pdproxy"), _Noted()
    before = logger.level, logger.propagate
    logger.addHandler(noted)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield noted.said
    finally:
        logger.removeHandler(noted)
        logger.setLevel(before[0])
        logger.propagate = before[1]
