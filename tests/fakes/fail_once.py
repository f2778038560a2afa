"""A scripted engine that fails the first time only, so that a second attempt on the same instance is served."""

from __future__ import annotations

from pdproxy.engines.http.base import EngineBroken
from tests.fakes.fake_engine import FakeEngine


def fail_once(engine: FakeEngine, point: str) -> None:
    """The connection breaks when `point` is passed next, and never again."""
    pass_point = engine.pass_point
    is_due = True

    async def pass_or_fail(passed: str) -> None:
        nonlocal is_due
        await pass_point(passed)
        if passed == point and is_due:
            is_due = False
            raise EngineBroken("the connection was reset")

    engine.pass_point = pass_or_fail  # type: ignore[method-assign]
