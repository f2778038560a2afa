"""Shared by all tests: the environment of single-machine NIXL, and tiny models made once per run."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch or UCX, here and in every child process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_TLS", "tcp,sm,self")
os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where each process has a file at a time, one that crashes is replaced, and the others' files are run."""
    from tests.helpers.by_file import ByFile

    return ByFile(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model("llama", vocabulary="ascii", window=None)``: the folder of a tiny model, made at the first call.

    Whoever changes anything in it needs a copy.
    """
    from transfer.engine.tiny import make_tiny_model

    @cache
    def made(family: str, vocabulary: str, window: int | None) -> Path:
        folder = tmp_path_factory.mktemp("models") / f"tiny-{family}-{vocabulary}"
        return make_tiny_model(folder, family=family, seed=0, vocabulary=vocabulary, window=window)

    def make(family: str = "llama", *, vocabulary: str = "ascii", window: int | None = None) -> Path:
        return made(family, vocabulary, window)

    return make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was logged may hold characters that are none (lone surrogates), which no report can be sent with."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_collection_finish() -> None:
    """All tests and modules are there, and stay: the collections that tests ask for need not go through them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _nothing_to_look_through() -> Iterator[None]:
    """What a file's tests leave behind is let go, or stays and is not looked through again by those after them.

    FastAPI remembers the routes of the last few hundred apps, and with them all that those can reach: half a million
    objects, which make every simulation and every load test of a few milliseconds begin with a second of looking.
    """
    yield
    if dependencies := sys.modules.get("fastapi.dependencies.models"):
        for remembered in vars(dependencies).values():
            if hasattr(remembered, "cache_clear"):
                remembered.cache_clear()
    gc.collect()
    gc.freeze()
