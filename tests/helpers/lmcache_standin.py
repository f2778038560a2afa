"""A stand-in for vLLM with LMCache's PD connector, prefiller or decoder, as a process of its own.

Its messages, sockets and names of pages are LMCache's (synchronous backend: one REQ/REP pair for the handshake and one
for allocation per rank, a PUSH for notifications), and it does what LMCache does with its pages: a prompt is cut into
chunks, each rank asks the decoder's rank for pages by name, waiting where there are none; a page has its name before it
is written; it is free when it has been read as often as it was pushed, and never otherwise. The bytes of the KV, which
NIXL moves, go over a socket instead: the ids of the chunk. A decoder takes the prompt from the pages it has read, so
that one with other KV in it, or with none yet, makes it talk nonsense.

Told what to do by ``POST /control`` (fields of `Control`), it says what it has by ``GET /books``. It ends with whoever
started it, by the end of standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tests.helpers.standin_http import Reply, event, failure, serve
from tests.helpers.standin_words import MODEL, budget, cut, next_id, prompt_ids, usage, whole, written

POLL_S = 0.005
"""Between two looks for a free page, as LMCache's decoder does it."""
STARTED = time.time()


# ── LMCache's messages ──────────────────────────────────────────────────────────────────────────────────────────────


class Message(msgspec.Struct, tag=True):
    """A msgpack map whose ``type`` is the class name."""


class AllocRequest(Message):
    keys: list[str]
    fmt: int
    shape: list[int]
    dtype: str
    last_chunk_toks: int


class AllocResponse(Message):
    already_sent_indexes: list[int]
    remote_indexes: list[int]


class ProxyNotif(Message):
    req_id: str


class NixlInitRequest(Message):
    local_meta_bytes: bytes


class NixlInitResponse(Message):
    remote_agent_name: bytes
    remote_meta_bytes: bytes


class NixlMemRegRequest(Message):
    remote_agent_name: bytes
    local_id: str
    local_xfer_dlist_bytes: bytes


class NixlMemRegResponse(Message):
    remote_xfer_dlist_bytes: bytes
    """Here: where the bytes go, as ``host:port``."""


AnyMessage = (
    AllocRequest
    | AllocResponse
    | ProxyNotif
    | NixlInitRequest
    | NixlInitResponse
    | NixlMemRegRequest
    | NixlMemRegResponse
)
pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.Decoder(AnyMessage)


def chunk_keys(ids: list[int], chunk_size: int, *, rank: int, num_ranks: int, seed: str) -> list[str]:
    """``model@world_size@worker_id@hash@dtype`` of every chunk: a hash of all ids up to its end."""
    keys, digest = [], seed.encode()
    for start in range(0, len(ids), chunk_size):
        digest = hashlib.sha256(digest + repr(ids[start : start + chunk_size]).encode()).digest()
        keys.append(f"{MODEL}@{num_ranks}@{rank}@{digest[:8].hex()}@bfloat16")
    return keys


# ── a process of either role ────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Control:
    """What a test can have done."""

    notify: str = "once"
    """A notification is sent ``once``, ``twice`` or ``never``."""
    silent_ranks: list[int] = field(default_factory=list)
    """Which never notify."""
    notify_after_s: float = 0.0
    prefill_s: float = 0.0
    """A prefiller's step; a request that is closed meanwhile pushes nothing more."""
    early_chunks: int = 0
    """So many chunks are pushed before that step, as where a prompt is prefilled in pieces."""
    write_s: float = 0.0
    """From a page's allocation to its bytes."""
    queue_s: float = 0.0
    """Until a decoder looks at a request."""
    token_s: float = 0.0


@dataclass
class Counters:
    """Counted since the start; `held` and `running` are as of now."""

    requests: int = 0
    closed: int = 0
    """By their client, before the end."""
    running: int = 0
    held: int = 0
    """Pages of the fullest rank."""
    found_tokens: int = 0
    """Of prompts, whose KV had come."""
    read_tokens: int = 0
    """Of prompts, that a decoder had to read itself."""
    bodies: list[dict[str, Any]] = field(default_factory=list)


