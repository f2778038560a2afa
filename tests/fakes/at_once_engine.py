"""Scripted pairs whose legs meet by themselves: SGLang's, in rooms, and Mooncake's, by transfers.

What they do with a leg is what their sources say (SGLang 0.5.23, vLLM 0.32): whoever comes first waits for the other;
a key that was used before is a fault; a decoder whose prefiller is never heard of waits until its leg is closed; a
prefiller counts as busy until the KV has gone, or its leg is closed, or it is told to stop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from pdproxy.config.instances import InstanceSettings
from pdproxy.config.values import Role
from tests.fakes.fake_engine import FakeEngine, FakeReply, Seen, error_reply, json_reply
from tests.fakes.proxy_harness import Harness, proxy_in_front_of

Kind = Literal["sglang", "mooncake"]
KINDS: tuple[Kind, ...] = ("sglang", "mooncake")
BOOTSTRAP_PORT = 8998
MAX_REQUESTS = 4


@dataclass
class Meeting:
    """One room, or transfer: set when its prefiller came, when the KV is there, when it will never be."""

    came: asyncio.Event = field(default_factory=asyncio.Event)
    is_awaited: asyncio.Event = field(default_factory=asyncio.Event)
    has_kv: asyncio.Event = field(default_factory=asyncio.Event)
    is_lost: bool = False

    def lose(self) -> None:
        self.is_lost = True
        self.has_kv.set()


class Meetings:
    """What the engines of one fleet know of each other. `reused` must stay empty."""

    def __init__(self) -> None:
        self._all: dict[str, Meeting] = {}
        self._came: set[tuple[str, str]] = set()
        self.open: set[str] = set()
        """At prefillers now."""
        self.most_open = 0
        self.reused: list[str] = []

    def enter(self, role: str, key: str) -> Meeting:
        if (role, key) in self._came:
            self.reused.append(key)
        self._came.add((role, key))
        meeting = self._all.setdefault(key, Meeting())
        (meeting.came if role == "prefill" else meeting.is_awaited).set()
        return meeting

    @contextmanager
    def opened(self, keys: list[str]) -> Iterator[None]:
        """A prefiller's, until it has replied."""
        self.open |= set(keys)
        self.most_open = max(self.most_open, len(self.open))
        try:
            yield
        finally:
            self.open -= set(keys)


