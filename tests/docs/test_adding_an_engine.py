"""docs/adding-an-engine.md, followed word by word in a copy of the sources."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdproxy.engines.adapter import Adapter
from tests.docs.blocks import ROOT, Block, blocks_of

BLOCKS = list(blocks_of(ROOT / "docs" / "adding-an-engine.md"))
(ADAPTER,) = (block for block in BLOCKS if block.language == "python")
CHANGES = [block for block in BLOCKS if block.language == "diff"]
PATIENCE_S = 60


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout in which nothing has been changed yet."""
    shutil.copytree(
        ROOT / "pdproxy", tmp_path / "pdproxy", ignore=shutil.ignore_patterns("*.so", "__pycache__", "stamp.json")
    )
    for name in ("transfer", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def change(folder: Path, block: Block) -> None:
    """Makes the change of a one-hunk diff without line numbers. Raises `AssertionError` where it does not fit."""
    head, *lines = block.text.splitlines()
    path = folder / head.removeprefix("--- ")
    old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " -")
    new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " +")
    text = path.read_text()
    assert text.count(old) == 1, f"{block}: {path.name} has these lines {text.count(old)} times:\n{old}"
    path.write_text(text.replace(old, new))


def test_who_follows_the_page_serves_requests(copy: Path) -> None:
    (copy / "pdproxy" / "engines" / "ticket.py").write_text(ADAPTER.text)
    assert {block.text.splitlines()[0] for block in CHANGES} == {
        "--- pdproxy/config/values.py",
        "--- pdproxy/engines/factory.py",
    }
    for block in CHANGES:
        change(copy, block)
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.served_by_ticket"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(copy / "pdproxy"), "other sources than the copy's were run"


def test_the_example_has_the_whole_contract() -> None:
    names: dict[str, Any] = {}
    exec(ADAPTER.text.replace("from __future__ import annotations\n", ""), names)
    example = names["TicketAdapter"]("prefill")
    for name, asked in vars(Adapter).items():
        if not name.startswith("_") and callable(asked):
            of_example, of_contract = (
                inspect.signature(one).parameters for one in (getattr(type(example), name), asked)
            )
            assert list(of_example) == list(of_contract), name
        elif not name.startswith("_"):
            assert hasattr(example, name), name


def test_a_change_that_does_not_fit(copy: Path) -> None:
    block = Block(ROOT / "README.md", 1, "diff", "--- pdproxy/ids.py\n-nothing like this\n+something\n")
    with pytest.raises(AssertionError, match="0 times"):
        change(copy, block)
