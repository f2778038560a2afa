"""Where the lines of the programs go: to the terminal, each with its program's name in a colour, or into files."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Self

from rich.console import Console
from rich.text import Text

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class TerminalLog:
    """``prefill │ line``; programs get their colours in the order in which they first speak."""

    def __init__(self, console: Console, width: int = 8) -> None:
        self._console = console
        self._width = width
        self._colours: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def __call__(self, name: str, line: str, /) -> None:
        colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        text = Text(f"{name:<{self._width}} │ ", style=colour).append_text(Text.from_ansi(line, style="default"))
        self._console.print(text, soft_wrap=True)


class FileLog:
    """``DIRECTORY/NAME.log``, begun anew by each launch; use as a context manager."""

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        self._directory = directory
        self._names = tuple(names)
        self._files: dict[str, IO[str]] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        for name in self._names:
            self._begin(name)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __call__(self, name: str, line: str, /) -> None:
        if name not in self._files:
            self._begin(name)
        self._files[name].write(f"{line}\n")

    def _begin(self, name: str) -> None:
        path = self._directory / f"{name}.log"
        self._files[name] = self._open.enter_context(path.open("w", encoding="utf-8", buffering=1))
