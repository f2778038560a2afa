"""Under simulated time pauses cost nothing, and two processes have to make the same ones."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_pauses() -> None:
    """None here."""
