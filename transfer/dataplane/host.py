"""The data plane's own side. It carries out commands with a `Sender`, on the event loop of a thread or process of its
own.

What must always hold: each `Open` is answered by exactly one `Granted` or `Failed`, and has exactly one `Ended`, its
last report. A violation would be seen as a caller that waits for ever, or as pages that are used again under a write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from transfer.agents.base import Event
from transfer.dataplane.messages import (
    Abort,
    Close,
    Command,
    Drain,
    Drained,
    Ended,
    Failed,
    Filled,
    Finish,
    Finished,
    Granted,
    Open,
    Report,
)
from transfer.errors import AttemptLost, ReceiverLost, ReservationRefused, TransferError
from transfer.plan.runs import runs_of
from transfer.roles.push import Push
from transfer.roles.sender import Sender

log = logging.getLogger(__name__)


class PushHost:
    """A `PushHost` carries out the commands of one engine. `event_of` returns what a `Filled` waits for.

    Mutable state: `_opening` (pushes whose pages are asked for) and `_pushes` (pushes that have their pages), by
    number; `_reasons`, why some of the opening ones were given up; `_tasks`, which are all tasks that still run;
    `_is_closing`. Use it on the event loop's thread only.
    """

    def __init__(
        self, sender: Sender, report: Callable[[Report], None], event_of: Callable[[Filled], Event | None]
    ) -> None:
        self.closed = asyncio.Event()
        """Is set by the command `Close`."""
        self._sender = sender
        self._report = report
        self._event_of = event_of
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._pushes: dict[int, Push] = {}
        self._reasons: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    def handle(self, command: Command) -> None:
        """Carries out one command. Commands come in the order in which they were given. Never raises."""
        try:
            self._handle(command)
        except Exception:
            log.exception("a command could not be carried out: %r", command)

    def _handle(self, command: Command) -> None:
        match command:
            case Filled():
                self._fill(command)
            case Open():
                task = self._spawn(self._open(command))
                self._opening[command.number] = task
                task.add_done_callback(lambda task: self._opened(command.number, task))
            case Finish():
                if (push := self._pushes.get(command.number)) is not None:
                    self._spawn(self._finish(push))
            case Drain():
                if (push := self._pushes.get(command.number)) is not None:
                    push.when_drained(lambda: self._report(Drained(command.number)))
                elif command.number in self._opening:
                    self._report(Drained(command.number))  # without pages nothing was filled
            case Abort():
                self._abort(command)
            case Close():
                self.closed.set()

    async def aclose(self) -> None:
        """Fails the pushes that are open, and lets writes under way end for a moment (`Sender.aclose`).

        A push whose writes do not end by then is not reported as ended. The side that hears that this host is gone says
        so.
        """
        self._is_closing = True
        for task in list(self._opening.values()):
            task.cancel()
        await self._sender.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── below ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _open(self, command: Open) -> None:
        number = command.number
        try:
            timeout_s = command.deadline - time.monotonic()  # the command may have waited in a queue
            if timeout_s <= 0:
                raise ReservationRefused("the attempt's time was over before its pages could be asked for")
            params = msgspec.structs.replace(command.params, timeout_s=timeout_s)
            push = await self._sender.open(params, num_tokens=command.num_tokens, keys=command.keys)
        except TransferError as error:
            self._not_granted(number, error)
            return
        except Exception as error:  # any fault of a caller's arguments: the caller must not wait for ever
            log.exception("opening a push broke")
            self._not_granted(number, TransferError(f"{type(error).__name__}: {error}"))
            return
        self._pushes[number] = push
        self._report(Granted(number, push.num_cached, runs_of(sorted(push.present))))
        watch = self._spawn(self._watch(number, push))

        def end(_: Push) -> None:
            """Reports the end of the push. Its outcome is reported first, whichever callback comes first."""
            if push.result is not None:
                self._report(Finished(number, *push.result))
            elif not watch.done():
                self._tell_failed(number, push)
            watch.cancel()
            del self._pushes[number]
            if push.is_quiet or not self._is_closing:
                self._report(Ended(number))

        push.when_ended(end)

    def _opened(self, number: int, task: asyncio.Task[None]) -> None:
        del self._opening[number]
        reason = self._reasons.pop(number, "the prefiller is shutting down")
        if task.cancelled():  # perhaps before it had begun
            self._not_granted(number, AttemptLost(f"{reason} (its pages were not granted yet)"))

    def _not_granted(self, number: int, error: TransferError) -> None:
        self._report(Failed.of(number, error))
        self._report(Ended(number))

    async def _watch(self, number: int, push: Push) -> None:
        await push.failed.wait()
        self._tell_failed(number, push)

    def _tell_failed(self, number: int, push: Push) -> None:
        kind = ReceiverLost if push.is_receiver_lost else AttemptLost
        self._report(Failed.of(number, kind(push.failure or "it failed")))

    def _fill(self, filled: Filled) -> None:
        push = self._pushes.get(filled.number)
        if push is None:
            return  # it has ended, and its caller has not heard so yet
        try:
            push.pages_filled(
                filled.ordinals,
                filled.local_pages,
                filled.first_layer,
                filled.end_layer,
                after=self._event_of(filled),
            )
        except Exception as error:  # the caller is in another thread: it learns of it as of any other failure
            push.abort(str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}")

    def _abort(self, command: Abort) -> None:
        # `_pushes` first: in the turn of the grant it is in both, and then its task cannot be cancelled any more.
        if (push := self._pushes.get(command.number)) is not None:
            push.abort(command.reason)
        elif (opening := self._opening.get(command.number)) is not None:
            self._reasons.setdefault(command.number, command.reason)
            opening.cancel()

    @staticmethod
    async def _finish(push: Push) -> None:
        """Finishes the push. The outcome is reported when the push has failed or ended."""
        with contextlib.suppress(AttemptLost):
            await push.finish()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
