"""The module says what an instance tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdproxy.admission.room import UNKNOWN_CACHE, KvCache
from pdproxy.openai.answer import ModelCard
from transfer.geometry import PageGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """A `Receiver` is the address at which one rank of a decoder takes KV in."""

    rank: int
    host: str
    port: int
    """The rank's control port (for LMCache: the port of the handshake)."""
    alloc_port: int | None = None
    """The port at which LMCache's prefillers ask for pages; None for other kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """`EngineInfo` is what is known of an instance, by its own word and by its configuration. Pages are per rank."""

    epoch: str | None
    """The id of the process. A different value means a different process. None where the engine does not tell processes
    apart.
    """
    counts: tuple[float, ...] = ()
    """Counts that only grow while a process lives and begin anew with the next one; empty where there is an `epoch`."""
    role: str | None = None
    """The role, as the engine says; None where it does not know."""
    models: frozenset[str] = frozenset()
    """The names under which the instance serves its model."""
    cards: tuple[ModelCard, ...] = ()
    """The cards of these names, as the instance tells them to clients."""
    agreement: Mapping[str, str] = field(default_factory=dict)
    """The facts that must be equal in a pair. Where two instances both tell one of them and differ, one cannot read
    what the other writes.
    """
    num_pages: int = 0
    """The number of pages of the memory that slots guard; 0 where slots guard another instance's."""
    num_occupied: int | None = None
    """The number of pages of that memory which the engine says are in use, on the fullest rank; None where it does not
    say.

    Pages that it keeps only as a cache and would give up on demand are not in use.
    """
    term: int | None = None
    """The highest term of a leader that the process has heard of; None where it heard of none, or knows no terms."""
    num_wrong_tags: int = 0
    """Counts the attempts that this process has failed because a page held another attempt's KV. It must stay 0."""
    cache: KvCache = UNKNOWN_CACHE
    """A decoder's own KV cache, in which it writes answers."""
    chunk_size: int | None = None
    """The number of tokens per page; with None a request takes one page, whatever its length."""
    page_bytes: int | None = None
    """The size of a page in bytes; None where it is not known."""
    max_model_len: int | None = None
    """The most tokens of prompt and answer; None where it is not known."""
    groups: tuple[PageGroup, ...] = ()
    """The groups of layers over which a prompt's pages are counted; without groups a prompt takes one page
    per chunk.
    """
    num_unsent: int = 0
    """Counts the last tokens of a prompt that have no place in its pages, because the decoder computes them itself."""
    windowed: bool = False
    """Tells that a prompt larger than the memory can pass through it while it is alone."""
    receivers: tuple[Receiver, ...] = ()
    """A decoder's receivers, one per rank, where prefillers are told the addresses to write to."""
    kv_url: str | None = None
    """The URL at which the instance's connector takes calls; None where the instance itself takes them."""
    bootstrap: str | None = None
    """The ``host:port`` at which a prefiller's peers meet it."""
    engine_id: str | None = None
    """The id by which a Mooncake engine's peers know it."""
    num_ranks: int = 1
    """The number of data-parallel ranks behind the instance's address."""
    data_parallel_rank: int | None = None
    """The rank of an SGLang prefiller that its peers ask; with None the prefiller chooses the rank itself."""