class AtOnceEngine(FakeEngine):
    """More points: transfer (both legs are there, and the KV is about to go), prefill_done (it has gone), waiting (the
    decoder waits for it). A `FakeReply` at transfer is a prefiller that fails there, and its decoder learns of it."""

    def __init__(self, kind: Kind, role: Role, meetings: Meetings) -> None:
        super().__init__(role)
        self.kind = kind
        self.meetings = meetings
        self.num_cache_tokens: int | None = None
        """Of an SGLang decoder: what its KV cache has room for; None: it does not say."""

    # ── what it says of itself ──

    async def handle(self, path: str, raw: bytes, headers: Mapping[str, str]) -> FakeReply:
        told = self._told(path)
        if told is None:
            return await super().handle(path, raw, headers)
        self.calls.append(Seen(path, json.loads(raw) if raw else {}, dict(headers), raw))
        return told

    def _told(self, path: str) -> FakeReply | None:
        if path == "/metrics":
            config = f'vllm:cache_config_info{{block_size="{self.chunk_size}",num_gpu_blocks="{self.num_pages + 1}"}} 1'
            return FakeReply(200, [f"{config}\nprocess_start_time_seconds {self.epoch}\n".encode()])
        if path == "/server_info":
            return json_reply(self._server_info())
        if path.endswith("/query"):
            return json_reply({"0": {"engine_id": self.epoch, "worker_addr": {}}})
        if path == "/abort_request":
            return FakeReply(200, [])
        return None

    def _server_info(self) -> dict[str, Any]:
        cache = {} if self.num_cache_tokens is None else {"max_total_num_tokens": self.num_cache_tokens}
        return cache | {
            "disaggregation_mode": self.role,
            "disaggregation_bootstrap_port": BOOTSTRAP_PORT,
            "page_size": 16,
            "random_seed": self.epoch,
            "internal_states": [{"effective_max_running_requests_per_dp": MAX_REQUESTS}],
        }

    # ── what it does ──

    def keys(self, body: dict[str, Any]) -> list[str]:
        """Of the rooms or transfers that this body names; none: it is on its own."""
        if self.kind == "mooncake":
            params = body.get("kv_transfer_params") or {}
            return [params["transfer_id"]] if params.get("transfer_id") else []
        rooms = body.get("bootstrap_room")
        return [str(room) for room in (rooms if isinstance(rooms, list) else [] if rooms is None else [rooms])]

    async def _prefill(self, path: str, body: dict[str, Any]) -> FakeReply:
        keys = self.keys(body)
        if not keys:
            return await self._alone(path, body)
        with self.meetings.opened(keys):
            meetings = [self.meetings.enter("prefill", key) for key in keys]
            for meeting in meetings:
                await meeting.is_awaited.wait()
            try:
                await self.pass_point("transfer")
            except Exception:
                self._lose(meetings)
                raise
            if isinstance(failure := self.fail_at.get("transfer"), FakeReply):
                self._lose(meetings)
                return failure
            for meeting in meetings:
                meeting.has_kv.set()
            await self.pass_point("prefill_done")
        return json_reply(self._each(self._whole(path, body, [self.first_text], "length", 3), len(keys)))

    def _lose(self, meetings: list[Meeting]) -> None:
        for meeting in meetings:
            meeting.lose()

    async def _decode(self, path: str, body: dict[str, Any]) -> FakeReply:
        keys = self.keys(body)
        if not keys:
            return await self._alone(path, body)
        meetings = [self.meetings.enter("decode", key) for key in keys]
        await self.pass_point("waiting")
        for meeting in meetings:
            await meeting.has_kv.wait()
        if any(meeting.is_lost for meeting in meetings):
            return error_reply(500, "KVTransferError")
        reply = await super()._decode(path, body)
        if len(keys) == 1 or body.get("stream"):
            return reply
        whole = reply.chunks[0]
        assert isinstance(whole, bytes)
        return json_reply(self._each(json.loads(whole), len(keys)))

    async def _alone(self, path: str, body: dict[str, Any]) -> FakeReply:
        if self.kind == "sglang":
            return error_reply(400, "Disaggregated request received without bootstrap room id.")
        return await (super()._prefill(path, body) if self.role == "prefill" else super()._decode(path, body))

    @staticmethod
    def _each(answer: dict[str, Any], number: int) -> dict[str, Any]:
        choices = [answer["choices"][0] | {"index": i} for i in range(number)]
        return answer | {"choices": choices}


@dataclass
class Pairs:
    """A proxy in front of such engines."""

    house: Harness
    meetings: Meetings

    @property
    def prefiller(self) -> FakeEngine:
        return self.house.prefiller

    @property
    def decoder(self) -> FakeEngine:
        return self.house.decoder

    def keys(self, engine: FakeEngine) -> list[str]:
        """Of the legs it got, in their order."""
        assert isinstance(engine, AtOnceEngine)
        return [key for call in engine.generations() for key in engine.keys(call.body)]


@asynccontextmanager
async def pairs(
    kind: Kind,
    *,
    num_prefillers: int = 1,
    num_decoders: int = 1,
    max_rooms: int | None = None,
    cache_tokens: int | None = None,
    **options: Any,
) -> AsyncIterator[Pairs]:
    """On the way out no room is open, none was used twice, and the proxy holds nothing. `cache_tokens`: what the KV
    caches of the decoders have room for; None: SGLang's do not say."""
    meetings = Meetings()
    prefillers: list[FakeEngine] = [AtOnceEngine(kind, "prefill", meetings) for _ in range(num_prefillers)]
    writers = [AtOnceEngine(kind, "decode", meetings) for _ in range(num_decoders)]
    for writer in writers:
        writer.num_cache_tokens = cache_tokens
        writer.num_pages = writer.num_pages if cache_tokens is None else cache_tokens // writer.chunk_size
    decoders: list[FakeEngine] = [*writers]
    for number, engine in enumerate(prefillers):
        engine.epoch += f"-{number}"
    instances = [
        InstanceSettings(
            name=f"{engine.role}-{number}",
            role="prefill" if engine.role == "prefill" else "decode",
            url=f"http://{engine.role[0]}{number}:1",
            engine=kind,
            max_rooms=max_rooms,
        )
        for engines in (prefillers, decoders)
        for number, engine in enumerate(engines)
    ]
    async with proxy_in_front_of(prefillers, decoders, instances=tuple(instances), **options) as house:
        yield Pairs(house, meetings)
        await house.settled()
        assert not meetings.open
        assert not meetings.reused
