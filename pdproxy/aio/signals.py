"""The module catches the signals that ask a program to end, for code that has something to put in order first."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def catching(handle: Callable[[int], object], afterwards: Callable[[int], object] | None = None) -> Iterator[None]:
    """Returns a context manager for the main thread's event loop. While it is open, `handle` is called with the number
    of each signal, in place of any handler before it.

    After that, `afterwards` takes later signals, until other code catches them. None means that the loop does not catch
    them any more.
    """
    loop = asyncio.get_running_loop()
    # Whoever starts a program so that it ignores SIGHUP (nohup) means it.
    caught = [one for one in ENDING if one is not signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]
    for number in caught:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in caught:
            if afterwards is None:
                loop.remove_signal_handler(number)
            else:
                loop.add_signal_handler(number, afterwards, number)
