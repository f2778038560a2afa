"""A scheduler and a worker such as vLLM's, as far as a connector sees them: blocks, chunks, preemption, aborts.

The KV of a token is a number made of the token, its position and the layer, so every byte that is read can be checked.
Blocks that are given back are poisoned in the next step, when others may write into them.
"""

from __future__ import annotations

import hashlib
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.e2e.cluster import free_ports
from transfer import wire
from transfer.agents.base import TransferAgent
from transfer.connectors.vllm.messages import StepReport
from transfer.connectors.vllm.other_ranks import OtherRanks
from transfer.connectors.vllm.private_socket import listen_privately
from transfer.connectors.vllm.rank_thread import RankThread
from transfer.connectors.vllm.receiver_thread import ReceiverThread
from transfer.connectors.vllm.scheduler_side import SchedulerSide
from transfer.connectors.vllm.worker_side import WorkerSide
from transfer.dataplane.in_process import InProcess
from transfer.dataplane.plane import DataPlane
from transfer.memory.buffer import PagedBuffer
from transfer.memory.engine_memory import EngineMemory
from transfer.memory.views import layer_views
from transfer.plan.layout import KvLayout, LayerKv
from transfer.plan.placement import Rows
from transfer.plan.ranks import heads_of
from transfer.roles.handshake import Identity
from transfer.roles.receiver import ReceiverConfig

TOKENS, CONTENT, HEADS = 4, 2, 2
WINDOW = 6
HYBRID = KvLayout(
    (LayerKv(HEADS, CONTENT, 0), LayerKv(HEADS, CONTENT, 0, "sliding", WINDOW)) * 2,
    TOKENS,
    4,
    "float32",
    grouping=((0, 2), (1, 3)),
)
PLAIN = KvLayout((LayerKv(HEADS, CONTENT, 0),) * 2, TOKENS, 4, "float32", grouping=((0, 1),))
LATENT = KvLayout((LayerKv(1, CONTENT, 0, "mla"),) * 2, TOKENS, 4, "float32", grouping=((0, 1),))
"""What MLA keeps: one latent, the same on every rank."""
WINDOWED = KvLayout((LayerKv(HEADS, CONTENT, 0, "sliding", WINDOW),) * 2, TOKENS, 4, "float32", grouping=((0, 1),))
"""A model whose layers all have a window."""
POISON = -1.0


@dataclass(eq=False)
class Request:
    """A request in vLLM's words."""

    request_id: str
    prompt: list[int]
    kv_transfer_params: dict[str, Any] | None
    block_size: int = TOKENS
    """Of the engine that it is given to."""
    reads_cache: bool = True
    """Is False where it asks for the prompt's logprobs: then vLLM asks the connector, and ignores what it says."""
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    cache_salt: str | None = None
    prompt_embeds: torch.Tensor | None = None
    prompt_is_token_ids: list[bool] | None = None
    num_computed: int = 0
    state: str = "waiting"
    blocks: list[list[int]] = field(default_factory=list)
    failed_load: bool = False
    reply: dict[str, Any] | None = None
    wrong: list[str] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.prompt

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(self.block_size, len(self.prompt) + 1, self.block_size)
        return [hash_of(self.prompt[:end]) for end in ends]


