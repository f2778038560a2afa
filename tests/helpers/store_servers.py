"""Real stores in tests: a test that needs one is skipped, loudly, on a machine where there is none."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from scripts.dev.common.debian import NotToBeHadError
from scripts.dev.common.store_servers import StoreKind, store_server

REQUIRE = "PDPROXY_REQUIRE_STORES"
"""Set to 1, it makes an error of what is otherwise a skip."""

_found = cache(store_server)


def program(kind: str) -> Path:
    """Returns the program of the server, ``redis`` or ``etcd``. Skips the test where there is none."""
    try:
        return _found(StoreKind(kind))
    except NotToBeHadError as error:
        if os.environ.get(REQUIRE) == "1":
            raise
        pytest.skip(f"NOT TESTED against a real {kind} server: {error}")
