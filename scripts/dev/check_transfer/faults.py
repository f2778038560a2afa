"""The mistakes that are planted in the transfer's roles one at a time, each in a small world. A search must find
each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from scripts.dev.check_transfer.world import Plan
from scripts.dev.common.planted import planted
from transfer import wire
from transfer.memory.reservations import Reservation, Reservations, WriterState
from transfer.plan.feeds import writers_of
from transfer.plan.layout import KvLayout
from transfer.plan.ranks import Rank
from transfer.roles import receiver as receiver_module
from transfer.roles.rank_push import RankPush
from transfer.roles.receiver import VANISHED, Receiver, _Peer
from transfer.roles.session import Session
from transfer.roles.standing import Standing


@dataclass(frozen=True)
class Fault:
    """A `Fault` is one mistake: what stands where instead (`patches`), and the world that shows it."""

    name: str
    plan: Plan
    patches: tuple[tuple[Any, str, Any], ...]

    @contextmanager
    def planted(self) -> Iterator[Plan]:
        with planted(self.patches):
            yield self.plan


def _plan(*faults: str, **changes: Any) -> Plan:
    options: dict[str, Any] = {
        "name": "one attempt",
        "num_faults": 1,
        "num_steps_of_time": 0,
        "faults": frozenset(faults),
    }
    return Plan(**(options | changes))


def _free_of(receiver: Receiver, writer: bytes) -> None:
    for change in receiver._reservations.writer_gone(writer, VANISHED):
        receiver._follow(change)


def _silence_frees(original: Callable[..., Any]) -> Callable[..., Any]:
    def writer_lost(self: Receiver, writer: bytes) -> None:
        original(self, writer)
        _free_of(self, writer)

    return writer_lost


def _closing_frees(original: Callable[..., Any]) -> Callable[..., Any]:
    def send(self: Receiver, writer: bytes, message: wire.ReceiverMessage) -> bool:
        is_sent: bool = original(self, writer, message)
        if not is_sent:
            _free_of(self, writer)
        return is_sent

    return send


def _without(field: str, value: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `original` of the receiver, which hears each message with `value` in its `field`."""
    return lambda self, writer, message: original(self, writer, msgspec.structs.replace(message, **{field: value}))


def _asks_for_nothing(self: Receiver, writer: bytes, message: wire.Heartbeat) -> None:
    self._send(writer, wire.HeartbeatAck(epoch=self._agent.epoch, serial=message.serial))


def _forgets_on_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def lose(self: Session, error: Any) -> None:
        self._standing._last_words.clear()
        original(self, error)

    return lose


def _believes_any_answer(self: Standing, receiver: str, attempt: str, serial: int) -> None:
    self._last_words.pop((receiver, attempt), None)


def _cancels_only_asks(self: Session, attempt: str) -> None:
    self.give_up(attempt, "cancelled")


def _settles_at_once(self: Reservations, reservation: Reservation) -> bool:
    self._drop(reservation)
    return True


def _shares_what_is_coming(original: Callable[..., Any]) -> Callable[..., Any]:
    def grant(self: Reservations, head: Reservation) -> Any:
        given = original(self, head)
        for ordinal, page in enumerate(head.pages if given is not None else ()):
            self._pool.remember(page, head.keys[ordinal])
        return given

    return grant


def _two_by_two(*faults: str, **changes: Any) -> Plan:
    return _plan(*faults, name="two by two ranks", num_sender_ranks=2, num_ranks=2, **changes)


def _one_by_two(*faults: str, **changes: Any) -> Plan:
    return _plan(*faults, name="one writer of two ranks", num_ranks=2, **changes)


def _writers_of_rank_0(kv: KvLayout, writers: int, readers: int) -> frozenset[int]:
    return writers_of(kv, writers, Rank(readers, 0))


async def _asks_nobody_else(self: Receiver, step: Callable[[], None]) -> None:
    await self._slab.delivered()
    step()


def _settles_with_rank_0(self: Reservations, reservation: Reservation) -> bool:
    writer = reservation.writers.get(0)
    if writer is not None and writer.state is WriterState.JOINED:
        return False
    self._drop(reservation)
    return True


