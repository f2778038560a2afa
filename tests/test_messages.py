"""What the program says names only what is there once it is installed: a wheel has no `scripts/` and no `examples/`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for package in ("pdproxy", "transfer") for path in (ROOT / package).rglob("*.py"))
ELSEWHERE = re.compile(r"\b(scripts|examples|tests|docs)/\w|\.venv\b")
CHECKOUT = "in a checkout"
"""By these words a message says that the rest is for those who have the sources."""


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every text that is no docstring: those stand alone, as a statement."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


def of_sources_only(text: str) -> list[str]:
    tree = ast.parse(text)
    return [
        f"{line}: {said}" for line, said in messages(tree) if ELSEWHERE.search(said.partition(CHECKOUT)[0]) is not None
    ]


@pytest.mark.parametrize("package", ["pdproxy", "transfer"])
def test_messages_name_only_what_is_installed(package: str) -> None:
    found = {path.name: of_sources_only(path.read_text()) for path in SOURCES if path.parts[len(ROOT.parts)] == package}
    assert not {name: said for name, said in found.items() if said}


def test_such_a_message_is_found() -> None:
    assert of_sources_only('"""Of scripts/test."""\nfail("run scripts/install")\n') == ["2: run scripts/install"]
    assert not of_sources_only('fail("pip install x (in a checkout: scripts/install)")')
