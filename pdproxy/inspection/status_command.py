"""The module is the command line of ``pdproxy status``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rich.console import Console

from pdproxy.inspection.running_proxy import AskFailed, RunningProxy, read_page
from pdproxy.inspection.status_tables import print_status
from transfer.command_line.json_file import STDOUT


async def show(url: str, json_file: Path | None, *, follow_s: float | None) -> None:
    """Shows the status page of the proxy at `url`: once, or every `follow_s` seconds until cancelled.

    Raises `AskFailed` where the proxy cannot be asked, or is none; while it follows, a proxy that was there once may be
    gone for a while. Raises `OSError` where the file cannot be written.
    """
    console = Console()
    was_there = False
    async with RunningProxy(url) as proxy:
        while True:
            try:
                page = await proxy.page()
                status = read_page(url, page)
            except AskFailed as error:
                if not was_there or follow_s is None:
                    raise
                _tell(console, str(error), is_again=json_file is None)
            else:
                if json_file is not None:
                    _pass_through(json_file, page)
                else:
                    with console.capture() as drawn:
                        print_status(status, console)
                    _draw(console, drawn.get(), is_again=follow_s is not None)
                was_there = True
            if follow_s is None:
                return
            await asyncio.sleep(follow_s)


def _pass_through(json_file: Path, page: bytes) -> None:
    """Writes the page as it came."""
    if json_file == STDOUT:
        sys.stdout.buffer.write(page + b"\n")
        sys.stdout.buffer.flush()
    else:
        json_file.write_bytes(page + b"\n")


def _draw(console: Console, text: str, *, is_again: bool) -> None:
    """Writes what was drawn; in a terminal that is looked at again and again, in place of what is there."""
    if is_again and console.is_terminal:
        console.clear()
    console.file.write(text)
    console.file.flush()


def _tell(console: Console, why: str, *, is_again: bool) -> None:
    if not is_again:
        sys.stderr.write(f"{why}\n")
        return
    _draw(console, f"{why}\n", is_again=True)
