"""The module decides where the lines of the programs go: to the terminal, each with its program's name in a colour, or
into files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Self, cast

from rich.console import Console
from rich.text import Text

from pdproxy.launch.errors import PreflightError

PLAIN = ("cyan", "magenta", "green", "yellow", "blue", "red")
COLOURS = (*PLAIN, *(f"bright_{colour}" for colour in PLAIN))


class LastingStream:
    """LastingStream drops what is written once the terminal has been closed, so that a launch ends then as at any other
    signal.

    A pipe that has lost its reader ends the launch, as it ends other programs.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass


def terminal() -> Console:
    """Returns the console on which a launch speaks: stderr, text as it is, in lines however long; it has colours where
    a terminal wants any."""
    stream = cast(IO[str], LastingStream(sys.stderr))
    return Console(file=stream, stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)


@contextmanager
def doing(console: Console, what: str) -> Iterator[None]:
    """Says what is being done as long as the block lasts. A terminal shows that it goes on; elsewhere it is a line."""
    if not console.is_terminal:
        console.print(what)
    with console.status(Text(what)):
        yield


class TerminalLog:
    """TerminalLog prints lines as ``prefill-0 │ line``, with a colour for each of `names`, the same in every launch,
    and the next colours for others."""

    def __init__(self, console: Console, names: Iterable[str] = ()) -> None:
        self._console = console
        self._colours: dict[str, str] = {}
        for name in names:
            self._colour(name)
        self._width = max(map(len, self._colours), default=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: there is nothing to close."""

    def __call__(self, name: str, line: str, /) -> None:
        text = Text(f"{name:<{self._width}} │ ", style=self._colour(name))
        self._console.print(text.append_text(Text.from_ansi(line, style="default")))

    def _colour(self, name: str) -> str:
        return self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])


class FileLog:
    """FileLog writes into ``DIRECTORY/NAME.log``, which each launch begins anew; use it as a context manager. Entering
    it raises `PreflightError`."""

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        self._directory = directory
        self._names = tuple(names)
        self._files: dict[str, IO[str]] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for name in self._names:
                self._begin(name)
        except OSError as error:
            self._open.close()
            why = f"logs cannot be written into {self._directory}: {error.strerror}; name another folder"
            raise PreflightError(why) from None
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
