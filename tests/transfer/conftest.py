"""Shared by the tests of the transfer in real processes: what those are forked from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Whoever forks reaps: nothing of one test file is there in the next."""
    with Zygote("tests.helpers.transfer_process", "tests.helpers.rank_process") as zygote:
        yield zygote
