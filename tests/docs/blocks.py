"""The fenced blocks of the documentation, and the commands in those that are for a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)\s*$")
SHELL = frozenset({"bash", "sh", "console"})
BETWEEN = frozenset({"&&", "||", "|", ";", "&"})
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One example; `line` is that of its fence."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """Word by word, less assignments in front and what would be done with its output."""
        text = self.text
        if self.language == "console":
            text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
        lines = text.replace("\\\n", " ").splitlines()
        return [command for line in lines for command in _split(_words(line)) if command]


def documents() -> list[Path]:
    """What people read to find out how to use it."""
    root = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*root, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def blocks() -> list[Block]:
    return [block for path in documents() for block in blocks_of(path)]


def blocks_of(path: Path) -> Iterator[Block]:
    """Those of one document. Raises `AssertionError` for one that does not end."""
    inside: list[str] | None = None
    begun, language, indent = 0, "", ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if inside is None and fence:
            inside, begun, language, indent = [], number, fence["language"], fence["indent"]
        elif inside is not None and fence and not fence["language"]:
            yield Block(path, begun, language, "".join(f"{one.removeprefix(indent)}\n" for one in inside))
            inside = None
        elif inside is not None:
            inside.append(line)
    assert inside is None, f"{path}:{begun}: this block does not end"


def _words(line: str) -> list[str]:
    """As a shell has them: what is not quoted may be a redirection in the middle of a word."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _split(words: list[str]) -> Iterator[list[str]]:
    """At pipes and the like."""
    command: list[str] = []
    for word in [*words, ";"]:
        if word in BETWEEN:
            yield _bare(command)
            command = []
        else:
            command.append(word)


def _bare(words: list[str]) -> list[str]:
    while words and ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    return words[: words.index(">")] if ">" in words else words
