"""docs/architecture.md names every folder and every word, and every document names only what exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

from pdproxy.admission.custody import Custody, Evidence
from pdproxy.engines.adapter import ReleaseMode
from pdproxy.engines.traits import KvReady, ReleaseSignal
from pdproxy.fleet.breaker import BreakerState
from pdproxy.fleet.instance import Health
from pdproxy.telemetry import attempt_record
from pdproxy.telemetry.record import Outcome
from tests.docs.blocks import ROOT, blocks_of, documents
from tests.test_floors import FLOORS
from transfer.memory.reservation import Holding

PAGE = ROOT / "docs" / "architecture.md"
TREE, GLOSSARY = "## The tree", "## Glossary"
PACKAGES = ("pdproxy", "transfer")
FIRST_CELL = re.compile(r"^\| (?P<cell>[^|]+) \|", re.MULTILINE)


def section(heading: str) -> str:
    """Returns one section of the page, down to the next heading of the same level."""
    text = PAGE.read_text()
    start = text.index(f"{heading}\n") + len(heading)
    end = text.find("\n## ", start)
    return text[start:] if end < 0 else text[start:end]


def first_cells(text: str) -> list[str]:
    return [cell for cell in FIRST_CELL.findall(text) if not set(cell) <= set("- ")]


# ── the tree ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rows_of_the_tree() -> list[str]:
    return [cell.strip("`") for cell in first_cells(section(TREE)) if cell.startswith("`")]


def path_of(module: str) -> str:
    """Returns a floor as the page writes it: a folder with a slash behind it, or a file."""
    path = module.replace(".", "/")
    return f"{path}/" if (ROOT / path).is_dir() else f"{path}.py"


def test_every_folder_has_its_line() -> None:
    has_files = {
        path.parent
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    folders = {f"{folder.relative_to(ROOT)}/" for folder in has_files} - {f"{package}/" for package in PACKAGES}
    rows = rows_of_the_tree()
    assert folders - set(rows) == set(), "give each of these a line in the tree of docs/architecture.md"
    assert len(rows) == len(set(rows))


def test_lines_stand_in_the_order_of_the_floors() -> None:
    floors = [path_of(module) for module in FLOORS if module not in PACKAGES]
    assert [row for row in rows_of_the_tree() if row in floors] == floors


def test_a_subfolder_stands_below_its_folder() -> None:
    rows = rows_of_the_tree()
    for row in rows:
        parent = f"{Path(row).parent}/"
        assert parent not in rows or row.endswith(".py") or rows.index(parent) < rows.index(row), row


# ── the glossary ────────────────────────────────────────────────────────────────────────────────────────────────────

WORDS = """
lease slot page attempt leg handoff evidence incarnation epoch orphan quarantine tag fence KV-ready window custody
ledger chunk instance rank demand grant account place owner peer phase path canary breaker probe reaper board
expectation errand adapter traits agreement push sender receiver reservation session handshake identity
"""
TABLES: tuple[type[Enum], ...] = (
    Custody,
    Evidence,
    KvReady,
    ReleaseMode,
    ReleaseSignal,
    BreakerState,
    Health,
    attempt_record.Path,
    attempt_record.Phase,
    Outcome,
    Holding,
)
"""Enumerations whose values people meet in logs, metrics and ``/status``."""


@pytest.mark.parametrize("word", WORDS.split())
def test_every_word_is_explained(word: str) -> None:
    explained = {one for cell in first_cells(section(GLOSSARY)) for one in re.split(r", ", cell)}
    assert word in explained


@pytest.mark.parametrize("table", TABLES)
def test_every_state_is_named(table: type[Enum]) -> None:
    text = section(GLOSSARY)
    assert [one.value for one in table if f"`{one.value}`" not in text] == []


# ── paths and links, in every document ──────────────────────────────────────────────────────────────────────────────

CODE = re.compile(r"`([^`\n]+)`")
OURS = re.compile(r"(?:\./)?(?:pdproxy|transfer|scripts|tests|examples|docs)/[\w./*-]*\w[/*]?")
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(?P<text>.+?) *$", re.MULTILINE)


def prose_of(path: Path) -> str:
    text = path.read_text()
    for block in blocks_of(path):
        text = text.replace(block.text, "")
    return text


def paths_in(text: str) -> Iterator[str]:
    for code in CODE.findall(text):
        for word in code.split():
            if OURS.fullmatch(word):
                yield word


def anchors_of(path: Path) -> set[str]:
    """Returns the headings of a document as GitHub makes anchors of them."""
    plain = (heading.replace("`", "").lower() for heading in HEADING.findall(prose_of(path)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_is_named_exists(path: Path) -> None:
    missing = [name for name in paths_in(prose_of(path)) if not list(ROOT.glob(name.removeprefix("./")))]
    assert not missing


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in LINK.findall(prose_of(path)):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name) if name else path
        assert found.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors_of(found), f"{path.name}: {target}"


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 150, "move something to docs/"
    assert "./scripts/test" in lines, "how to test it belongs there"


def test_what_is_taken_for_a_path() -> None:
    text = (
        "`pdproxy/aio/` `./scripts/test -m x` `transfer/roles/intake.py` `tests/*.py` `and/or` `docs/` `a pdproxy/b.py`"
    )
    assert list(paths_in(text)) == [
        "pdproxy/aio/",
        "./scripts/test",
        "transfer/roles/intake.py",
        "tests/*.py",
        "pdproxy/b.py",
    ]
