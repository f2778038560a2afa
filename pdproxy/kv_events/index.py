"""The module holds an index of the blocks that an engine has in its prefix cache, made of what the engine says. No I/O.

An engine names a block by a hash that nobody else can compute. So the index names blocks anew, by what is in them: a
block's key is a digest of its tokens and of the key of the block before it. Whoever has the ids of a prompt can compute
its keys, and sees block by block how much of the prompt is there.

What must hold while the index is `EXACT`: it has a block if and only if the engine has it, as of the last event that
the engine has published. A violation would show as a prompt for which the engine reports another number of cached
tokens, by more than one block. An event that contradicts what is known (a removed block that was never stored, an
unknown parent, blocks of another size) proves that one was lost or misread. Then nothing of the index is believed any
more.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from pdproxy.kv_events.wire import (
    IN_MEMORY,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)

MAX_BLOCKS = 4_000_000
"""The most blocks that all indexes of a process have together. A block takes about 250 bytes."""
MAX_BLOCKS_OF_ONE = 1_000_000
STEP_BLOCKS = 1024
"""The most blocks that are taken in before whoever takes them in may do something else."""
MAX_BLOCKS_OF_PROMPT = 8192
"""The most blocks of a prompt that are looked for. To compute the keys of so many takes about 10 ms."""
MAX_GROUPS = 64
"""The most groups of layers of one engine, of which each has blocks of its own."""
_TOKEN_BYTES = 4
_KEY_BITS = 60
"""The bits of a block's key: as many as fit in the smallest number object of Python's that has any room for them. With
a million blocks the chance that any two of them have the same key is below one in a million."""
_SECRET = os.urandom(16)
"""The secret of this process, without which nobody can find two blocks that get the same key."""


class Trust(StrEnum):
    """`Trust` says how far an index can be believed."""

    EXACT = "exact"
    """Every event since the cache was empty is known and understood."""
    APPROXIMATE = "approximate"
    """Blocks may be missing, or gone by now."""
    OFF = "off"
    """The index is empty and says nothing."""


class IndexBroken(Exception):
    """An `IndexBroken` says which event does not fit what the index knows, or that there is no room for more blocks."""


class BlockBudget:
    """A `BlockBudget` limits the blocks of all indexes that share it. Mutable state: the number of blocks taken."""

    def __init__(self, limit: int = MAX_BLOCKS) -> None:
        self.limit = limit
        self.taken = 0


class PromptBlocks:
    """A `PromptBlocks` is a prompt of which indexes are asked. `model` is the name under which it is sent, which may be
    a LoRA adapter's.

    Mutable state: the keys found so far, by block size and adapter: several indexes ask for the same ones.
    """

    __slots__ = ("_content", "_ids", "_keys", "model", "num_tokens")

    def __init__(self, token_ids: Sequence[int], model: str | None = None) -> None:
        """Takes the ids. A prompt with an id that no tokenizer has (below 0, or 2³² or more) is nowhere cached."""
        self._ids = token_ids
        self._content: bytes | None = None
        self.num_tokens = len(token_ids)
        self.model = model
        self._keys: dict[tuple[int, str], list[int]] = {}

    def num_cached(self, block_size: int, adapter: str, has: Callable[[int], bool]) -> int:
        """Returns how many blocks the prompt begins with of which `has` says that they are there, at most
        `MAX_BLOCKS_OF_PROMPT`. The last token counts to none of them: engines compute it in any case."""
        keys = self._keys.get((block_size, adapter))
        if keys is None:
            keys = self._keys[block_size, adapter] = [root_key(adapter)]
        if self._content is None:
            self._content = _content(self._ids)
        size = block_size * _TOKEN_BYTES
        num_blocks = min(max(0, len(self._content) - _TOKEN_BYTES) // size, MAX_BLOCKS_OF_PROMPT)
        for i in range(num_blocks):
            if i + 1 == len(keys):
                keys.append(block_key(keys[i], self._content[i * size : (i + 1) * size]))
            if not has(keys[i + 1]):
                return i
        return num_blocks


def _content(token_ids: Sequence[int]) -> bytes:
    try:
        return array("I", token_ids).tobytes()
    except (OverflowError, TypeError):  # a client's own ids may be any numbers
        return b""


def root_key(adapter: str) -> int:
    """Returns the key that stands for the block before a prompt's first one; `adapter` is its LoRA adapter, or ""."""
    return block_key(0, adapter.encode("utf-8", "surrogatepass"), b"root")


