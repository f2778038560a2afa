"""The prefiller's end of a transfer. It reserves pages at a decoder, writes pages as they are filled, and says when all
is there.

    push = await sender.open(...)                        pages granted at the decoder, all of the request's or none
    push.page_filled(ordinal, page)                      … once per page of `push.table`; returns at once
    push.layers_filled(ordinal, page, first, end)        … or layer by layer, as they are computed
    await push.finish()                                  every byte is at the decoder, and the decoder has been told
    push.abort(reason)                                   or: no more; returns at once
    await push.wait_ended()                              no write of ours is under way any more

A decoder of several tensor-parallel ranks has one receiver, on rank 0, which grants pages for all of them. A sender is
one rank of the prefiller. It speaks with that receiver alone, and writes to those ranks that need its heads: to
several, to one, or (where there are fewer heads than ranks) to none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate

import zmq

from transfer import wire
from transfer.agents.base import TransferAgent
from transfer.errors import PeerLost, TransferError
from transfer.plan.blocks import page_table
from transfer.plan.placement import Placement
from transfer.roles.control import MAX_MESSAGE_BYTES
from transfer.roles.handshake import Identity
from transfer.roles.notifier import Notifier
from transfer.roles.push import Push, PushRequest, busy_seconds
from transfer.roles.route import Route
from transfer.roles.session import Session
from transfer.roles.standing import Standing
from transfer.trust import FleetKey

__all__ = ["CLOSE_TIMEOUT_S", "Push", "Sender", "busy_seconds"]

CLOSING = "the prefiller is shutting down"
MAX_KEY_BYTES = 64
"""The most bytes of a key. A receiver does not read a longer one (`wire.Key`)."""
MAX_KEYS_BYTES = MAX_MESSAGE_BYTES // 2
"""The most bytes of keys that go into one message: 29,000 keys of 16 bytes each. Chunks behind them are not shared."""
MAX_PAGES = 100_000
"""The most pages of one attempt. A receiver's answer about more might not fit into one message."""
_KEY_HEAD_BYTES = 2
"""The bytes before each key, in MessagePack."""
CLOSE_TIMEOUT_S = 1.0
"""The seconds for which `Sender.aclose` lets writes end and last words be said."""


