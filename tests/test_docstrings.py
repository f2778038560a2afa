"""Docstrings can be read without the name beside them: they begin with a subject or a verb, not with half a phrase."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HALF_PHRASES = frozenset(
    [
        "After",
        "Also",
        "And",
        "As",
        "At",
        "Before",
        "Behind",
        "Beside",
        "Between",
        "But",
        "By",
        "For",
        "From",
        "How",
        "In",
        "It",
        "Its",
        "Of",
        "On",
        "Same",
        "She",
        "So",
        "Such",
        "That",
        "Their",
        "Them",
        "These",
        "They",
        "This",
        "Those",
        "To",
        "Unless",
        "Until",
        "What",
        "Whatever",
        "When",
        "Where",
        "Whether",
        "Which",
        "While",
        "Who",
        "Whoever",
        "Whose",
        "Why",
        "With",
        "Without",
    ]
)
"""Words with which a text begins that goes on from a name: prepositions, pronouns, conjunctions."""


def half_phrases(source: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the first word of each docstring that begins with half a phrase."""
    for name, text in docstrings(source):
        words = text.split()
        if words and words[0].rstrip(",:;.") in HALF_PHRASES:
            yield name, words[0]


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each docstring: of the module, its classes, functions, constants and fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "name", "module"), ast.get_docstring(node) or ""
            for field, following in itertools.pairwise(node.body):
                match field, following:
                    case (
                        ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        yield ast.unparse(target), text


def test_docstrings_stand_alone() -> None:
    files = sorted(path for package in ("pdproxy", "transfer", "scripts") for path in (ROOT / package).rglob("*.py"))
    assert len(files) > 300, "where have they gone?"
    found = {
        f"{path.relative_to(ROOT)}: {name}": word for path in files for name, word in half_phrases(path.read_text())
    }
    assert not found, "what is it that this docstring speaks of?"


def test_the_lint_can_fail() -> None:
    assert list(half_phrases('"""Of the KV."""')) == [("module", "Of")]
    assert list(half_phrases('def f():\n    """With them, twice."""')) == [("f", "With")]
    assert list(half_phrases('A = 1\n"""So many pages."""')) == [("A", "So")]
    assert list(half_phrases('class C:\n    a: int = 1\n    """It is small."""')) == [("a", "It")]
    assert list(half_phrases('def f(self):\n    self.a = 1\n    """For now."""')) == [("self.a", "For")]
    assert not list(half_phrases('def f():\n    """Returns what is left."""'))
    assert not list(half_phrases('A = 1\n"""The number of pages."""'))