def block_key(parent: int, content: bytes, extra: bytes = b"") -> int:
    """Returns the key of a block that follows the block `parent` and has `content`. `extra` is what it depends on
    besides."""
    digest = hashlib.blake2b(content, digest_size=8, key=_SECRET, salt=parent.to_bytes(8, "big"))
    if extra:
        digest.update(b"\0" + extra)
    return int.from_bytes(digest.digest(), "big") >> (64 - _KEY_BITS)


class _Group:
    """A `_Group` holds the blocks of one group of layers.

    Mutable state: the key of each block by the engine's hash; the keys that are there; where there are several copies
    of one block, how many; where several hashes have the same key, how many.
    """

    __slots__ = ("_copies", "_key_of", "_keys", "_shared", "is_sparse")

    def __init__(self, *, is_sparse: bool = False) -> None:
        self._key_of: dict[BlockHash, int] = {}
        self._keys: set[int] = set()
        self._copies: dict[BlockHash, int] = {}
        self._shared: dict[int, int] = {}
        self.is_sparse = is_sparse
        """Tells that the engine keeps some blocks of a prompt only, so that others cannot be told from missing ones."""

    def __len__(self) -> int:
        return len(self._key_of)

    def has(self, key: int) -> bool:
        return key in self._keys

    def key_of(self, name: BlockHash) -> int | None:
        return self._key_of.get(name)

    def add(self, name: BlockHash, key: int) -> bool:
        """Adds one copy of a block. Returns whether it is the first one. Raises `IndexBroken` where the name has
        another key."""
        known = self._key_of.get(name)
        if known is not None:
            if known != key:
                raise IndexBroken("a block that is there was stored again with other tokens")
            self._copies[name] = self._copies.get(name, 1) + 1
            return False
        self._key_of[name] = key
        if key in self._keys:
            self._shared[key] = self._shared.get(key, 1) + 1
        self._keys.add(key)
        return True

    def remove(self, name: BlockHash) -> bool:
        """Removes one copy of a block. Returns whether it was the last. Raises `IndexBroken` where there is none."""
        key = self._key_of.get(name)
        if key is None:
            raise IndexBroken("a block was removed that is not known to have been stored")
        if (copies := self._copies.pop(name, 1)) > 1:
            if copies > 2:
                self._copies[name] = copies - 1
            return False
        del self._key_of[name]
        if (hashes := self._shared.pop(key, 1)) == 1:
            self._keys.discard(key)
        elif hashes > 2:
            self._shared[key] = hashes - 1
        return True

    def check(self) -> None:
        """Raises `AssertionError` where the parts do not agree."""
        assert set(self._key_of.values()) == self._keys
        assert self._copies.keys() <= self._key_of.keys()
        assert len(self._key_of) == len(self._keys) + sum(hashes - 1 for hashes in self._shared.values())


