"""Shared by the proxy's tests: short pauses, and an event loop stepped by hand, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes import proxy_harness
from tests.fakes.stepped_loop import SteppedLoop


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted engines are back, and have said what they have to say, at once: a second look need not be a second off.

    The grace stays long enough for a machine with nothing to spare, and the pause long enough to be one.
    """
    monkeypatch.setattr("pdproxy.orchestrator.attempt.GRACE_S", 0.2)
    monkeypatch.setattr("pdproxy.fleet.probe.EAGER_S", 0.05)


@pytest.fixture
def loop() -> Iterator[SteppedLoop]:
    loop = SteppedLoop()
    yield loop
    loop.finish()


@pytest.fixture
def relay_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are on connections of the proxy's own, and streams go to them by callbacks."""
    monkeypatch.setitem(proxy_harness.USUAL, "way", "relay")


@pytest.fixture(params=proxy_harness.WAYS)
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """That, and messages which are awaited: the test runs once on each."""
    monkeypatch.setitem(proxy_harness.USUAL, "way", request.param)
