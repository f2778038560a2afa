"""Pages that a sequence is given: those that will be read, each only once at a time, and no others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.engine.cache_need import cache_need, max_cached_tokens
from transfer.geometry import PageGroup, num_skipped_tokens
from transfer.plan.blocks import page_table

FULL = PageGroup("full", 2)
windows = st.builds(PageGroup, st.sampled_from(["sliding", "chunked"]), st.just(2), st.integers(1, 40))
some_groups = st.lists(st.one_of(st.just(FULL), windows), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(some_groups, st.integers(1, 16), st.integers(1, 120), st.integers(0, 120), st.booleans())
def test_whatever_is_read_together_lies_in_different_pages(
    groups: list[PageGroup], chunk: int, num_prompt: int, num_answer: int, is_handoff: bool
) -> None:
    """A model of the pages: which token each place holds. Every read must find the tokens it wants."""
    need = cache_need(groups, chunk, num_prompt + num_answer, num_prompt if is_handoff else 0)
    tables = need.tables(range(need.num_pages))
    for group, table in zip(groups, tables, strict=True):
        held: dict[tuple[int, int], int] = {}

        def write(token: int, table: list[int | None] = table, held: dict[tuple[int, int], int] = held) -> None:
            page = table[token // chunk]
            assert page is not None
            held[page, token % chunk] = token

        reads = [(start, min(start + chunk, num_prompt)) for start in range(0, num_prompt, chunk)]
        if is_handoff:
            reads = []
            null, _ = group.blocks(num_prompt, chunk)
            for token in range(null * chunk, num_prompt):
                write(token)
        for start, end in [*reads, *((token, token + 1) for token in range(num_prompt, num_prompt + num_answer))]:
            for token in range(start, end):
                write(token)
            for token in range(num_skipped_tokens(group.kind, start, group.window), end):
                assert held[table[token // chunk] or 0, token % chunk] == token


@settings(max_examples=200, deadline=None)
@given(some_groups, st.integers(1, 16), st.integers(1, 200), st.integers(1, 50))
def test_a_handoff_has_a_page_for_every_page_that_travels_and_null_blocks_for_the_rest(
    groups: list[PageGroup], chunk: int, num_prompt: int, num_answer: int
) -> None:
    need = cache_need(groups, chunk, num_prompt + num_answer, num_prompt)
    tables = need.tables(range(need.num_pages))
    travelling = page_table(groups, num_prompt, chunk)
    pages = [tables[at.group][at.block] for at in travelling.pages]
    assert None not in pages
    assert len(set(pages)) == len(pages)
    for table, null in zip(tables, travelling.null_blocks, strict=True):
        assert [page is None for page in table] == [True] * null + [False] * (len(table) - null)
        assert len(table) == -(-(num_prompt + num_answer) // chunk)
    assert {page for table in tables for page in table if page is not None} == set(range(need.num_pages))


def test_pages_follow_each_other_as_those_that_travel_do() -> None:
    """A prompt's pages at both ends are runs in the same order, so that neighbours travel as one."""
    groups = (FULL, PageGroup("sliding", 2, 9))
    need = cache_need(groups, 4, 40, 32)
    tables = need.tables(range(100, 100 + need.num_pages))
    travelling = page_table(groups, 32, 4)
    assert [tables[at.group][at.block] for at in travelling.pages] == list(range(100, 100 + len(travelling)))


def test_a_windowed_group_does_not_grow() -> None:
    groups = (FULL, PageGroup("sliding", 2, 9))
    assert [cache_need(groups, 4, n).group_pages for n in (1, 9, 12, 13, 400)] == [
        (1, 1), (3, 3), (3, 3), (4, 3), (100, 3),
    ]  # fmt: skip
    assert cache_need(groups, 4, 400, 390).group_pages == (100, 3)
    assert cache_need(groups, 4, 391, 390).group_pages == (98, 3), "382 to 390 are read next: blocks 95 to 97"


@pytest.mark.parametrize("answer", [0, 1, 2])
def test_an_answer_within_the_last_block_needs_no_other(answer: int) -> None:
    assert cache_need((FULL,), 4, 6 + answer, 6).group_pages == (2,)


@settings(max_examples=100, deadline=None)
@given(some_groups, st.integers(1, 16), st.integers(0, 60))
def test_the_longest_sequence_fits_and_the_next_longer_one_does_not(
    groups: list[PageGroup], chunk: int, num_pages: int
) -> None:
    longest = max_cached_tokens(groups, num_pages, chunk)
    if longest is None:
        assert all(group.window for group in groups)
        assert cache_need(groups, chunk, 10**6).num_pages <= num_pages
        return
    assert cache_need(groups, chunk, longest).num_pages <= num_pages
    assert cache_need(groups, chunk, longest + 1).num_pages > num_pages