class KvIndex:
    """A `KvIndex` holds the blocks of one engine process: of one data-parallel rank.

    It starts as `OFF`. Whoever has the events calls `begin`, `apply` for each batch in order, and `drop` or `doubt`
    where they cannot be had.

    Mutable state: the groups; the tokens of a block, as learned; the rank and the LoRA adapters that events named; why
    it is off; why blocks may be missing; why it is doubted; counters that only grow.
    """

    def __init__(self, budget: BlockBudget | None = None, *, max_blocks: int = MAX_BLOCKS_OF_ONE) -> None:
        self._budget = budget or BlockBudget()
        self._max_blocks = max_blocks
        self._groups: dict[int, _Group] = {}
        self._rank: int | None = None
        self._off: str | None = "nothing was heard yet"
        self._missing = ""
        self._doubt = ""
        self.block_size: int | None = None
        self.num_blocks = 0
        self.num_events = 0
        self.num_gaps = 0
        """Counts how often batches were missing from their sequence, whether a replay had them or not."""
        self.num_drops = 0
        """Counts how often all that was known had to be dropped."""

    # ── what it says ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def trust(self) -> Trust:
        if self._off is not None:
            return Trust.OFF
        return Trust.APPROXIMATE if self.why else Trust.EXACT

    @property
    def is_exact(self) -> bool:
        return self._off is None and not self.why

    @property
    def why(self) -> str:
        """The reason for which the index is not exact; empty where it is."""
        if self._off is not None:
            return self._off
        if len(self._groups) > 1:
            return f"its {len(self._groups)} groups of layers do not all need the same blocks"
        return self._missing or self._doubt

    def cached_tokens(self, prompt: PromptBlocks, adapter: str = "") -> int:
        """Returns how many tokens the engine would find in its cache if it were sent `prompt` now, as far as is known;
        `adapter` is the LoRA adapter that it would use. The number is one of whole blocks."""
        if self.block_size is None or self._off is not None:
            return 0
        size = self.block_size
        groups = [group for group in self._groups.values() if not group.is_sparse]
        return min((prompt.num_cached(size, adapter, group.has) for group in groups), default=0) * size

    def has_all(self, prompt: PromptBlocks, adapter: str = "") -> bool:
        """Tells whether the engine has the whole prompt but the last block, which it computes in any case."""
        size = self.block_size
        return size is not None and prompt.num_tokens - self.cached_tokens(prompt, adapter) <= size

    def status(self) -> dict[str, Any]:
        """Returns what the status page shows of the index."""
        return {
            "state": self.trust.value,
            "why": self.why,
            "block_size": self.block_size,
            "blocks": self.num_blocks,
            "events": self.num_events,
            "gaps": self.num_gaps,
            "drops": self.num_drops,
        }

    # ── what it is told ─────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, missing: str = "") -> None:
        """Begins anew with an empty index: the events that follow are all there were since the cache was empty, or else
        `missing` says which are not there."""
        self._clear()
        self._off, self._missing, self._doubt, self._rank, self.block_size = None, missing, "", None, None

    def drop(self, why: str) -> None:
        """Forgets everything: what is known cannot be believed."""
        self.num_drops += self._off is None
        self._clear()
        self._off = why

    def doubt(self, why: str) -> None:
        """Notes that events may be missing since the last one; with no `why`, that there are none."""
        self._doubt = why

    def apply(self, batch: EventBatch) -> None:
        """Takes in the next batch. Raises as `steps` does."""
        for _ in self.steps(batch):
            pass

    def steps(self, batch: EventBatch) -> Iterator[None]:
        """Takes in the next batch, and yields after `STEP_BLOCKS` blocks or events at the latest. Takes no more of it
        where the index was dropped meanwhile.

        Raises `IndexBroken`, after which the index is off, where the batch does not fit the ones before; and what
        ``batch.events`` raises.
        """
        if self._off is not None:
            return
        num_taken = 0
        try:
            if self._rank is None:
                self._rank = batch.data_parallel_rank
            elif batch.data_parallel_rank not in (None, self._rank):
                raise IndexBroken("events of several data-parallel ranks come from one address")
            for event in batch.events:
                self.num_events += 1
                for part in _parts(event):
                    num = 1 if isinstance(part, AllBlocksCleared) else max(1, len(part.block_hashes))
                    num_taken += num
                    if num_taken > STEP_BLOCKS:
                        num_taken = num
                        yield
                        if self._off is not None:
                            return
                    self._take(part)
        except (IndexBroken, OverflowError) as error:
            broken = IndexBroken(str(error))
            self.drop(str(error))
            raise broken from None

    def _take(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self._clear()
            self._missing = ""  # an empty cache is known as a whole
        elif event.medium not in IN_MEMORY or event.locality == "REMOTE":
            return
        elif isinstance(event, BlockStored):
            self._store(event)
        else:
            self._remove(event)

    def _store(self, event: BlockStored) -> None:
        group = self._group(event.group_idx)
        if group.is_sparse:
            return
        names, size = event.block_hashes, event.block_size
        if len(event.token_ids) != len(names) * size:
            if event.group_idx is None:
                raise IndexBroken(f"{len(names)} blocks of {size} tokens were stored with {len(event.token_ids)} ids")
            self._thin(event.group_idx)
            return
        if self.block_size is None:
            self.block_size = size
        elif size != self.block_size:
            raise IndexBroken(f"the tokens of a block changed from {self.block_size} to {size}")
        adapter = _adapter(event)
        parent = root_key(adapter) if event.parent_block_hash is None else group.key_of(event.parent_block_hash)
        if parent is None:
            if self._missing:
                return  # nobody can tell which prompt the blocks belong to
            if event.group_idx is not None and len(self._groups) > 1:
                self._thin(event.group_idx)
                return
            raise IndexBroken("a block was stored whose parent is not known to have been stored")
        extras = _extras(event.extra_keys, len(names), adapter)
        content, step = array("I", event.token_ids).tobytes(), size * _TOKEN_BYTES
        for i, (name, extra) in enumerate(zip(names, extras, strict=True)):
            parent = block_key(parent, content[i * step : (i + 1) * step], extra)
            if group.add(name, parent):
                self._count(1)

    def _remove(self, event: BlockRemoved) -> None:
        group = self._group(event.group_idx)
        if group.is_sparse:
            return
        for name in event.block_hashes:
            if self._missing and group.key_of(name) is None:
                continue
            if group.remove(name):
                self._count(-1)

    def _group(self, number: int | None) -> _Group:
        group = self._groups.get(number or 0)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                raise IndexBroken(f"there are more than {MAX_GROUPS} groups of layers")
            group = self._groups[number or 0] = _Group()
        return group

    def _thin(self, number: int) -> None:
        """Forgets the blocks of a group of which the engine keeps some only."""
        self._count(-len(self._groups[number]))
        self._groups[number] = _Group(is_sparse=True)

    def _count(self, more: int) -> None:
        self.num_blocks += more
        self._budget.taken += more
        if more <= 0:
            return
        if self.num_blocks > self._max_blocks:
            raise IndexBroken(f"it has more than {self._max_blocks} blocks, the most that are kept of one engine")
        if self._budget.taken > self._budget.limit:
            raise IndexBroken(f"there are more than {self._budget.limit} blocks, the most that are kept of all engines")

    def _clear(self) -> None:
        self._count(-self.num_blocks)
        self._groups.clear()

    def check_integrity(self) -> None:
        """Raises `AssertionError` where the blocks do not add up."""
        for group in self._groups.values():
            group.check()
        assert self.num_blocks == sum(map(len, self._groups.values()))

    def __repr__(self) -> str:
        return f"<KvIndex {self.trust}, {self.num_blocks} blocks{': ' if self.why else ''}{self.why}>"


def _parts(event: Event) -> Iterator[Event]:
    """Yields events of at most `STEP_BLOCKS` blocks that together say what `event` says. One that contradicts itself is
    left as it is."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= STEP_BLOCKS:
        yield event
        return
    names, starts = event.block_hashes, range(0, len(event.block_hashes), STEP_BLOCKS)
    if isinstance(event, BlockRemoved):
        for i in starts:
            yield replace(event, block_hashes=names[i : i + STEP_BLOCKS])
        return
    ids, extras, size = event.token_ids, event.extra_keys, event.block_size
    if len(ids) != len(names) * size or (extras is not None and len(extras) != len(names)):
        yield event
        return
    for i in starts:
        end = i + STEP_BLOCKS
        yield replace(
            event,
            block_hashes=names[i:end],
            parent_block_hash=names[i - 1] if i else event.parent_block_hash,
            token_ids=ids[i * size : end * size],
            extra_keys=None if extras is None else extras[i:end],
        )


def _adapter(event: BlockStored) -> str:
    """Returns the name of the LoRA adapter whose KV the blocks hold, "" where there is none. Where it is not told as a
    name, no prompt will ever be looked for under what is returned."""
    if isinstance(event.lora_name, str):
        return event.lora_name
    if event.lora_name is not None or event.lora_id is not None:
        return f"\0{event.lora_id} {event.lora_name!r}"
    return ""


def _extras(told: list[Any] | None, num_blocks: int, adapter: str) -> Iterable[bytes]:
    """Returns for each block what it depends on besides its tokens and the adapter; empty for none. Raises
    `IndexBroken`."""
    if told is None:
        return [b""] * num_blocks
    if len(told) != num_blocks:
        raise IndexBroken(f"{num_blocks} blocks were stored with extra keys for {len(told)}")
    return [_extra(one, adapter) for one in told]


def _extra(told: Any, adapter: str) -> bytes:
    if isinstance(told, list | tuple) and adapter and told and told[0] == adapter:
        told = told[1:]
    return repr(told).encode("utf-8", "surrogatepass") if told else b""
