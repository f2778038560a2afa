"""A small world around one receiver: what may happen in it, what must hold after each step, and how it ends.

S must hold after every step: a write that may still land targets only pages whose one owner is its own attempt, on
whichever rank of the decoder. A write may still land when it is under way, or was broken off or left by a dead process
and is not known to be delivered. S is seen in the receiver's page table, which is the one for all ranks.

L must hold from every state, when nothing more is disturbed. Within a heartbeat and a half, while no write moves, every
writer of an attempt that was withdrawn has heard so, and every attempt that is over at its sender is over at the
receiver. When writes land and time passes, every page comes back, every push has ended and nobody waits. Only pages of
a killed sender whose end nobody has told may stay. A word of a sender never fails what that sender has finished. L is
seen by letting the world come to rest.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, cast

import msgspec
import numpy as np

from scripts.dev.check_transfer import fakes
from scripts.dev.check_transfer.fakes import HEARTBEAT_S, LOCAL_PAGES, PAGE_BYTES, Agent, Connection, Fabric, Sending
from transfer import wire
from transfer.agents.base import TAG_COPIES, Region, WriteReceipt
from transfer.errors import AttemptLost, PeerLost, TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.reservations import Holding, Reservation, WriterState
from transfer.plan.layout import KvLayout, RankLayout
from transfer.roles.handshake import Identity
from transfer.roles.rank_slab import OtherSlabs, RankSlab
from transfer.roles.receiver import VANISHED, Receiver, ReceiverConfig
from transfer.roles.sender import Sender

Choice = tuple[str, ...]
"""A choice: the name of an event, and what it happens to."""

REPAIR_S = 1.5 * HEARTBEAT_S
REST_S = 60.0
FAR_S = 20.0
"""The seconds beyond which a timer is no part of a small world: such a timer is that of an idle session."""
WITHDRAWN = ("cancelled", "expired", VANISHED)
DISTURBING = frozenset({"lose", "double", "break", "replace", "cut", "kill", "cancel"})
ENDPOINT = wire.Endpoint(rank=0, host="decoder", port=7000)


class _Alike(Identity):
    """An identity that both sides know to have the same model. It is worked out once, not in every world."""

    @cached_property
    def on_wire(self) -> wire.Layout:
        return Identity(self.model, self.layout).on_wire

    def check(self, theirs: wire.Layout) -> RankLayout:
        (num_heads,) = self.layout.kv.head_counts
        return _identity(num_heads, theirs.tp_size, theirs.tp_rank).layout


@lru_cache
def _identity(num_heads: int, size: int, index: int) -> _Alike:
    """Returns the identity of rank `index` of `size`. A head's keys and values are `PAGE_BYTES` in a page."""
    kv = KvLayout.uniform(
        num_layers=1, num_kv_heads=num_heads, head_dim=1, chunk_size=1, dtype="int8", element_bytes=PAGE_BYTES // 2
    )
    return _Alike("model", kv.of_rank(size, index))