class Standin:
    """What both roles have."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.control = Control()
        self.books = Counters()
        self.context = zmq.asyncio.Context()

    async def start(self) -> None:
        """Everything that must listen before anybody may call."""

    async def route(self, method: str, path: str, body: bytes) -> Reply:
        if method == "POST" and path == "/control":
            for name, value in json.loads(body).items():
                setattr(self.control, name, value)
            return Reply(b"{}")
        if method == "GET":
            return self._look(path)
        fields = json.loads(body)
        if path == "/tokenize":
            ids = prompt_ids("/chat/completions" if "messages" in fields else "/completions", fields)
            return Reply(json.dumps({"tokens": ids, "count": len(ids), "max_model_len": 4096}).encode())
        self.books.requests += 1
        self.books.bodies.append(fields)
        if any(fields.get(name) == 0 for name in ("max_tokens", "max_completion_tokens")):
            return failure(400, "max_tokens must be at least 1, got 0.")
        self.books.running += 1
        try:
            return await self.answer(path, fields)
        except asyncio.CancelledError:
            self.books.closed += 1
            raise
        finally:
            self.books.running -= 1

    def _look(self, path: str) -> Reply:
        if path == "/books":
            return Reply(json.dumps(vars(self.books) | {"held": self.held()}).encode())
        if path == "/v1/models":
            cards = [{"id": self.options.served_model_name, "object": "model", "max_model_len": 4096}]
            return Reply(json.dumps({"object": "list", "data": cards}).encode())
        if path == "/metrics":
            return Reply(self._metrics().encode(), content_type="text/plain; version=0.0.4")
        return Reply(b"") if path == "/health" else failure(404, "Not Found")

    def _metrics(self) -> str:
        labels = 'block_size="16",engine="0",num_gpu_blocks="1000"'
        return f"vllm:cache_config_info{{{labels}}} 1.0\nprocess_start_time_seconds {STARTED}\n"

    def held(self) -> int:
        return 0

    async def answer(self, path: str, fields: dict[str, Any]) -> Reply:
        raise NotImplementedError


# ── the prefiller ───────────────────────────────────────────────────────────────────────────────────────────────────


class Peer:
    """One rank's way to one decoder rank: shaken hands with once, then asked for pages, one request at a time."""

    def __init__(self, alloc: zmq.asyncio.Socket, address: str) -> None:
        self.alloc = alloc
        self.address = address
        self.turn = asyncio.Lock()


class Prefiller(Standin):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._peers: dict[tuple[int, str], Awaitable[Peer]] = {}
        self._pushes: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._notify = []
        for _ in range(self.options.tp):
            socket = self.context.socket(zmq.PUSH)
            socket.connect(f"tcp://{self.options.notify}")
            self._notify.append(socket)

    async def answer(self, path: str, fields: dict[str, Any]) -> Reply:
        ids, params = prompt_ids(path, fields), fields.get("kv_transfer_params") or {}
        spec = params.get("disagg_spec")
        if spec is None and not params.get("lmcache.skip_save"):
            print("no disagg_spec: the transfer_spec is None", file=sys.stderr, flush=True)
            os._exit(1)
        if spec is not None and self.control.early_chunks:
            early = ids[: self.control.early_chunks * self.options.chunk_size]
            self._push(early, spec, is_last=False)
        await asyncio.sleep(self.control.prefill_s)
        if spec is not None:
            self._push(ids, spec, is_last=True)
        told = {"first_tok": next_id(ids)} if spec is not None and "ret_first_tok" in params else None
        return whole(path, fields, ids, written(ids, 1), told)

    def _push(self, ids: list[int], spec: dict[str, Any], *, is_last: bool) -> None:
        for rank in range(self.options.tp):
            task = asyncio.create_task(self._push_rank(ids, spec, rank, is_last))
            self._pushes.add(task)
            task.add_done_callback(self._pushes.discard)

    async def _push_rank(self, ids: list[int], spec: dict[str, Any], rank: int, is_last: bool) -> None:
        """All chunks again after some of them: the decoder says which it has."""
        peer = await self._peer(rank, spec)
        size = self.options.chunk_size
        chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
        keys = chunk_keys(ids, size, rank=rank, num_ranks=self.options.tp, seed=self.options.hash_seed)
        if is_last and self.control.early_chunks:  # those are not put a second time
            chunks, keys = chunks[self.control.early_chunks :], keys[self.control.early_chunks :]
        async with peer.turn:
            request = AllocRequest(keys, 1, [2, 4, size, 64], "bfloat16", len(chunks[-1]) if chunks else 0)
            await peer.alloc.send(pack(request))
            response = _unpack.decode(await peer.alloc.recv())
        assert isinstance(response, AllocResponse)
        new = [chunk for index, chunk in enumerate(chunks) if index not in response.already_sent_indexes]
        await asyncio.sleep(self.control.write_s)
        await write(peer.address, list(zip(response.remote_indexes, new, strict=True)))
        if is_last:
            await self._tell(spec["req_id"], rank)

    async def _tell(self, req_id: str, rank: int) -> None:
        times = {"once": 1, "twice": 2, "never": 0}[self.control.notify]
        if rank in self.control.silent_ranks:
            return
        await asyncio.sleep(self.control.notify_after_s)
        for _ in range(times):
            await self._notify[rank].send(pack(ProxyNotif(req_id)))

    async def _peer(self, rank: int, spec: dict[str, Any]) -> Peer:
        host, init, alloc = spec["receiver_host"], spec["receiver_init_port"][rank], spec["receiver_alloc_port"][rank]
        known = self._peers.get((rank, f"{host}:{init}"))
        if known is None:
            known = asyncio.ensure_future(self._shake_hands(host, init, alloc))
            self._peers[rank, f"{host}:{init}"] = known
        return await known

    async def _shake_hands(self, host: str, init: int, alloc: int) -> Peer:
        socket = self.context.socket(zmq.REQ)
        socket.connect(f"tcp://{host}:{init}")
        await socket.send(pack(NixlInitRequest(b"meta")))
        met = _unpack.decode(await socket.recv())
        assert isinstance(met, NixlInitResponse)
        await socket.send(pack(NixlMemRegRequest(met.remote_agent_name, "", b"descriptors")))
        registered = _unpack.decode(await socket.recv())
        assert isinstance(registered, NixlMemRegResponse)
        socket.close()
        pages = self.context.socket(zmq.REQ)
        pages.connect(f"tcp://{host}:{alloc}")
        return Peer(pages, registered.remote_xfer_dlist_bytes.decode())


