"""Shared by the proxy's tests: an event loop stepped by hand, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.stepped_loop import SteppedLoop


@pytest.fixture
def loop() -> Iterator[SteppedLoop]:
    loop = SteppedLoop()
    yield loop
    loop.finish()
