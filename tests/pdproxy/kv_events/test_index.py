"""The index of an engine's prefix cache: the same as the cache itself, or it says that it is not."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.kv_events import index as module
from pdproxy.kv_events.index import BlockBudget, IndexBroken, KvIndex, PromptBlocks, Trust
from pdproxy.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from tests.fakes.hostile import new_dice
from tests.fakes.prefix_cache import PrefixCache

ROOT = Path(__file__).parents[3]
SIZE = 2


def batch(*events: Event, rank: int | None = None) -> EventBatch:
    return EventBatch(0.0, list(events), rank)


def stored(names: Sequence[Any], ids: Sequence[int], parent: Any = None, **more: Any) -> BlockStored:
    return BlockStored(
        block_hashes=list(names), parent_block_hash=parent, token_ids=list(ids), **{"block_size": SIZE} | more
    )


def removed(*names: Any, **more: Any) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(names), **more)


def begun(**more: Any) -> KvIndex:
    index = KvIndex(**more)
    index.begin()
    return index


def cached(index: KvIndex, ids: Sequence[int], adapter: str = "") -> int:
    return index.cached_tokens(PromptBlocks(ids), adapter)


def test_is_the_same_as_the_cache() -> None:
    """Conversations that grow, begin alike, are read twice at a time and given up, in a cache too small for them."""
    dice = new_dice()
    cache, index = PrefixCache(dice), begun()
    chats = [[dice.randrange(3) for _ in range(dice.randrange(1, 30))] for _ in range(6)]
    for step in range(2_000):
        chat = dice.choice(chats)
        act = dice.random()
        if act < 0.002:
            cache.clear()
        elif act < 0.1:
            chat[:] = dice.choice(chats)[: dice.randrange(1, 30)]
        else:
            chat += [dice.randrange(3) for _ in range(dice.randrange(12))]
            del chat[100:]
            cache.read(chat, again=act > 0.9)
        index.apply(batch(*cache.take_events()))
        asked = dice.choice(chats)[: dice.randrange(1, 101)]
        assert cached(index, asked) == cache.cached_tokens(asked), f"step {step}: {asked}"
        assert index.num_blocks == len(set(cache.blocks))
        index.check_integrity()
    assert index.trust is Trust.EXACT, index.why


def test_the_last_token_is_never_cached() -> None:
    index = begun()
    index.apply(batch(stored("ab", [1, 2, 3, 4])))
    assert [cached(index, [1, 2, 3, 4, 5][:length]) for length in range(6)] == [0, 0, 0, 2, 2, 4]
    prompts = [PromptBlocks([1, 2, 3, 4, 5, 6][:length]) for length in range(1, 7)]
    assert [index.has_all(prompt) for prompt in prompts] == [True, True, True, True, True, True]
    assert not index.has_all(PromptBlocks([1, 2, 3, 4, 5, 6, 7]))


def test_one_prompt_is_asked_of_several_indexes() -> None:
    """Of different block sizes and adapters; what was found for one is no answer for another."""
    small, large, adapted = begun(), begun(), begun()
    small.apply(batch(stored("ab", [1, 2, 3, 4])))
    large.apply(batch(stored("c", [1, 2, 3, 4], block_size=4)))
    adapted.apply(batch(stored("d", [1, 2], lora_name="poet")))
    prompt = PromptBlocks([1, 2, 3, 4, 5])
    for _ in range(2):
        assert [small.cached_tokens(prompt), large.cached_tokens(prompt)] == [4, 4]
        assert [adapted.cached_tokens(prompt), adapted.cached_tokens(prompt, "poet")] == [0, 2]


def test_of_a_very_long_prompt_only_the_beginning_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small an engine's blocks are: all other requests wait meanwhile."""
    monkeypatch.setattr(module, "MAX_BLOCKS_OF_PROMPT", 3)
    index = begun()
    index.apply(batch(stored("abcd", [1, 2, 3, 4, 5, 6, 7, 8])))
    long, longest = PromptBlocks([1, 2, 3, 4, 5, 6, 7, 8]), PromptBlocks([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert [index.cached_tokens(one) for one in (long, longest)] == [6, 6]
    assert [index.has_all(one) for one in (long, longest)] == [True, False], "it is served by a pair, to be sure"


def test_what_depends_on_more_than_tokens_is_not_found() -> None:
    index = begun()
    index.apply(batch(stored("ab", [1, 2, 3, 4], extra_keys=[["salt"], None])))
    index.apply(batch(stored("cd", [5, 6, 7, 8], extra_keys=[["poet"], ["poet", "image"]], lora_name="poet")))
    index.apply(batch(stored("e", [9, 9], lora_name={"cache_salt": "s"})))
    index.apply(batch(stored("f", [9, 9], lora_id=7)))
    assert cached(index, [1, 2, 3, 4, 5]) == 0
    assert cached(index, [5, 6, 7, 8, 9], "poet") == 2
    assert cached(index, [9, 9, 9]) == 0
    index.apply(batch(removed(*"abcdef")))
    assert index.num_blocks == 0
    assert index.is_exact


def test_copies_are_removed_one_by_one() -> None:
    index = begun()
    for _ in range(3):
        index.apply(batch(stored("a", [1, 2])))
    for left in (2, 1, 0):
        index.apply(batch(removed("a")))
        assert cached(index, [1, 2, 3]) == (SIZE if left else 0)
        index.check_integrity()


def test_two_names_of_the_same_tokens() -> None:
    index = begun()
    index.apply(batch(stored("a", [1, 2]), stored("b", [1, 2]), stored("c", [1, 2])))
    for name in "bac":
        assert cached(index, [1, 2, 3]) == SIZE
        index.apply(batch(removed(name)))
        index.check_integrity()
    assert cached(index, [1, 2, 3]) == 0


def test_blocks_elsewhere_do_not_count() -> None:
    index = begun()
    index.apply(batch(stored("a", [1, 2], medium="CPU"), removed("z", medium="STORAGE")))
    index.apply(batch(stored("a", [1, 2], locality="REMOTE")))
    assert (cached(index, [1, 2, 3]), index.trust) == (0, Trust.EXACT)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([removed("a")], "not known to have been stored"),
        ([stored("b", [3, 4], parent="a")], "parent is not known"),
        ([stored("a", [1, 2]), stored("b", [1, 2, 3], block_size=3)], "from 2 to 3"),
        ([stored("a", [1, 2]), stored("a", [1, 3])], "other tokens"),
        ([stored("a", [1, 2, 3])], "with 3 ids"),
        ([stored("a", [1, -2])], "unsigned"),
        ([stored("a", [1, 2**32])], "unsigned"),
        ([stored("a", [1, 2], extra_keys=[])], "extra keys for 0"),
        ([stored([i], [i, i], group_idx=i) for i in range(65)], "more than 64 groups"),
    ],
)
def test_a_contradiction_drops_everything(events: list[Event], why: str) -> None:
    index = begun()
    index.apply(batch(stored("x", [7, 7])))
    with pytest.raises(IndexBroken, match=why):
        index.apply(batch(*events))
    assert (index.trust, index.num_blocks, cached(index, [7, 7, 7])) == (Trust.OFF, 0, 0)
    assert why in index.why
    index.apply(batch(stored("x", [7, 7])))
    assert index.num_blocks == 0, "it begins anew only when it is told to"
    index.begin()
    index.apply(batch(stored("x", [7, 7])))
    assert (index.trust, cached(index, [7, 7, 7])) == (Trust.EXACT, SIZE)