async def write(address: str, pages: list[tuple[int, list[int]]]) -> None:
    """In NIXL's place."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(json.dumps(pages).encode() + b"\n")
    await reader.readline()
    writer.close()


# ── the decoder ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Page:
    index: int
    num_refs: int = 1


class Rank:
    """One rank's PD buffer and the sockets at which prefillers fill it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = list(range(num_pages))
        self.pages: dict[str, Page] = {}
        self.kv: dict[int, list[int]] = {}

    async def serve(self, context: zmq.asyncio.Context, host: str, init_port: int, alloc_port: int) -> None:
        server = await asyncio.start_server(self._take_bytes, host, 0)
        self.address = f"{host}:{server.sockets[0].getsockname()[1]}"
        init, alloc = context.socket(zmq.REP), context.socket(zmq.REP)
        init.bind(f"tcp://{host}:{init_port}")
        alloc.bind(f"tcp://{host}:{alloc_port}")
        self._loops = [asyncio.create_task(self._shake_hands(init)), asyncio.create_task(self._allocate(alloc))]

    async def _shake_hands(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = _unpack.decode(await socket.recv())
            if isinstance(message, NixlInitRequest):
                await socket.send(pack(NixlInitResponse(b"agent", b"meta")))
            else:
                await socket.send(pack(NixlMemRegResponse(self.address.encode())))

    async def _allocate(self, socket: zmq.asyncio.Socket) -> None:
        """One request after the other; one that waits for pages keeps all the others waiting."""
        while True:
            request = _unpack.decode(await socket.recv())
            assert isinstance(request, AllocRequest)
            there, new = [], []
            for position, key in enumerate(request.keys):
                if key in self.pages:
                    self.pages[key].num_refs += 1
                    there.append(position)
                    continue
                while not self.free:  # noqa: ASYNC110 (that is how it is done there)
                    await asyncio.sleep(POLL_S)
                self.pages[key] = Page(self.free.pop())
                new.append(self.pages[key].index)
            await socket.send(pack(AllocResponse(there, new)))

    async def _take_bytes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for index, ids in json.loads(await reader.readline()):
            self.kv[index] = ids
        writer.write(b"done\n")
        await writer.drain()
        writer.close()

    def take_out(self, key: str) -> list[int]:
        """Read a page; it is free when it has been read as often as it was pushed. Unwritten, it is nonsense."""
        page = self.pages[key]
        ids = self.kv.get(page.index, [1])
        page.num_refs -= 1
        if page.num_refs == 0:
            del self.pages[key]
            self.kv.pop(page.index, None)
            self.free.append(page.index)
        return ids


class Decoder(Standin):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.ranks = [Rank(options.num_pages) for _ in range(options.tp)]

    async def start(self) -> None:
        ports = zip(self.ranks, self.options.init_ports, self.options.alloc_ports, strict=True)
        for rank, init, alloc in ports:
            await rank.serve(self.context, self.options.peer_host, init, alloc)

    def held(self) -> int:
        return max(rank.num_pages - len(rank.free) for rank in self.ranks)

    async def answer(self, path: str, fields: dict[str, Any]) -> Reply:
        await asyncio.sleep(self.control.queue_s)
        asked = prompt_ids(path, fields)
        found = self._take_out(asked)
        ids = found + asked[len(found) :]
        self.books.found_tokens += len(found)
        self.books.read_tokens += len(asked) - len(found)
        answer = written(ids, budget(path, fields), ignore_eos=bool(fields.get("ignore_eos")))
        if not fields.get("stream"):
            await asyncio.sleep(self.control.token_s * len(answer))
            return whole(path, fields, asked, answer, None)
        return Reply(events=self._events(path, fields, asked, answer))

    def _take_out(self, asked: list[int]) -> list[int]:
        """The prompt as far as every rank has its KV."""
        sought = asked[: len(asked) - self.options.skip_last_n_tokens]
        size, seed, num_ranks = self.options.chunk_size, self.options.hash_seed, len(self.ranks)
        keys = [chunk_keys(sought, size, rank=number, num_ranks=num_ranks, seed=seed) for number in range(num_ranks)]
        num_hits = min(
            next((i for i, key in enumerate(mine) if key not in rank.pages), len(mine))
            for rank, mine in zip(self.ranks, keys, strict=True)
        )
        taken = [
            [one for key in mine[:num_hits] for one in rank.take_out(key)]
            for rank, mine in zip(self.ranks, keys, strict=True)
        ]
        return taken[0] if all(ids == taken[0] for ids in taken) else [1] * len(taken[0])

    async def _events(
        self, path: str, fields: dict[str, Any], ids: list[int], answer: list[int]
    ) -> AsyncIterator[bytes]:
        is_chat = path.endswith("/chat/completions")
        head = {"id": "s-1", "object": "chat.completion.chunk" if is_chat else "text_completion", "created": 7}
        head["model"] = self.options.served_model_name
        pieces, finish = cut(fields, answer)
        if is_chat:
            yield event(head | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number, piece in enumerate(pieces, 1):
            await asyncio.sleep(self.control.token_s)
            said = {"delta": {"content": piece}} if is_chat else {"text": piece}
            choice: dict[str, Any] = {"index": 0} | said | {"logprobs": None}
            choice["finish_reason"] = finish if number == len(pieces) else None
            if fields.get("return_token_ids"):
                choice["token_ids"] = [answer[number - 1]]
            yield event(head | {"choices": [choice]})
        if (fields.get("stream_options") or {}).get("include_usage"):
            yield event(head | {"choices": [], "usage": usage(ids, answer[: len(pieces)])})
        yield b"data: [DONE]\n\n"


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _ports(text: str) -> list[int]:
    return [int(port) for port in text.split(",")]


def parse(arguments: Iterable[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["prefiller", "decoder"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default=MODEL)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--hash-seed", default="0", help="in PYTHONHASHSEED's place")
    parser.add_argument("--notify", help="prefiller: host:port of the proxy")
    parser.add_argument("--peer-host", default="127.0.0.1", help="decoder: pd_peer_host")
    parser.add_argument("--init-ports", type=_ports, default=[])
    parser.add_argument("--alloc-ports", type=_ports, default=[])
    parser.add_argument("--num-pages", type=int, default=64)
    parser.add_argument("--skip-last-n-tokens", type=int, default=0)
    return parser.parse_args(list(arguments))


async def run(options: argparse.Namespace) -> None:
    standin = Prefiller(options) if options.role == "prefiller" else Decoder(options)
    await standin.start()
    server = await serve(standin.route, options.host, options.port)
    print("ready", flush=True)
    await left_alone()
    server.close()


async def left_alone() -> None:
    """Until nobody holds the other end of standard input: whoever started this is gone."""
    reader = asyncio.StreamReader()
    pipe = partial(asyncio.StreamReaderProtocol, reader)
    await asyncio.get_running_loop().connect_read_pipe(pipe, sys.stdin)
    await reader.read()


if __name__ == "__main__":
    asyncio.run(run(parse(sys.argv[1:])))
