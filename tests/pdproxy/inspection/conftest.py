"""What the commands of this folder change in their process, and how that is undone."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Commands send the log of this process elsewhere."""
    root = logging.getLogger()
    before, level, hook = root.handlers[:], root.level, sys.excepthook
    yield
    root.handlers[:] = before
    root.setLevel(level)
    sys.excepthook = hook
    logging.captureWarnings(False)
