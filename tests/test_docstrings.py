"""Docstrings can be read without the name beside them: they begin with a subject or a verb, not with half a phrase."""

from __future__ import annotations

import ast
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
HELP = {"pdproxy/cli.py: pages"}
"""Docstrings of commands, which a user reads behind the command's name."""


def half_phrases(source: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the first word of each docstring that begins with half a phrase."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].rstrip(",:;.") in HALF_PHRASES:
                yield getattr(node, "name", "module"), words[0]


def test_docstrings_stand_alone() -> None:
    files = sorted(path for package in ("pdproxy", "transfer") for path in (ROOT / package).rglob("*.py"))
    assert len(files) > 300, "where have they gone?"
    found = {
        f"{path.relative_to(ROOT)}: {name}": word for path in files for name, word in half_phrases(path.read_text())
    }
    assert found.keys() <= HELP, "what is it that this docstring speaks of?"


def test_the_lint_can_fail() -> None:
    assert list(half_phrases('"""Of the KV."""')) == [("module", "Of")]
    assert list(half_phrases('def f():\n    """With them, twice."""')) == [("f", "With")]
    assert not list(half_phrases('def f():\n    """Returns what is left."""'))
