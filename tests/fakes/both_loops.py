"""Tests of what a transport does, on asyncio's own event loop and on the one that serves."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs `test` once on each."""

    @functools.wraps(test)
    def run_it(run: Callable[[Coroutine[Any, Any, None]], None], **fixtures: Any) -> None:
        run(test(**fixtures))

    own = inspect.signature(test).parameters.values()
    run = inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY)
    run_it.__signature__ = inspect.Signature([*own, run])  # type: ignore[attr-defined]
    on_both = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    both: Callable[..., None] = on_both(run_it)
    return both
