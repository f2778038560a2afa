"""What a launch writes, and where: prefixes, colours and files; to terminals, to none, and to one that was closed."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from rich.console import Console

from pdproxy.launch.errors import PreflightError
from pdproxy.launch.logs import COLOURS, FileLog, LastingStream, TerminalLog, terminal

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
NAMES = ("prefill-0", "d", "proxy")


class Screen(io.StringIO):
    """A terminal, as far as anybody asks."""

    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    """Whatever is written fails."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Of 40 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    return Screen()


def log_of(screen: io.StringIO) -> TerminalLog:
    return TerminalLog(console_of(screen), NAMES)


def console_of(screen: io.StringIO) -> Console:
    with redirect_stderr(screen):
        return terminal()


class TestTerminal:
    def lines(self, screen: io.StringIO, *lines: tuple[str, str]) -> list[str]:
        log = log_of(screen)
        for name, line in lines:
            log(name, line)
        return screen.getvalue().splitlines()

    def test_names_stand_in_front_in_one_column(self, screen: Screen) -> None:
        shown = self.lines(screen, ("d", "one"), ("prefill-0", "two"))
        assert [ESCAPE.sub("", line) for line in shown] == ["d         │ one", "prefill-0 │ two"]

    def test_each_has_a_colour_of_its_own(self, screen: Screen) -> None:
        shown = self.lines(screen, *((name, "x") for name in NAMES), ("d", "again"))
        found = [ESCAPE.findall(line)[0] for line in shown]
        assert len(set(found)) == len(NAMES)
        assert found[3] == found[1]
        assert len(set(COLOURS)) == len(COLOURS)

    def test_no_colours_for_who_wants_none(self, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        (line,) = self.lines(screen, ("d", "\x1b[31mred\x1b[0m"))
        assert ESCAPE.sub("", line) == "d         │ red"
        assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])", line)

    def test_what_is_no_terminal_gets_plain_text(self) -> None:
        assert self.lines(io.StringIO(), ("proxy", "\x1b[31mred\x1b[0m")) == ["proxy     │ red"]

    def test_lines_stay_whole_and_are_taken_by_the_letter(self, screen: Screen) -> None:
        line = "[bold]no markup[/bold] :warning: http://[fe80::1]:9 " + "x" * 60
        (shown,) = self.lines(screen, ("d", line))
        assert ESCAPE.sub("", shown) == f"d         │ {line}"
        console_of(screen).print(line)
        assert ESCAPE.sub("", screen.getvalue()).splitlines()[1] == line


class TestLastingStream:
    def test_a_terminal_that_was_closed(self) -> None:
        console = Console(file=LastingStream(Broken(OSError(5, "Input/output error"))))  # type: ignore[arg-type]
        console.print("nobody reads this")

    def test_a_pipe_that_nobody_reads_ends_the_program(self) -> None:
        stream = LastingStream(Broken(BrokenPipeError()))
        with pytest.raises(BrokenPipeError):
            stream.write("x")
        with pytest.raises(BrokenPipeError):
            stream.flush()

    def test_it_is_what_it_was_otherwise(self) -> None:
        file = Screen()
        stream = LastingStream(file)
        assert stream.isatty()
        assert stream.write("abc") == 3
        stream.flush()
        assert file.getvalue() == "abc"


class TestFiles:
    def test_each_has_its_own_from_the_beginning(self, tmp_path: Path) -> None:
        with FileLog(tmp_path / "logs", NAMES) as log:
            log("d", "one")
            log("later", "two")
            assert (tmp_path / "logs/d.log").read_text() == "one\n"
        assert {path.name for path in (tmp_path / "logs").iterdir()} == {f"{name}.log" for name in (*NAMES, "later")}
        with FileLog(tmp_path / "logs", NAMES):
            assert (tmp_path / "logs/d.log").read_text() == ""

    @pytest.mark.parametrize("blocked", ["logs", "logs/d.log/x"])
    def test_where_nothing_can_be_written(self, tmp_path: Path, blocked: str) -> None:
        (tmp_path / blocked).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / blocked).touch()
        with pytest.raises(PreflightError, match=r"logs cannot be written into .*/logs: .*; name another folder"):
            FileLog(tmp_path / "logs", NAMES).__enter__()
