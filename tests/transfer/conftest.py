"""Shared by the tests of the transfer: a world of senders and receivers, and what real processes are forked from."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.fakes.transfer_world import World, new_world
from tests.helpers.zygote import Zygote


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Whatever a test leaves behind in it fails that test."""
    async with new_world() as world:
        yield world


LIES = "were not written by it last"
"""A stranger who says that it has written what it has not looks like a fault of ours."""


@pytest.fixture
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What is wrong with a peer's message is a warning. An error in the log would be a fault of ours."""
    yield
    records = caplog.get_records("call")  # `caplog.records` are those of the phase under way, which is the end
    errors = [record.getMessage() for record in records if record.levelno >= logging.ERROR]
    assert [error for error in errors if LIES not in error] == []


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Whoever forks reaps: nothing of one test file is there in the next."""
    with Zygote("tests.helpers.transfer_process", "tests.helpers.rank_process") as zygote:
        yield zygote