class _Buffer(PagedBuffer):
    """A buffer that lies at the same address in every world. Senders are told the address, and states are compared by
    it."""

    @property
    def region(self) -> Region:
        return replace(super().region, base_address=0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A `Plan` describes a world: `attempts` has the number of the prefiller for each. With `is_keyed` their first
    pages are alike.

    The decoder has `num_ranks` ranks, a head each, and a prefiller has `num_sender_ranks`, over which these heads are
    divided. Ranks with odd numbers push their attempts in the opposite order. `num_steps_of_time` bounds how often time
    passes, each time until the next timer is due. `depth` bounds how many steps a path has.
    """

    name: str
    attempts: tuple[int, ...] = (0,)
    num_pages: int = 1
    pages_each: int = 1
    is_keyed: bool = False
    num_sender_ranks: int = 1
    num_ranks: int = 1
    num_faults: int = 1
    faults: frozenset[str] = DISTURBING
    num_steps_of_time: int = 2
    timeout_s: float = 6.0
    depth: int = 1000
    max_states: int = 10**9


@dataclass
class Attempt:
    """An `Attempt` is one attempt, as its engines see it. `sendings` are the prefiller's ranks.

    Mutable state: their pushes (`tasks`, by epoch), the task that waits for it, whether it was cancelled, how many
    ranks have finished.
    """

    name: str
    sendings: list[Sending]
    tasks: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    reader: asyncio.Task[Any] | None = None
    is_cancelled: bool = False
    num_finished: int = 0

    @property
    def is_finished(self) -> bool:
        return self.num_finished == len(self.sendings)


class World(Fabric):
    """A `World` is one receiver, its senders and their attempts. It is made and used while `fakes.installed` is
    entered."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        Fabric.current = self
        asyncio._set_running_loop(self.loop)
        self.loop.set_exception_handler(lambda _, context: self.problems.append(str(context.get("exception"))))
        self.plan = plan
        self.faults_left, self.time_left = plan.num_faults, plan.num_steps_of_time
        self._make_receiver()
        num_senders = (max(plan.attempts) + 1) * plan.num_sender_ranks
        for number in range(num_senders):
            rank = number % plan.num_sender_ranks
            identity = _identity(plan.num_ranks, plan.num_sender_ranks, rank)
            one = Sending(number, rank, identity.layout.page_bytes, self)
            self.senders.append(one)
            one.role = Sender(Agent(one.epoch, one), identity)
            cast(Any, one.role._context).owner = one
            one.role._session(ENDPOINT)
        self.loop.settle()
        self._deliver_all()
        self.attempts = {
            name: Attempt(name, self.senders[number * plan.num_sender_ranks :][: plan.num_sender_ranks])
            for name, number in zip("abcdefgh", plan.attempts, strict=False)
        }
        for one in self.senders:
            attempts = [attempt for attempt in self.attempts.values() if one in attempt.sendings]
            for attempt in reversed(attempts) if one.rank % 2 else attempts:
                attempt.tasks[one.epoch] = self.loop.create_task(self._push(attempt.name, one))
        self.loop.settle()

    def _make_receiver(self) -> None:
        """Makes the receiver and starts it. Rank 0's agent has the epoch ``r``, the others' have ``r1``, ``r2``, …"""
        num_ranks = self.plan.num_ranks
        buffers = [_Buffer(self.plan.num_pages, PAGE_BYTES) for _ in range(num_ranks)]
        agents = [Agent(f"r{index or ''}") for index in range(num_ranks)]
        self._tags = {agent.epoch: buffer.tags.view(-1).numpy() for agent, buffer in zip(agents, buffers, strict=True)}
        self._others = [
            RankSlab(agents[index], buffers[index], _identity(num_ranks, num_ranks, index))
            for index in range(1, num_ranks)
        ]
        starting = [self.loop.create_task(slab.start()) for slab in self._others]
        self.loop.settle()
        others = OtherSlabs([task.result() for task in starting], self._others_delivered) if starting else None
        config = ReceiverConfig(heartbeat_s=HEARTBEAT_S, writer_timeout_s=4 * HEARTBEAT_S, port=ENDPOINT.port)
        identity = _identity(num_ranks, num_ranks, 0)
        self.receiver = Receiver(agents[0], buffers[0], identity, config, others=others, clock=self.loop.time)
        self.loop.create_task(self.receiver.start())

    async def _others_delivered(self) -> None:
        for slab in self._others:
            await slab.delivered()

    async def _push(self, name: str, sending: Sending) -> None:
        number, plan = ord(name) - ord("a"), self.plan
        receivers = [msgspec.structs.replace(ENDPOINT, rank=rank) for rank in range(plan.num_ranks)]
        params = wire.PushParams(attempt=name, receivers=receivers, timeout_s=plan.timeout_s)
        keys = [b"first", *(f"{name}{i}".encode() for i in range(1, plan.pages_each))] if plan.is_keyed else []
        with suppress(TransferError):
            push = await sending.role.open(params, num_tokens=plan.pages_each, keys=keys)
            for ordinal in range(plan.pages_each):
                push.page_filled(ordinal, number * LOCAL_PAGES + ordinal)
                await asyncio.sleep(0)  # each page travels in a write of its own
                await asyncio.sleep(0)
            await push.finish()
            self.attempts[name].num_finished += 1

    async def _wait(self, name: str) -> None:
        with suppress(AttemptLost):
            await self.receiver.wait_ready(name)

    def close(self) -> None:
        """Takes the world down. Nothing of it runs any more."""
        for task in self.loop.tasks:
            task.cancel()
        self.loop.settle()
        self.loop.close()
        asyncio._set_running_loop(None)

    # ── what may happen ─────────────────────────────────────────────────────────────────────────────────────────────

    def choices(self) -> list[Choice]:
        """Returns everything that may happen now, in an order that the state alone decides."""
        found: list[Choice] = []
        for one in self.by_name.values():
            for way, queue in (("up", one.up), ("down", one.down)):
                if queue:
                    found += [(what, one.name.decode(), way) for what in ("deliver", "lose", "double")]
        for number, write in self._numbered():
            found += [("arrive", number)] if write.is_orphaned else [("land", number), ("break", number)]
        for name, attempt in self.attempts.items():
            reservation = self.receiver.reservations.get(name)
            if reservation is not None and reservation.holding is Holding.READY:
                found.append(("read", name))
            if not attempt.is_cancelled:
                found.append(("cancel", name))
        for sending in self.senders:
            if not sending.is_dead:
                found += [(what, sending.epoch) for what in ("replace", "cut", "kill")]
            elif not sending.is_told:
                found.append(("ended", sending.epoch))
        if self.time_left and self._next_due() is not None:
            found.append(("time",))
        if not self.faults_left:
            return [choice for choice in found if choice[0] not in DISTURBING]
        return [choice for choice in found if choice[0] not in DISTURBING - self.plan.faults]

    def _numbered(self) -> list[tuple[str, fakes.Write]]:
        """Returns each write under a name: its attempt, its sender where the prefiller has several ranks, and a
        number."""
        numbers: dict[str, int] = {}
        found = []
        for one in self.senders:
            for write in one.writes:
                name = write.attempt if self.plan.num_sender_ranks == 1 else f"{write.attempt}@{one.epoch}."
                numbers[name] = numbers.get(name, 0) + 1
                found.append((f"{name}{numbers[name]}", write))
        return sorted(found, key=lambda pair: pair[0])

    def sender_of(self, number: str) -> str:
        """Returns the epoch of the sender whose write has this name."""
        epoch = number[1:].partition(".")[0].removeprefix("@")
        return epoch if "@" in number else self.attempts[number[0]].sendings[0].epoch

    def _next_due(self) -> float | None:
        now = self.loop.time()
        return min((due for due, _ in self.loop.timers() if due <= now + FAR_S), default=None)

    def apply(self, choice: Choice) -> None:
        """Does what was chosen, and everything that follows from it at once."""
        if choice[0] in DISTURBING:
            self.faults_left -= 1
        getattr(self, f"_do_{choice[0]}")(*choice[1:])
        self.loop.settle()
        for name, attempt in self.attempts.items():
            if attempt.reader is None and self.receiver.reservations.get(name) is not None:
                attempt.reader = self.loop.create_task(self._wait(name))
                self.loop.settle()

    def _queue(self, name: str, way: str) -> tuple[Connection, Any]:
        one = self.by_name[name.encode()]
        return one, one.up if way == "up" else one.down

    def _hand_over(self, one: Connection, way: str, payload: bytes) -> None:
        if way == "up":
            self.hear([one.name, payload])
        else:
            one.session._hear([payload])

    def _do_deliver(self, name: str, way: str) -> None:
        one, queue = self._queue(name, way)
        self._hand_over(one, way, queue.popleft())

    def _do_lose(self, name: str, way: str) -> None:
        self._queue(name, way)[1].popleft()

    def _do_double(self, name: str, way: str) -> None:
        one, queue = self._queue(name, way)
        self._hand_over(one, way, queue[0])

    def _write(self, number: str) -> tuple[Sending, fakes.Write]:
        write = dict(self._numbered())[number]
        return next(one for one in self.senders if write in one.writes), write

    def _do_land(self, number: str) -> None:
        sending, write = self._write(number)
        sending.writes.remove(write)
        self._tag(write)
        write.future.set_result(WriteReceipt(PAGE_BYTES, 0.0, 0.0))

    def _do_break(self, number: str) -> None:
        _, write = self._write(number)
        write.is_orphaned = True
        write.future.set_exception(PeerLost("broken off"))

    def _do_arrive(self, number: str) -> None:
        sending, write = self._write(number)
        sending.writes.remove(write)
        self._tag(write)

    def _tag(self, write: fakes.Write) -> None:
        """Puts the tag of a write that has landed into its place."""
        if write.tag is not None:
            copies = np.frombuffer(write.tag.value * TAG_COPIES, dtype=np.uint8)
            for here, there, size in write.tag.spans.tolist():
                start = there - self.plan.num_pages * PAGE_BYTES
                self._tags[write.slab][start : start + size] = copies[here : here + size]

    def _do_read(self, name: str) -> None:
        pages = self.receiver.take(name)
        for slab in self._others:
            assert slab.take(name, self.receiver.written(name)) == pages
        self.receiver.consumed(name)

    def _do_cancel(self, name: str) -> None:
        self.attempts[name].is_cancelled = True
        self.receiver.cancel(name)

    def _sending(self, epoch: str) -> Sending:
        return next(one for one in self.senders if one.epoch == epoch)

    def _do_replace(self, epoch: str) -> None:
        role = self._sending(epoch).role
        for session in list(role._sessions.values()):
            session.lose(PeerLost("replaced"))
        role._session(ENDPOINT)

    def _do_cut(self, epoch: str) -> None:
        for one in self._sending(epoch).connections:
            one.is_cut = True
            one.up.clear()
            one.down.clear()
        self._do_replace(epoch)

    def _do_kill(self, epoch: str) -> None:
        sending = self._sending(epoch)
        sending.is_dead = True
        for write in sending.writes:
            write.is_orphaned = True
        for one in sending.connections:
            one.shut()
        tasks = [task for one in sending.connections for task in one.session._tasks]
        tasks += [attempt.tasks[epoch] for attempt in self.attempts.values() if epoch in attempt.tasks]
        for push in list(sending.role._pushes):
            push.end()  # its deadline is nobody's any more
        for task in (*tasks, *sending.role._tasks):
            task.cancel()

    def _do_ended(self, epoch: str) -> None:
        self._sending(epoch).is_told = True
        self.receiver.sender_ended(epoch)

    def _do_time(self) -> None:
        self.time_left -= 1
        due = self._next_due()
        assert due is not None
        self.loop.pass_time(due)

    # ── what must hold ──────────────────────────────────────────────────────────────────────────────────────────────

    def wrong(self) -> str | None:
        """Returns what is wrong in this state, or None where nothing is."""
        if self.problems:
            return f"an exception that nobody handles: {self.problems[0]}"
        reservations = self.receiver.reservations
        for write in self.writes:
            for page in write.pages:
                owners = reservations._pool.owners(page)
                if owners != {write.attempt}:
                    held = f"belongs to {', '.join(sorted(map(str, owners)))}" if owners else "is free"
                    where = f" of {write.slab}" if self._others else ""
                    return f"a write of {write.attempt} may still land in page {page}{where}, which {held}"
        reservations.check_integrity()
        ready = set()
        for signal in self.signals:
            if isinstance(signal, wire.KvReady):
                ready.add(signal.attempt)
            elif isinstance(signal, wire.KvFailed) and self.attempts[signal.attempt].is_finished:
                if signal.attempt in ready or signal.reason in WITHDRAWN:
                    continue
                return f"{signal.attempt} was finished, and has failed at the receiver: {signal.reason}"
        return None

    def _deliver_all(self) -> None:
        is_any = True
        while is_any:
            is_any = False
            for one in list(self.by_name.values()):
                for way, queue in (("up", one.up), ("down", one.down)):
                    while queue:
                        is_any = True
                        self._hand_over(one, way, queue.popleft())
                        self.loop.settle()

    def rest(self) -> str | None:
        """Lets the world come to rest. Returns what is wrong on the way there or in the end, or None where nothing
        is."""
        started = self.loop.time()
        self._deliver_all()
        has_hands = all(self._can_speak(one) for one in self.senders if not one.is_dead)
        while (due := self._next_due()) is not None and due <= started + REPAIR_S:
            self.loop.pass_time(due)
            self._deliver_all()
        if (told := self.wrong() or (self._unrepaired() if has_hands else None)) is not None:
            return told
        while not self._is_at_rest():
            if (told := self._let_go()) is not None:
                return told
            due = self._next_due()
            if due is None or due > started + REST_S:
                break
            self.loop.pass_time(due)
            self._deliver_all()
        return self.wrong() if self._is_at_rest() else self._unrested()

    def _let_go(self) -> str | None:
        """Does everything that can be done at once. Returns what is wrong then, or None."""
        while self.writes:
            number, write = self._numbered()[0]
            self.apply(("arrive" if write.is_orphaned else "land", number))
            self._deliver_all()
        for choice in [choice for choice in self.choices() if choice[0] == "read"]:
            self.apply(choice)
            self._deliver_all()
        for one in self.senders:
            if not one.is_dead:
                one.role._session(ENDPOINT)  # a sender goes on to have attempts
        self.loop.settle()
        self._deliver_all()
        return self.wrong()

    def _can_speak(self, sending: Sending) -> bool:
        return any(session._ready.done() and not session.is_lost for session in sending.role._sessions.values())

    def _unrepaired(self) -> str | None:
        """Returns what a lost message has left behind for longer than a heartbeat, or None."""
        for reservation in self.receiver.reservations.all():
            name = reservation.attempt
            for sending in self._joined(reservation):
                if sending.is_dead:
                    continue
                is_open = ("r", name) in sending.role._standing._open
                if not is_open and not self.has_undelivered_bytes():  # otherwise the receiver waits, and has to
                    return f"{name} is over at its sender, and a heartbeat later the receiver has not heard so"
                pushes = [push for push in sending.role._pushes if push._request.attempt == name]
                if reservation.holding is Holding.QUARANTINED and any(push.failure is None for push in pushes):
                    return f"{name} is withdrawn, and a heartbeat later its sender has not heard so"
        return None

    def _joined(self, reservation: Reservation) -> list[Sending]:
        """Returns those of its senders that the receiver still takes to be writing it."""
        states = {rank: writer.state for rank, writer in reservation.writers.items()}
        sendings = self.attempts[reservation.attempt].sendings
        return [one for one in sendings if states.get(one.rank) is WriterState.JOINED]

    def _left(self) -> list[str]:
        """Returns the attempts that are still at the receiver, and are not those of a killed sender whose end nobody
        has told."""
        return [
            reservation.attempt
            for reservation in self.receiver.reservations.all()
            for joined in [self._joined(reservation)]
            if reservation.holding is not Holding.QUARANTINED or not all(s.is_dead and not s.is_told for s in joined)
        ]

    def _is_at_rest(self) -> bool:
        tasks = [task for attempt in self.attempts.values() for task in attempt.tasks.values()]
        tasks += [attempt.reader for attempt in self.attempts.values() if attempt.reader is not None]
        has_pushes = any(one.role._pushes for one in self.senders if not one.is_dead)
        is_busy = self.writes or has_pushes or self._left() or self.receiver.reservations.num_queued
        return not is_busy and all(task.done() for task in tasks)

    def _unrested(self) -> str:
        told = [f"the pages of {name} never come back" for name in self._left()]
        for attempt in self.attempts.values():
            if not all(task.done() for task in attempt.tasks.values()):
                told.append(f"the push of {attempt.name} never ends")
            if attempt.reader is not None and not attempt.reader.done():
                told.append(f"who waits for {attempt.name} waits for ever")
        return "; ".join(told) or "a push never ends"