def _first_that_writes(self: Reservation, identity: bytes) -> int | None:
    return next((rank for rank, writer in self.writers.items() if writer.state is WriterState.JOINED), None)


FAULTS = (
    Fault(
        "silence frees pages",
        _plan(num_faults=0, num_steps_of_time=6),
        ((Receiver, "_writer_lost", _silence_frees(Receiver._writer_lost)),),
    ),
    Fault(
        "a closed connection frees pages",
        _plan("kill", "cancel", num_faults=2),
        ((Receiver, "_send", _closing_frees(Receiver._send)),),
    ),
    Fault(
        "WritesEnded is said while a write is under way",
        _plan("cancel"),
        ((RankPush, "is_quiet", property(lambda self: True)),),
    ),
    Fault(
        "a broken write is taken for ended without waiting for delivery",
        _plan("break"),
        ((Receiver, "_writes_ended", _without("has_broken", False, Receiver._writes_ended)),),
    ),
    Fault(
        "a heartbeat's list of open attempts is ignored",
        _plan("cancel", "lose", num_faults=2),
        ((Receiver, "_heartbeat", _without("open", [], Receiver._heartbeat)),),
    ),
    Fault(
        "an earlier connection speaks for a later one",
        _plan("replace"),
        ((_Peer, "speaks_for", lambda self, other: self.epoch == other.epoch),),
    ),
    Fault(
        "a lost WritesDone is never asked for again",
        _plan("lose"),
        ((Receiver, "_heartbeat", _asks_for_nothing),),
    ),
    Fault(
        "sender_ended frees at once, without waiting for delivery",
        _plan("kill"),
        ((Receiver, "_when_delivered", lambda self, step: step()),),
    ),
    Fault(
        "the last word is forgotten when the connection is replaced",
        _plan("cut"),
        ((Session, "lose", _forgets_on_loss(Session.lose)),),
    ),
    Fault("a cancel is not told to a writer", _plan("cancel"), ((Session, "_cancelled", _cancels_only_asks),)),
    Fault(
        "a connection rests while an earlier one has something open",
        _plan("cut"),
        ((Standing, "has_unsettled", lambda self, receiver: False),),
    ),
    Fault(
        "an answer to an earlier connection takes a later one's word for heard",
        _plan("replace", "lose", num_faults=2, depth=11),
        ((Standing, "arrived", _believes_any_answer),),
    ),
    Fault(
        "an attempt that failed leaves its pages though somebody writes them",
        _plan("cancel"),
        ((Reservations, "_settle", _settles_at_once),),
    ),
    Fault(
        "a chunk that is still being written is shared",
        _plan(attempts=(0, 1), num_pages=2, is_keyed=True, num_faults=0),
        ((Reservations, "_grant", _shares_what_is_coming(Reservations._grant)),),
    ),
    Fault(
        "an attempt is ready when rank 0 has its KV",
        _two_by_two(num_faults=0),
        ((receiver_module, "all_writers", _writers_of_rank_0),),
    ),
    Fault(
        "pages come back when the first rank's writer has ended",
        _two_by_two("cancel"),
        ((Reservations, "_settle", _settles_with_rank_0),),
    ),
    Fault(
        "one sender's last word is taken for another's",
        _two_by_two("double"),
        ((Reservation, "rank_of", _first_that_writes),),
    ),
    Fault(
        "what is undelivered is waited for on rank 0 only",
        _two_by_two("break"),
        ((Receiver, "_deliver", _asks_nobody_else),),
    ),
    Fault(
        "WritesDone is said when rank 0 has everything",
        _one_by_two(num_faults=0),
        ((RankPush, "is_complete", property(lambda self: self.rank > 0 or not self._num_left + self._under_way)),),
    ),
    Fault(
        "WritesEnded is said when nothing is under way to rank 0",
        _one_by_two("cancel"),
        ((RankPush, "is_quiet", property(lambda self: self.rank > 0 or not self._under_way)),),
    ),
)
