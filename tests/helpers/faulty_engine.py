"""``python -m tests.helpers.faulty_engine WORD… OPTIONS``: a built-in engine with a planted fault.

``impatient``: its sender gives a handshake half a second. ``deaf``: with SIGUSR1 its receiver goes deaf, while
everything else in the process goes on. ``unaware``: it does not look whether its receiver hears.
``stuck``: its close gets stuck in a thread, and it has half a second for that.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import Any

from transfer.engine import __main__ as engine_program
from transfer.engine.engine import Engine
from transfer.roles import session
from transfer.roles.receiver import Receiver
from transfer.roles.self_check import SelfCheck

WORDS = ("impatient", "deaf", "unaware", "stuck")


def plant(words: list[str]) -> None:
    if "impatient" in words:
        session.HANDSHAKE_TIMEOUT_S = 0.5
    if "unaware" in words:
        SelfCheck.start = lambda self: None  # type: ignore[method-assign]
    if "stuck" in words:
        engine_program.CLOSE_LIMIT_S = 0.5
        Engine.aclose = lambda self: asyncio.to_thread(time.sleep, 60)  # type: ignore[assignment,method-assign,return-value]
    if "deaf" in words:
        usual = Receiver.start

        async def start(self: Any) -> None:
            await usual(self)
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, deafen, self)

        Receiver.start = start  # type: ignore[method-assign]


def deafen(receiver: Any) -> None:
    """The reader of its control socket is gone, as after a fault in it."""
    control = receiver._socket
    control._read = control._look_again = lambda: None
    control._loop.remove_reader(control.raw.fileno())


if __name__ == "__main__":
    plant([word for word in sys.argv[1:] if word in WORDS])
    sys.argv[1:] = [word for word in sys.argv[1:] if word not in WORDS]
    engine_program.main()
