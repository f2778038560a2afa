"""Without vLLM, which scripts/test_vllm installs, one module says that these were skipped; the others stay out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.engines import PYTHON_VARIABLE, Fleet, make_model

collect_ignore_glob: list[str] = []
if PYTHON_VARIABLE not in os.environ:
    collect_ignore_glob += ["test_vllm_[!s]*.py"]


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints what a reader of the log should see whether the test passes or not."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def show(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n  {text}", flush=True)

    return show


@pytest.fixture(scope="session")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, say: Callable[[str], None]
) -> Iterator[Fleet]:
    """The engines that the chosen tests need, started together; a test says which of them it needs itself, and the
    others are frozen meanwhile."""
    needed = {name for item in request.session.items for name in getattr(item.module, "ALL_ENGINES", ())}
    folder = tmp_path_factory.mktemp("vllm")
    # vLLM leaves its processes' sockets and meeting points behind, in a folder whose path must be short.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="vllm-") as leavings:
        patch.setenv("TMPDIR", leavings)
        fleet = Fleet(Path(os.environ[PYTHON_VARIABLE]), make_model(folder / "model"), folder, say)
        try:
            if len(first := fleet.one_of_each_model(needed)) > 1:
                fleet.use(*first)
            fleet.use(*needed)
            yield fleet
        finally:
            fleet.stop()
        assert fleet.left_over() == []


@pytest.fixture(scope="module")
def using(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """The fleet, with the engines thawed that the module names in ``ENGINES``. (``ALL_ENGINES`` has those, too, that a
    test of it asks for itself.)"""
    names: tuple[str, ...] = request.module.ENGINES
    fleet.use(*names)
    yield fleet
    fleet.use()
