"""The two halves of the connector speak with every step of vLLM: orders go from the scheduler's half to each worker's,
and reports come back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from transfer.connectors.vllm.prompt_digest import PromptDigest
from transfer.connectors.vllm.transfer_statistics import Pushed
from transfer.wire import Count, Name, PushParams


class LoadParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ``kv_transfer_params`` of a prefill reply and of the decode leg that follows from it. They say: this
    attempt's KV lies in the decoder's PD buffer.

    Where the KV could not be sent, `failure` says why, and the rest means nothing.
    """

    attempt: Name
    failure: str | None = None
    is_receiver_lost: bool = False
    """True where the failure is that the decoder's receiver does not answer."""
    num_cached: Count = 0
    """Counts the first pages that were not sent, because the decoder's vLLM had them in its own cache."""
    names: str = ""
    """A fingerprint of how the prefiller's vLLM names blocks; empty where its names are not used. Where the decoder's
    is another one, no block of the one is ever found at the other."""
    prompt: PromptDigest | None = None
    """The prompt whose KV it is. None where the prefiller does not say."""


@dataclass(frozen=True, slots=True)
class OpenPush:
    """An order: ask the decoder for the pages of a prompt of `num_tokens` tokens."""

    request_id: str
    params: PushParams
    num_tokens: int
    keys: tuple[bytes, ...] = ()
    """The names of the prompt's pages, where equal pages need not be sent twice."""


@dataclass(frozen=True, slots=True)
class Fill:
    """An order: in this step these blocks of a request become complete. Send them."""

    request_id: str
    first_block: int
    """The first of these blocks, counted from the beginning of the prompt; the same for all page groups."""
    block_ids: tuple[list[int], ...]
    """The blocks' numbers in vLLM's pool, one list per page group. Those of a null block mean nothing."""
    is_last: bool
    """True where no block of the prompt is left after these."""


@dataclass(frozen=True, slots=True)
class Load:
    """An order: copy an attempt's pages into these blocks."""

    request_id: str
    attempt: str
    num_tokens: int
    first_block: int
    """The first block that is to be filled, counted from the beginning of the prompt. vLLM has those before it."""
    block_ids: tuple[list[int], ...]
    """The blocks' numbers, one list per page group. 0 is vLLM's null block, which nobody reads."""
    num_cached: int = 0
    """Counts the first pages of the prompt that were not sent. They lie before `first_block`."""
    failure: str | None = None
    """The reason why nothing is to be copied, where the load has failed before it began."""


@dataclass(slots=True)
class StepOrders:
    """All orders of one step, in the order in which they are carried out."""

    opens: list[OpenPush] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """The requests whose blocks vLLM has taken away and may write over in this step. Their pushes go on."""
    aborts: dict[str, str] = field(default_factory=dict)
    """The pushes that are to be given up, by request, and why."""
    fills: list[Fill] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    """The attempts whose KV the decoder does not need: it has computed it itself, or has it in its cache."""

    is_broken: bool = False
    """Tells every worker, once, that some worker's data plane is over: this engine can send nothing any more."""

    def __bool__(self) -> bool:
        orders = self.opens, self.preempted, self.aborts, self.fills, self.loads, self.releases, self.is_broken
        return any(map(bool, orders))


@dataclass(slots=True)
class StepReport:
    """A `StepReport` is the word of one worker behind a step, or that of all of them added up."""

    granted: Counter[str] = field(default_factory=Counter)
    """Counts, per request, the workers that have pages at the decoder now."""
    num_cached: dict[str, int] = field(default_factory=dict)
    """Counts, per request that has its pages, the first of them that need not be sent, where there are any. A worker
    that writes to no rank of the decoder does not know."""
    failed: dict[str, str] = field(default_factory=dict)
    """The requests whose push has failed, and why."""
    unanswered: set[str] = field(default_factory=set)
    """The requests in `failed` whose decoder's receiver does not answer."""
    is_broken: bool = False
    """True where a worker's data plane is over."""
    pushed: dict[str, Pushed] = field(default_factory=dict)
    """The outcomes of the pushes that are over, by request. Each worker tells one in the step in which it gives the
    request's blocks back."""
    failed_loads: dict[str, str] = field(default_factory=dict)
    """The requests whose load has failed, and the kind of the failure."""

    def __bool__(self) -> bool:
        return bool(self.granted or self.failed or self.is_broken or self.pushed or self.failed_loads)

    def add(self, other: StepReport) -> None:
        """Adds what another worker says."""
        self.granted.update(other.granted)
        self.num_cached |= other.num_cached
        self.failed = other.failed | self.failed
        self.unanswered |= other.unanswered
        self.is_broken = self.is_broken or other.is_broken
        self.failed_loads |= other.failed_loads
        for request_id, pushed in other.pushed.items():
            self.pushed.setdefault(request_id, Pushed()).add(pushed)