def test_two_ranks_at_one_address() -> None:
    index = begun()
    index.apply(batch(rank=0))
    index.apply(batch())
    with pytest.raises(IndexBroken, match="several data-parallel ranks"):
        index.apply(batch(rank=1))


def test_part_of_the_history() -> None:
    """Blocks whose beginning is not known are left out, until the cache is known to be empty."""
    index = KvIndex()
    index.begin("1 batch is missing")
    index.apply(batch(stored("b", [3, 4], parent="a"), stored("c", [5, 6])))
    index.apply(batch(removed("a", "b")))
    assert (index.trust, index.why) == (Trust.APPROXIMATE, "1 batch is missing")
    assert cached(index, [5, 6, 7]) == SIZE
    index.apply(batch(AllBlocksCleared(), stored("c", [5, 6])))
    assert (index.trust, cached(index, [5, 6, 7])) == (Trust.EXACT, SIZE)


def test_doubt_comes_and_goes() -> None:
    index = begun()
    index.doubt("nobody answers")
    assert (index.trust, index.why) == (Trust.APPROXIMATE, "nobody answers")
    index.doubt("")
    assert index.is_exact


def test_several_groups_of_layers() -> None:
    """All dense groups must have a block. A group of which the engine keeps the last blocks only says nothing."""
    index = begun()
    index.apply(batch(stored("abc", [1, 2, 3, 4, 5, 6], group_idx=0)))
    assert index.is_exact
    index.apply(batch(stored("ab", [1, 2, 3, 4], group_idx=1)))
    assert (index.trust, cached(index, [1, 2, 3, 4, 5, 6, 7])) == (Trust.APPROXIMATE, 4)
    index.apply(batch(stored("f", [1, 2, 3, 4], group_idx=2), removed("g", group_idx=2)))
    assert cached(index, [1, 2, 3, 4, 5, 6, 7]) == 4
    index.apply(batch(stored("d", [7, 8], parent="nobody's", group_idx=1), removed("zz", group_idx=1)))
    assert cached(index, [1, 2, 3, 4, 5, 6, 7]) == 6
    index.check_integrity()


def test_no_more_blocks_than_allowed() -> None:
    budget = BlockBudget(5)
    one, other = (begun(budget=budget, max_blocks=3) for _ in range(2))
    one.apply(batch(stored("abc", [1, 2, 3, 4, 5, 6])))
    other.apply(batch(stored("ab", [1, 2, 3, 4])))
    with pytest.raises(IndexBroken, match="5 blocks, the most that are kept of all engines"):
        other.apply(batch(stored("c", [5, 6])))
    assert (budget.taken, one.num_blocks, other.num_blocks) == (3, 3, 0)
    with pytest.raises(IndexBroken, match="3 blocks, the most that are kept of one engine"):
        one.apply(batch(stored("d", [5, 6])))
    assert budget.taken == 0


def test_a_million_blocks_take_little_memory() -> None:
    """A few of them here; the script measures as many as it is told."""
    script = [sys.executable, "-m", "scripts.dev.measure_kv_index", "--blocks", "20000", "--json"]
    answer = subprocess.run(script, check=True, capture_output=True, cwd=ROOT, timeout=120)
    told = msgspec.json.decode(answer.stdout)
    assert told["blocks"] == 20_000
    assert 50 < told["bytes_per_block"] < 400


def test_names_are_not_shared_by_prefixes() -> None:
    """No two blocks get one key only because their tokens are the same in another order or place."""
    prompts = [list(ids) for ids in itertools.product(range(3), repeat=4)]
    for ids in prompts:
        index = begun()
        index.apply(batch(stored("ab", ids)))
        found = [other for other in prompts if cached(index, [*other, 0]) == 4]
        assert found == [ids]
