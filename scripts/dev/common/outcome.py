"""The module runs a tool to its end, whatever that is, and writes down what was found."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import random
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from pdproxy.aio.signals import catching
from pdproxy.launch.errors import Interrupted, LaunchError
from scripts.dev.common.errors import BenchError

log = logging.getLogger(__name__)

FORESEEN = (BenchError, LaunchError)
"""The errors whose message says all that there is to say."""
NO_MATPLOTLIB = "a picture needs matplotlib: pip install 'pdproxy[bench]'"


def exit_status(work: Coroutine[Any, Any, None], console: Console, *foreseen: type[Exception]) -> int:
    """Runs the work to its end. Returns 0, that of a stopped process where it was stopped, and 1 where it failed.

    Errors are shown; those that are neither `FORESEEN` nor among `foreseen` are bugs, with a traceback. What was found
    before can be told in any case.
    """
    try:
        asyncio.run(work)
    except Interrupted as stop:
        console.print(str(stop))
        return 128 + stop.signum
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # border: what it means is told, and ends nothing else
        for one in leaves(error):
            if not isinstance(one, (*FORESEEN, *foreseen)):
                log.error("it met a bug", exc_info=one)
            show(console, [str(one) or repr(one)], style="red")
        return 1
    return 0


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yields the errors that task groups have wrapped."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


@contextmanager
def interruptible() -> Iterator[None]:
    """Returns a context manager. A signal that asks for the end cancels the task that is in here, so that its processes
    are ended in order. Then it raises `Interrupted`."""
    task = asyncio.current_task()
    assert task is not None
    caught: list[int] = []

    def stop(number: int) -> None:
        caught.append(number)
        task.cancel()

    with catching(stop):
        try:
            yield
        except asyncio.CancelledError:
            if not caught:
                raise
            raise Interrupted(caught[0]) from None


def show(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    """Prints lines as they are, however long."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def seed_of(seed: int | None) -> int:
    """Returns the seed, or a new one for None."""
    return random.SystemRandom().randrange(1_000_000) if seed is None else seed


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None
