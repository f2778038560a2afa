"""The connector's half in vLLM's scheduler. It decides what the workers are told with the next step.

What must hold: a prompt is not computed before all its pages are reserved at the decoder; a block of it is ordered to
be sent once, in the step that completes it; and blocks of a request that has an open push are not given back before
every worker has said that its writes have ended; and KV of another prompt than the request's own is not loaded. A
violation would be seen as a page that never arrives, or as bytes of another request in one that does.

It knows vLLM's requests and outputs by the attributes it reads, and imports nothing of vLLM.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from transfer.connectors.vllm.messages import Fill, Load, LoadParams, OpenPush, StepOrders, StepReport
from transfer.connectors.vllm.prompt_digest import prompt_digest
from transfer.connectors.vllm.transfer_statistics import Pushed, TransferStatistics
from transfer.geometry import PageGroup
from transfer.wire import PushParams

log = logging.getLogger(__name__)

MAX_CLAIMED = 10_000
"""The most attempts that are remembered when some request has loaded them. The earliest is forgotten first."""

_RECEIVERS = "receivers"
"""The member of ``kv_transfer_params`` that tells a prefill leg from a decode leg."""


class BlockPool(Protocol):
    """A `BlockPool` has vLLM's blocks. A block that is held is nobody else's until it was given up as often."""

    def hold(self, blocks: Sequence[int]) -> None: ...

    def give_up(self, blocks: Sequence[int]) -> None: ...


@dataclass(slots=True)
class _Outgoing:
    """A request whose KV goes to a decoder."""

    params: PushParams
    num_tokens: int
    """The tokens whose KV is sent: all of the prompt but the last, which the decoder computes itself."""
    num_granted: int = 0
    """Counts the workers that have pages."""
    num_cached: int = 0
    failure: str | None = None
    is_receiver_lost: bool = False
    """True where it has failed because the decoder's receiver does not answer."""
    failure_kind: str | None = None
    """The kind of a failure that was found here and not by a worker."""
    num_blocks_sent: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    """All blocks so far, per page group, by their place in the prompt."""


@dataclass(slots=True)
class _Incoming:
    """A request whose KV is in the PD buffer. `is_settled` once it was loaded or is not needed."""

    attempt: str
    num_cached: int = 0
    """Counts the pages at the front that this vLLM had in its cache when the KV was sent."""
    failure: str | None = None
    """The reason why its KV must not be loaded."""
    is_settled: bool = False