class MiniRank:
    """A worker: the heads of one tensor-parallel rank."""

    def __init__(self, kv: KvLayout, size: int, index: int, num_blocks: int, pages_per_block: int, device: str) -> None:
        self.index = index
        block_size = kv.chunk_size * pages_per_block
        self.layout = kv.of_rank(size, index)
        self.heads = list(heads_of(kv.layers[0].num_heads, self.layout.rank))
        # Two tensors, each shared by a layer of every group, as vLLM lays a hybrid model out.
        first, second = torch.full((2, num_blocks, len(self.heads), block_size, CONTENT), POISON, device=device).unbind(
            0
        )
        self.layers = [first, first, second, second] if len(kv.layers) == 4 else [first, second]
        rows = [(Rows(1, CONTENT * kv.element_bytes),)] * len(self.layers)
        self.memory = EngineMemory(self.layers, self.layout, pages_per_block, rows)
        self.identity = Identity("mini", self.layout)
        self.plane: DataPlane | None = None
        self.inbox: ReceiverThread | RankThread | None = None
        self.buffer = PagedBuffer(64 // kv.chunk_size, self.layout.page_bytes, torch.device(device))
        self.worker: WorkerSide

    def open(self, names: list[str], *, receives: bool) -> None:
        received = layer_views(self.buffer.pages, self.layout) if receives else []
        ends = {"plane": self.plane, "inbox": self.inbox}
        self.worker = WorkerSide(self.layout, names, self.memory, **ends, received=received)  # type: ignore[arg-type]


class MiniVllm:
    """One engine. `step` is one step of vLLM's. `make_agent` makes that of a rank."""

    def __init__(
        self,
        name: str,
        make_agent: Callable[[int], TransferAgent],
        *,
        sends: bool,
        num_blocks: int,
        kv: KvLayout = HYBRID,
        num_ranks: int = 1,
        pages_per_block: int = 1,
        device: str = "cpu",
    ) -> None:
        self.name = name
        self.kv = kv
        self.block_size = kv.chunk_size * pages_per_block
        self.is_hybrid = len(kv.groups) > 1
        self.names = [f"layer {index}" for index in range(len(kv.layers))]
        self.cache: dict[bytes, list[int]] = {}
        """The decoder's prefix cache: block hash → the block's tokens."""
        self.has_names = not self.is_hybrid
        self.ranks = [MiniRank(kv, num_ranks, index, num_blocks, pages_per_block, device) for index in range(num_ranks)]
        if sends:
            for rank in self.ranks:
                rank.plane = DataPlane(InProcess(partial(make_agent, rank.index), rank.memory, rank.identity))
                rank.plane.start().result(10)
        else:
            self._open_inboxes(make_agent, has_cache=self.has_names and pages_per_block == 1)
        for rank in self.ranks:
            rank.open(self.names, receives=not sends)
        self.block_names = "named alike"
        self.scheduler = SchedulerSide(
            self.block_size,
            num_ranks,
            kv.groups,
            names_pages=self.has_names,
            pages_per_block=pages_per_block,
            names=lambda: self.block_names,
            input_namer="mini",
        )
        self.scheduler.pool = self
        self._num_told: Counter[tuple[str, str]] = Counter()
        self._failed: set[str] = set()
        self.free = list(range(1, num_blocks))
        self._holders: Counter[int] = Counter()
        self._stale: set[int] = set()
        """Blocks that were given back since the last step, and are poisoned in the next one."""
        self.requests: dict[str, Request] = {}
        self.kept: dict[str, Request] = {}
        self.preempted: set[str] = set()
        self._finished: set[str] = set()

    def _open_inboxes(self, make_agent: Callable[[int], TransferAgent], *, has_cache: bool) -> None:
        """Opens rank 0's receiver beside the others' slabs, each of which comes by a socket."""
        first, others = self.ranks[0], self.ranks[1:]
        inbox = first.inbox = ReceiverThread(no_facts, lambda: True, "127.0.0.1", free_ports(1)[0])
        inbox.start()
        joining, given = [], None
        if others:
            listener, path = listen_privately(socket.SOCK_STREAM, len(others))
            given = OtherRanks(listener, path, len(self.ranks))
            for rank in others:
                thread = rank.inbox = RankThread(rank.index)
                made = make_agent(rank.index), rank.buffer
                joining.append(threading.Thread(target=thread.join, args=(path, lambda made=made: made, rank.identity)))
                joining[-1].start()
        config = ReceiverConfig(heartbeat_s=0.2, writer_timeout_s=20.0)
        cache = self if has_cache else None
        inbox.receive(make_agent(0), first.buffer, first.identity, config, cache, given)
        for one in joining:
            one.join()

    @property
    def worker(self) -> WorkerSide:
        return self.ranks[0].worker

    @property
    def plane(self) -> DataPlane | None:
        return self.ranks[0].plane

    @property
    def memory(self) -> EngineMemory:
        return self.ranks[0].memory

    @property
    def inbox(self) -> ReceiverThread | None:
        inbox = self.ranks[0].inbox
        assert inbox is None or isinstance(inbox, ReceiverThread)
        return inbox

    @property
    def receiver(self) -> Any:
        assert self.inbox is not None
        return self.inbox._receiver

    def add(self, request: Request) -> None:
        request.block_size = self.block_size
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def end(self, request: Request, *, is_whole: bool) -> None:
        """Finishes or aborts a request."""
        del self.requests[request.request_id]
        if request.state == "loading":
            request.state = "aborted while loading"
            self.kept[request.request_id] = request
            assert not self.scheduler.finished(request, is_whole=is_whole)[0]
            return
        self._remove_skipped(request)
        is_kept, request.reply = self.scheduler.finished(request, is_whole=is_whole)
        request.state = "over"
        if is_kept:
            self.kept[request.request_id] = request
            self._finished.add(request.request_id)
        else:
            self._give_back(request)

    def preempt(self, request: Request) -> None:
        """Takes a running request's blocks away."""
        self._give_back(request)
        request.state, request.num_computed = "waiting", 0
        self.preempted.add(request.request_id)

    def step(self, budget: int) -> None:
        """Schedules up to `budget` tokens, computes them, and hears the worker."""
        new, cached = [], SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[])
        scheduled: dict[str, int] = {}
        for request in [one for one in self.requests.values() if one.state == "running"]:
            if (count := min(budget, request.num_prompt_tokens - request.num_computed)) > 0:
                ids = self._grow(request, request.num_computed + count)
                if ids is None:
                    continue
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(ids)
                cached.num_computed_tokens.append(request.num_computed)
                scheduled[request.request_id] = count
                budget -= count
        for request in [one for one in self.requests.values() if one.state == "waiting"]:
            if budget <= 0:
                break
            matched, is_async = (0, False)
            if request.num_computed == 0:
                request.num_computed = self._find_cached(request) if request.reads_cache else 0
                matched, is_async = self.scheduler.num_matched(request, request.num_computed)  # type: ignore[assignment]
                if not request.reads_cache:
                    matched, is_async = 0, False
            if matched is None:
                request.num_computed = 0
                continue
            total = request.num_computed + matched
            count = 0 if is_async else min(budget, request.num_prompt_tokens - total)
            if self._grow(request, total + count, num_loaded=total) is None:
                break
            self.scheduler.allocated(request, [list(ids) for ids in request.blocks], matched)
            if is_async:
                request.num_computed, request.state = total, "loading"
                continue
            request.state = "running"
            request_blocks = tuple(list(ids) for ids in request.blocks)
            new.append(
                SimpleNamespace(
                    req_id=request.request_id, block_ids=request_blocks, num_computed_tokens=request.num_computed
                )
            )
            scheduled[request.request_id] = count
            budget -= count
        orders = self.scheduler.take_orders(
            SimpleNamespace(
                scheduled_new_reqs=new,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens=scheduled,
                preempted_req_ids=self.preempted,
            )
        )
        self.preempted = set()
        finished, self._finished = self._finished, set()
        report, sent, loaded = StepReport(), set[str](), set[str]()
        for rank in self.ranks:
            rank.worker.begin(orders)
        for block in self._stale:  # vLLM has given them to others, who write into them in this step
            for rank in self.ranks:
                for tensor in rank.layers:
                    tensor[block] = POISON
        self._stale.clear()
        for rank in self.ranks:
            for layer, name in enumerate(self.names):
                for request_id, count in scheduled.items():
                    self._compute(self.requests[request_id], layer, count, rank)
                if layer != 2:  # of one layer the connector is not told
                    rank.worker.layer_computed(name)
            rank.worker.load(orders)
            rank.worker.end()
            some_sent, some_loaded, some_failed = rank.worker.results(sorted(finished))
            sent |= self._by_all("sent", some_sent)
            loaded |= self._by_all("loaded", some_loaded)
            self._failed |= some_failed
            if (part := rank.worker.take_report()) is not None:
                report.add(part)
        failed, self._failed = self._failed & loaded, self._failed - loaded
        self.scheduler.heard(report or None, sorted(loaded), sorted(sent))
        for request_id in sent:
            self._give_back(self.kept.pop(request_id))
        for request_id in loaded:
            self._loaded(request_id, is_failed=request_id in failed)
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            request.num_computed += count
            if request.num_computed >= request.num_prompt_tokens:
                self.end(request, is_whole=True)

    def close(self) -> None:
        for rank in reversed(self.ranks):
            for end in (rank.plane, rank.inbox):
                if end is not None:
                    end.close()

    def _by_all(self, what: str, told: Iterable[str]) -> set[str]:
        """Returns the requests that every rank has told of by now, as vLLM's `KVOutputAggregator` does."""
        self._num_told.update((what, request_id) for request_id in told)
        whole = {key for key in self._num_told if self._num_told[key] == len(self.ranks) and key[0] == what}
        for key in whole:
            del self._num_told[key]
        return {request_id for _, request_id in whole}

    # ── the prefix cache, of which blocks are copies here ──

    def pin(self, attempt: str, keys: Sequence[bytes]) -> int:
        """Answers the receiver as `BlockCache` does."""
        return next((at for at, key in enumerate(keys) if key not in self.cache), len(keys))

    def unpin(self, attempt: str) -> None:
        """Nothing is pinned."""

    def remember(self, prompt: list[int], num_tokens: int) -> None:
        """Has the blocks of a prompt's first tokens in the cache from now on."""
        for end in range(self.block_size, num_tokens + 1, self.block_size):
            self.cache[hash_of(prompt[:end])] = prompt[:end]

    def _find_cached(self, request: Request) -> int:
        """Gives the request what the cache has of it. Returns the number of those tokens."""
        num_blocks = 0
        while (end := (num_blocks + 1) * self.block_size) < request.num_prompt_tokens and hash_of(
            request.prompt[:end]
        ) in self.cache:
            num_blocks += 1
        if num_blocks and not request.blocks:
            request.blocks = [[self.free.pop() for _ in range(num_blocks)]]
            self._holders.update(request.blocks[0])
            self._stale.difference_update(request.blocks[0])
            for rank in self.ranks:
                for layer in range(len(self.names)):
                    self._compute(request, layer, num_blocks * self.block_size, rank)
        return num_blocks * self.block_size

    def _group(self, layer: int) -> int:
        return next(at for at, layers in enumerate(self.kv.grouping) if layer in layers)

    # ── blocks ──

    def _grow(self, request: Request, num_tokens: int, num_loaded: int = 0) -> tuple[list[int], ...] | None:
        """Gives the request blocks for so many tokens; none in front of the window, where they were loaded."""
        num_blocks = -(-num_tokens // self.block_size)
        request.blocks = request.blocks or [[] for _ in self.kv.groups]
        skipped = max(0, num_loaded - WINDOW + 1) // self.block_size
        nulls = [
            skipped if group.window and not ids else 0
            for group, ids in zip(self.kv.groups, request.blocks, strict=True)
        ]
        wanted = [num_blocks - len(ids) for ids in request.blocks]
        if sum(wanted) - sum(nulls) > len(self.free):
            return None
        added: list[list[int]] = []
        for count, null in zip(wanted, nulls, strict=True):
            fresh = [self.free.pop() for _ in range(max(0, count - null))]
            self._holders.update(fresh)
            ids = [0] * min(null, count) + fresh
            added.append(ids)
        for ids, more in zip(request.blocks, added, strict=True):
            ids.extend(more)
        return tuple(added)

    def _give_back(self, request: Request) -> None:
        for ids in request.blocks:
            self.give_up(filter(None, ids))
        request.blocks = []

    def _remove_skipped(self, request: Request) -> None:
        """Gives back the blocks in front of the window of the token behind all computed ones. vLLM does so before the
        connector hears that the request is over (`Scheduler._connector_finished`)."""
        ids = request.blocks[1] if self.is_hybrid and request.blocks else []
        for place in range(min(len(ids), max(0, request.num_computed - WINDOW + 1) // self.block_size)):
            if ids[place]:
                self.give_up([ids[place]])
                ids[place] = 0

    # vLLM's BlockPool

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert block not in self.free
            self._holders[block] += 1

    def give_up(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            assert self._holders[block] >= 0
            if not self._holders[block]:
                self._stale.add(block)
                self.free.append(block)

    def _compute(self, request: Request, layer: int, count: int, rank: MiniRank) -> None:
        group = self._group(layer)
        for position in range(request.num_computed, request.num_computed + count):
            block = request.blocks[group][position // self.block_size]
            rank.layers[layer][block, :, position % self.block_size] = kv_of(request.prompt, position, layer)[
                rank.heads
            ]

    def _loaded(self, request_id: str, *, is_failed: bool) -> None:
        if request_id in self.kept:  # it was aborted meanwhile
            self._give_back(self.kept.pop(request_id))
            return
        request = self.requests[request_id]
        assert request.state == "loading"
        request.state = "waiting"
        if is_failed:
            request.failed_load = True
            self._give_back(request)
            request.num_computed = 0
        else:
            self._check(request)

    def _check(self, request: Request) -> None:
        """Looks at every token that the next one will attend to."""
        for rank, layer in itertools.product(self.ranks, range(len(self.names))):
            group = self._group(layer)
            end = request.num_computed
            for position in range(max(0, end - WINDOW + 1) if self.kv.groups[group].window else 0, end):
                block = request.blocks[group][position // self.block_size]
                found = rank.layers[layer][block, :, position % self.block_size].cpu()
                if block == 0 or not torch.equal(found, kv_of(request.prompt, position, layer)[rank.heads]):
                    where = f"rank {rank.index}, layer {layer}, token {position} of {end}"
                    request.wrong.append(f"{where}: {found.flatten().tolist()}")


def hash_of(tokens: list[int]) -> bytes:
    """Names a block by all tokens up to its end."""
    return hashlib.sha256(repr(tokens).encode()).digest()


def kv_of(prompt: list[int], position: int, layer: int) -> torch.Tensor:
    """The KV of one token in one layer, ``[heads, content]``."""
    base = float(prompt[position] * 1000 + position * 10 + layer)
    return torch.tensor([[base + head / 4, base + head / 4 + 0.125] for head in range(HEADS)])


def no_facts(receiver: object) -> wire.BufferFacts:
    raise AssertionError("nobody asks here")


def until(holds: Callable[[], bool], step: Callable[[], None], what: str, limit_s: float = 20.0) -> None:
    """Takes steps until `holds`."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, what
        step()
        time.sleep(0.001)
