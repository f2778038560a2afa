"""Page tables: which page of an attempt is which block of which group."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.errors import GeometryError
from transfer.geometry import PageGroup, num_pages
from transfer.plan.blocks import PageAt, PageTable, page_table

FULL, SLIDING, CHUNKED = PageGroup("full", 4), PageGroup("sliding", 4, 10), PageGroup("chunked", 4, 16)
STATE = PageGroup("linear", 4, state_pages=2)

models = st.lists(st.sampled_from([FULL, SLIDING, CHUNKED, STATE]), min_size=1, max_size=5)


def test_block_by_block_and_group_by_group_and_states_last() -> None:
    table = page_table([STATE, FULL, SLIDING], 30, 8)
    assert table.pages == (
        PageAt(1, 0),
        PageAt(1, 1),
        PageAt(1, 2),
        PageAt(2, 2),
        PageAt(1, 3),
        PageAt(2, 3),
        PageAt(0, 0),
        PageAt(0, 1),
    )
    assert (table.null_blocks, table.real_blocks) == ((0, 0, 2), (2, 4, 2))
    assert (len(table), table.num_blocks) == (8, 4)
    assert table.group_of.tolist() == [1, 1, 1, 2, 1, 2, 0, 0]
    assert repr(table) == "<PageTable 30 tokens, 8 pages in 3 groups>"


def test_null_blocks_have_no_page_and_others_do_not_exist() -> None:
    table = page_table([FULL, SLIDING, STATE], 30, 8)
    assert [table.ordinal(1, block) for block in range(4)] == [None, None, 3, 5]
    for group, block in ((0, 4), (0, -1), (1, 4), (1, -1), (2, 2)):
        with pytest.raises(GeometryError, match=f"no block {block} of group {group}"):
            table.ordinal(group, block)


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_a_prompt_without_tokens(num_tokens: int) -> None:
    with pytest.raises(GeometryError, match="no KV"):
        page_table([FULL], num_tokens, 8)


def test_a_prompt_that_ends_with_its_chunk_leaves_nothing_to_read() -> None:
    table = page_table([CHUNKED], 32, 8)
    assert (len(table), table.pages, table.ordinal(0, 3)) == (0, (), None)


@given(models, st.integers(1, 100), st.integers(1, 20))
@settings(deadline=None)
def test_every_table(groups: list[PageGroup], num_tokens: int, chunk_size: int) -> None:
    table = page_table(groups, num_tokens, chunk_size)
    assert len(table) == len(table.pages) == num_pages(groups, num_tokens, chunk_size)
    check_bijective(table)
    check_order(table)
    for index, (num_null, num_real) in enumerate(zip(table.null_blocks, table.real_blocks, strict=True)):
        blocks = [page.block for page in table.pages if page.group == index]
        assert blocks == list(range(num_null, num_null + num_real))


def check_bijective(table: PageTable) -> None:
    assert len(set(table.pages)) == len(table)
    assert [table.ordinal(*page) for page in table.pages] == list(range(len(table)))


def check_order(table: PageTable) -> None:
    """A prompt is read block by block, and states are complete when it has been read."""
    order = [(table.groups[page.group].kind == "linear", page) for page in table.pages]
    with_tokens = [(page.block, page.group) for is_state, page in order if not is_state]
    assert [is_state for is_state, _ in order] == sorted(is_state for is_state, _ in order)
    assert with_tokens == sorted(with_tokens)