class SchedulerSide:
    """A `SchedulerSide` holds the requests that have ``kv_transfer_params`` of this connector's.

    Mutable state: `_outgoing` and `_incoming`, by request; `_loading`, the requests whose load was ordered and is not
    over; `_claimed`, the attempts that some request has loaded, is loading or has no use for; `_held`, blocks of
    windowed groups that are being sent, by request; `_orders`, for the next step; `_strange_names`, those of prefillers
    that have been complained about; `pool`, which is set once.

    And for the statistics: `_pushed`, what the workers have said of requests of which some worker has not spoken yet;
    `_kinds`, why requests failed here, until then; `_load_failures`, by request; `_statistics`.
    """

    def __init__(
        self,
        block_size: int,
        num_workers: int,
        groups: Sequence[PageGroup],
        *,
        names_pages: bool = False,
        pages_per_block: int = 1,
        names: Callable[[], str] = str,
        input_namer: str = "",
    ) -> None:
        """Takes `names_pages`, True where pages may be known by vLLM's own block hashes, which hold LoRA, images and
        salt. There is one page group then, and vLLM hashes its blocks; where it has a window, not all of them have a
        page, and pages stay without names. `block_size` is the tokens of a block of vLLM's.
        `names` returns a fingerprint of how vLLM hashes, once it has been started. `input_namer` tells how this engine
        names images and other inputs (see `prompt_digest`)."""
        self.pool: BlockPool | None = None
        """The pool that the blocks are of. vLLM has it after it has made the connector."""
        self._block_size = block_size
        self._num_workers = num_workers
        self._groups = groups
        self._names_pages = names_pages and all(group.window is None for group in groups)
        self._names = names
        self._strange_names: set[str] = set()
        self._pages_per_block = pages_per_block
        self._chunk_size = block_size // pages_per_block
        self._input_namer = input_namer
        self._held: dict[str, list[int]] = {}
        self._outgoing: dict[str, _Outgoing] = {}
        self._incoming: dict[str, _Incoming] = {}
        self._loading: dict[str, str] = {}
        self._claimed: OrderedDict[str, str] = OrderedDict()
        self._orders = StepOrders()
        self._pushed: dict[str, Pushed] = {}
        self._kinds: dict[str, str | None] = {}
        self._load_failures: dict[str, str] = {}
        self._statistics = TransferStatistics()

    def __repr__(self) -> str:
        return f"<SchedulerSide {len(self._outgoing)} outgoing, {len(self._incoming)} incoming>"

    @property
    def has_orders(self) -> bool:
        """Tells whether there are orders that no worker has been given yet."""
        return bool(self._orders)

    def add(self, request: Any) -> None:
        """Notes a request that has come."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping) or "attempt" not in params:
            return
        num_tokens = max(1, request.num_prompt_tokens - 1)
        try:
            if _RECEIVERS in params:
                push = msgspec.convert(params, PushParams)
                self._outgoing[request.request_id] = _Outgoing(push, num_tokens)
                keys = self._keys(request, push.attempt, num_tokens) if self._names_pages else ()
                self._orders.opens.append(OpenPush(request.request_id, push, num_tokens, keys))
            else:
                load = msgspec.convert(params, LoadParams)
                failure = self._mismatch(request, load)
                self._incoming[request.request_id] = _Incoming(load.attempt, load.num_cached, failure)
                self._compare_names(load)
        except msgspec.ValidationError as error:
            log.error("request %s: kv_transfer_params are not understood: %s", request.request_id, error)

    # ── before a request runs ───────────────────────────────────────────────────────────────────────────────────────

    def num_matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Says how many tokens behind the first `num_computed` need not be computed, and whether they are loaded
        meanwhile. None for the number means: not now, ask again."""
        if (outgoing := self._outgoing.get(request.request_id)) is not None:
            is_decided = outgoing.failure is not None or outgoing.num_granted >= self._num_workers
            return (0 if is_decided else None), False
        incoming = self._incoming.get(request.request_id)
        if incoming is None or incoming.is_settled:
            return 0, False
        owner = self._claimed.get(incoming.attempt, request.request_id)
        if owner != request.request_id:  # one of several answers to one prompt: the others find its blocks cached
            return (None if owner in self._loading else 0), False
        num_missing = request.num_prompt_tokens - 1 - num_computed
        if num_missing <= 0 or num_computed < incoming.num_cached * self._chunk_size:
            return 0, False  # in the second case vLLM has forgotten meanwhile what was not sent, and computes it again
        return num_missing, True

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """Notes that the request has blocks, of which those of `num_external` tokens are to be loaded."""
        incoming = self._incoming.get(request.request_id)
        if incoming is None or incoming.is_settled:
            return
        incoming.is_settled = True
        if incoming.attempt in self._claimed:
            return
        self._claim(incoming.attempt, request.request_id)
        if not num_external:
            self._orders.releases.append(incoming.attempt)
            return
        num_tokens = request.num_prompt_tokens - 1
        first, end = (num_tokens - num_external) // self._block_size, -(-num_tokens // self._block_size)
        blocks = tuple(list(ids[first:end]) for ids in block_ids)
        load = Load(
            request.request_id, incoming.attempt, num_tokens, first, blocks, incoming.num_cached, incoming.failure
        )
        self._orders.loads.append(load)
        self._loading[request.request_id] = incoming.attempt

    # ── with every step ─────────────────────────────────────────────────────────────────────────────────────────────

    def take_orders(self, scheduled: Any) -> StepOrders:
        """Returns the orders for the step that vLLM has `scheduled` (a ``SchedulerOutput``)."""
        for request_id in getattr(scheduled, "preempted_req_ids", None) or ():
            self._preempted(request_id)
        num_tokens = scheduled.num_scheduled_tokens
        for new in scheduled.scheduled_new_reqs:
            if (outgoing := self._outgoing.get(new.req_id)) is not None:
                outgoing.block_ids = [list(ids) for ids in new.block_ids]
                self._fill(new.req_id, outgoing, new.num_computed_tokens + num_tokens[new.req_id])
        cached = scheduled.scheduled_cached_reqs
        for request_id, new_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if (outgoing := self._outgoing.get(request_id)) is not None:
                outgoing.block_ids = outgoing.block_ids or [[] for _ in self._groups]
                for known, ids in zip(outgoing.block_ids, new_ids or (), strict=False):
                    known.extend(ids)
                self._fill(request_id, outgoing, computed + num_tokens[request_id])
        orders, self._orders = self._orders, StepOrders()
        return orders

    def heard(
        self, report: StepReport | None, finished_loads: Sequence[str], finished_sends: Sequence[str] = ()
    ) -> None:
        """Notes what the workers report, which loads are over, and of which requests nothing is being sent any more."""
        if report is not None:
            self._load_failures |= report.failed_loads
            for request_id, pushed in report.pushed.items():
                self._pushed.setdefault(request_id, Pushed()).add(pushed)
        for request_id in finished_loads:
            self._loading.pop(request_id, None)
            self._statistics.count_load(self._load_failures.pop(request_id, None))
        for request_id in finished_sends:
            self._give_up(request_id)
            self._statistics.count_push(self._pushed.pop(request_id, Pushed()), self._kinds.pop(request_id, None))
        if report is None:
            return
        self._orders.is_broken = self._orders.is_broken or report.is_broken
        for request_id, count in report.granted.items():
            if (outgoing := self._outgoing.get(request_id)) is not None:
                outgoing.num_granted += count
                outgoing.num_cached = report.num_cached.get(request_id, outgoing.num_cached)
        for request_id, reason in report.failed.items():
            if (outgoing := self._outgoing.get(request_id)) is not None and outgoing.failure is None:
                log.warning("request %s: attempt %s failed: %s", request_id, outgoing.params.attempt, reason)
                outgoing.is_receiver_lost = request_id in report.unanswered
                self._fail(request_id, outgoing, reason)  # on the other workers, too

    def take_statistics(self) -> TransferStatistics | None:
        """Returns what was counted since this was called last, or None."""
        if not self._statistics.has_events:
            return None
        taken, self._statistics = self._statistics, TransferStatistics()
        return taken

    # ── when a request is over ──────────────────────────────────────────────────────────────────────────────────────

    def finished(self, request: Any, *, is_whole: bool) -> tuple[bool, dict[str, Any] | None]:
        """Notes that a request is over, with an answer that `is_whole` or without one. Returns whether its blocks stay
        until the workers have sent them, and the answer's ``kv_transfer_params``."""
        request_id = request.request_id
        self._forget_incoming(request_id)
        outgoing = self._outgoing.pop(request_id, None)
        if outgoing is None:
            return False, None
        if any(order.request_id == request_id for order in self._orders.opens):  # no worker has heard of it
            self._orders.opens = [order for order in self._orders.opens if order.request_id != request_id]
            return False, None
        num_blocks = -(-outgoing.num_tokens // self._block_size)
        if outgoing.failure is None and (not is_whole or outgoing.num_blocks_sent < num_blocks):
            self._fail(request_id, outgoing, "the prefiller has given the request up", "given_up")
        self._kinds[request_id] = outgoing.failure_kind
        params = LoadParams(
            attempt=outgoing.params.attempt,
            failure=outgoing.failure,
            is_receiver_lost=outgoing.is_receiver_lost,
            num_cached=outgoing.num_cached,
            names=self._names() if self._names_pages else "",
            prompt=prompt_digest(request, self._input_namer) if is_whole and outgoing.failure is None else None,
        )
        return True, msgspec.to_builtins(params) if is_whole else None

    # ── below ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _mismatch(self, request: Any, load: LoadParams) -> str | None:
        """Returns why the KV is not that of the request's prompt, or None where it is, or nobody says what it is of."""
        if load.prompt is None:
            return None
        differences = load.prompt.differences(prompt_digest(request, self._input_namer))
        if not differences:
            return None
        return f"it is the KV of another prompt: {' and '.join(differences)} of prefiller and decoder differ"

    def _keys(self, request: Any, attempt: str, num_tokens: int) -> tuple[bytes, ...]:
        """Returns the names of the prompt's pages. One that is not full has a name that nothing else has."""
        named = [bytes(one) for one in request.block_hashes[: num_tokens // self._block_size]]
        if self._pages_per_block > 1:  # a name of two parts is no block's: only a page of a block cut alike has it
            named = [one + piece.to_bytes(2, "big") for one in named for piece in range(self._pages_per_block)]
        num_pages = -(-num_tokens // self._chunk_size)
        return (*named, *(f"{attempt} {page}".encode() for page in range(len(named), num_pages)))

    def _compare_names(self, load: LoadParams) -> None:
        """Complains, once, of a prefiller whose names for blocks are not this vLLM's: nothing of it is found here."""
        if not self._names_pages or load.names in ("", self._names(), *self._strange_names):
            return
        self._strange_names.add(load.names)
        log.warning(
            "a prefiller names KV blocks in another way than this decoder (%s, and %s here), so all KV of its prompts "
            "is sent, though some of it is here: give both the same PYTHONHASHSEED, or none, and the same "
            "--prefix-caching-hash-algo",
            load.names,
            self._names(),
        )

    def _fill(self, request_id: str, outgoing: _Outgoing, num_computed: int) -> None:
        """Orders what is complete when `num_computed` tokens are computed and was not before."""
        if outgoing.failure is not None:
            return
        if outgoing.num_granted < self._num_workers:
            # vLLM asks `num_matched`, and ignores what it says where a request must not read from a cache.
            self._fail(
                request_id,
                outgoing,
                "vLLM computes prompts with prompt_logprobs without waiting for a decoder",
                "not_awaited",
            )
            return
        first, num_blocks = outgoing.num_blocks_sent, -(-outgoing.num_tokens // self._block_size)
        end = num_blocks if num_computed >= outgoing.num_tokens else num_computed // self._block_size
        if end > first:
            outgoing.num_blocks_sent = end
            blocks = tuple(ids[first:end] for ids in outgoing.block_ids)
            self._orders.fills.append(Fill(request_id, first, blocks, is_last=end == num_blocks))
            self._hold(request_id, outgoing, first, end)

    def _hold(self, request_id: str, outgoing: _Outgoing, first: int, end: int) -> None:
        """Holds what of these blocks is in a window.

        When a request is over, vLLM gives back at once what lies in front of the window of the *next* token, and keeps
        the rest until it is sent. The decoder, which computes the last token itself, may need some of the former.
        """
        held: list[int] = []
        for group, ids in zip(self._groups, outgoing.block_ids, strict=True):
            if group.window is not None:
                num_null, _ = group.blocks(outgoing.num_tokens, self._block_size)
                held += filter(None, ids[max(first, num_null) : end])
        if held and self.pool is not None:
            self._held.setdefault(request_id, []).extend(held)
            self.pool.hold(held)

    def _give_up(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held and self.pool is not None:
            self.pool.give_up(held)

    def _preempted(self, request_id: str) -> None:
        """Has the workers wait for what is being read of blocks that vLLM has taken away, and may write over in this
        step. The push goes on: the blocks that were sent were right, and vLLM computes the others again."""
        self._give_up(request_id)  # nobody is given these before the next step
        if (outgoing := self._outgoing.get(request_id)) is not None:
            outgoing.block_ids = []
            self._orders.preempted.append(request_id)

    def _fail(self, request_id: str, outgoing: _Outgoing, reason: str, kind: str | None = None) -> None:
        outgoing.failure, outgoing.failure_kind = reason, kind
        self._orders.aborts[request_id] = reason

    def _forget_incoming(self, request_id: str) -> None:
        """Gives the attempt's pages back where this was the last request that might have loaded them."""
        incoming = self._incoming.pop(request_id, None)
        self._loading.pop(request_id, None)
        if incoming is None or incoming.attempt in self._claimed:
            return
        if all(other.attempt != incoming.attempt for other in self._incoming.values()):
            self._claim(incoming.attempt, request_id)
            self._orders.releases.append(incoming.attempt)

    def _claim(self, attempt: str, request_id: str) -> None:
        self._claimed[attempt] = request_id
        if len(self._claimed) > MAX_CLAIMED:
            self._claimed.popitem(last=False)