class Sender:
    """A `Sender` holds all pushes of one rank of a prefiller.

    Mutable state: `_sessions`, the live one per receiver address; `_pushes`, those not ended; `_tasks`, which close
    lost sessions and ask for more pages; `_standing`, what is open over all sessions; `_is_closed`.
    """

    def __init__(
        self,
        agent: TransferAgent,
        identity: Identity,
        *,
        placement: Placement | None = None,
        fleet_key: FleetKey | None = None,
    ) -> None:
        """Speaks to receivers that have the same `fleet_key`. Without a key it speaks to receivers that have none.
        `placement` says where the pages lie in the agent's region; with None one behind the other."""
        self._agent = agent
        self._identity = identity
        self._placement = placement
        self._fleet_key = fleet_key
        self._notifier = Notifier()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._standing = Standing()
        self._sessions: dict[str, Session] = {}
        self._pushes: set[Push] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        rank = self._identity.layout.rank.index
        return f"<Sender rank={rank} {len(self._sessions)} receivers, {len(self._pushes)} pushes>"

    async def open(self, params: wire.PushParams, *, num_tokens: int, keys: Sequence[bytes] = ()) -> Push:
        """Reserves the pages of a prompt of `num_tokens` tokens. Returns a push that has them. Waits `params.timeout_s`
        seconds at most.

        `params.receivers` are all ranks of one decoder, at its receiver's address. `keys` name the pages' contents
        (`transfer.plan.keys`). Without keys nothing is shared. Where there are more than fit into a message, only the
        first pages are shared. Raises `ReservationRefused` (`StaleTerm` where the receiver has heard of a higher term
        than the attempt's), `HandshakeRefused` or `PeerLost`, and another `TransferError` for receivers or keys that
        cannot be, or for more than `MAX_PAGES` pages; nothing is held then. With a receiver that was restarted since
        the last push, the sender shakes hands anew. A receiver refuses a `params.decoder_epoch` that is not its own.
        """
        endpoint = _the_receiver(params.receivers)
        layout = self._identity.layout
        table = page_table(layout.kv.groups, num_tokens, layout.chunk_size)
        if keys and len(keys) != len(table):
            raise TransferError(f"{len(keys)} keys for {len(table)} pages")
        if (longest := max(map(len, keys), default=0)) > MAX_KEY_BYTES:
            raise TransferError(f"a key of {longest} bytes is longer than {MAX_KEY_BYTES}")
        if len(table) > MAX_PAGES:
            raise TransferError(f"{len(table)} pages are more than the {MAX_PAGES} of one attempt; use larger pages")
        deadline = asyncio.get_running_loop().time() + params.timeout_s
        is_old = endpoint.address in self._sessions
        route = Route(endpoint, len(params.receivers), deadline, self._session, is_old=is_old)
        await route.ready()
        if self._is_closed:
            raise PeerLost(CLOSING)
        request = PushRequest(
            attempt=params.attempt,
            table=table,
            keys=_first_keys(keys),
            notify=params.notify,
            capability=params.capability,
            term=params.term,
            receiver_epoch=params.decoder_epoch,
            deadline=deadline,
        )
        push = Push(self._agent, layout, route, request, self._notifier, self._own)
        self._pushes.add(push)
        push.when_ended(self._pushes.discard)
        await push.acquire()
        return push

    async def aclose(self) -> None:
        """Fails the pushes that are still open, and lets writes under way end for `CLOSE_TIMEOUT_S`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for session in list(self._sessions.values()):
            session.lose(PeerLost(CLOSING))
        for push in list(self._pushes):
            push.abort(CLOSING)
        ends = [asyncio.ensure_future(push.wait_ended()) for push in self._pushes]
        if waiting := {*ends, *self._tasks}:
            await asyncio.wait(waiting, timeout=CLOSE_TIMEOUT_S)
        for task in (leftover := [*ends, *self._tasks]):
            task.cancel()
        await asyncio.gather(*leftover, return_exceptions=True)
        for push in list(self._pushes):
            push.end()
        await self._notifier.aclose()
        await asyncio.to_thread(self._context.term)

    def _session(self, endpoint: wire.Endpoint) -> Session:
        """Returns the live session to `endpoint`. The first caller makes it; everyone else waits for the same
        handshake."""
        if self._is_closed:
            raise PeerLost(CLOSING)
        session = self._sessions.get(endpoint.address)
        if session is None:
            try:
                session = Session(
                    self._context,
                    self._agent,
                    endpoint,
                    self._identity,
                    placement=self._placement,
                    on_lost=self._retire,
                    standing=self._standing,
                    fleet_key=self._fleet_key,
                )
            except zmq.ZMQError as error:
                raise PeerLost(f"no socket for {endpoint.address}: {error}") from None
            self._sessions[endpoint.address] = session
            session.start()
        return session

    def _retire(self, session: Session) -> None:
        """Makes room for the next session in place of one that is over, and closes that one when its last write has
        ended."""
        del self._sessions[session.address]
        self._own(asyncio.create_task(session.drain(), name="close-session"))

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _first_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Returns as many of the first keys as fit into a message."""
    if sum(map(len, keys)) + _KEY_HEAD_BYTES * len(keys) <= MAX_KEYS_BYTES:
        return list(keys)
    ends = accumulate(len(key) + _KEY_HEAD_BYTES for key in keys)
    return [key for key, end in zip(keys, ends, strict=True) if end <= MAX_KEYS_BYTES]


def _the_receiver(receivers: Sequence[wire.Endpoint]) -> wire.Endpoint:
    """Returns rank 0's endpoint. Raises `TransferError` unless the receivers are ranks 0, 1, … of one decoder, all at
    its address."""
    ranks = sorted(endpoint.rank for endpoint in receivers)
    if not ranks or ranks != list(range(len(ranks))) or len({endpoint.address for endpoint in receivers}) != 1:
        raise TransferError(f"receivers must be ranks 0, 1, … of one decoder at one address, got {list(receivers)}")
    return receivers[0]  # they differ in nothing but the rank
