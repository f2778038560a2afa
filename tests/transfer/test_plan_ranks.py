"""Who holds which heads and who writes them to whom, for every division there is, by asking everybody."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from transfer.errors import GeometryError
from transfer.plan.feeds import writers_of
from transfer.plan.layout import KvLayout, LayerKv
from transfer.plan.ranks import Rank, heads_between, heads_of, holders_of, writer_of

SIZES = (1, 2, 4, 8)
divisions = pytest.mark.parametrize(("num_heads", "writers", "readers"), [*product(SIZES, SIZES, SIZES), (6, 3, 12)])


def ranks(size: int) -> list[Rank]:
    return [Rank(size, index) for index in range(size)]


def uniform(*head_counts: int) -> KvLayout:
    return KvLayout(tuple(LayerKv(count, 4, 4) for count in head_counts), 16, 2)


@pytest.mark.parametrize(("num_heads", "size"), [*product(SIZES, SIZES), (6, 3), (3, 6), (12, 4)])
def test_heads_are_divided_in_order_or_repeated_on_neighbours(num_heads: int, size: int) -> None:
    held = [list(heads_of(num_heads, rank)) for rank in ranks(size)]
    assert {len(heads) for heads in held} == {max(1, num_heads // size)}
    assert [head for heads in held for head in heads] == sorted(head for heads in held for head in heads)
    assert Counter(head for heads in held for head in heads) == dict.fromkeys(
        range(num_heads), max(1, size // num_heads)
    )
    for head in range(num_heads):
        assert list(holders_of(head, num_heads, size)) == [index for index, heads in enumerate(held) if head in heads]


@divisions
def test_every_reader_gets_each_of_its_heads_from_one_writer_that_holds_it(
    num_heads: int, writers: int, readers: int
) -> None:
    for reader in ranks(readers):
        runs = [heads_between(num_heads, writer, reader) for writer in ranks(writers)]
        assert sorted(head for run in runs for head in run) == list(heads_of(num_heads, reader))
        for writer, run in zip(ranks(writers), runs, strict=True):
            assert run.step == 1, "a run of neighbours"
            assert set(run) <= set(heads_of(num_heads, writer))
            assert all(writer_of(head, num_heads, writers, reader) == writer.index for head in run)


@divisions
def test_the_work_is_spread_evenly(num_heads: int, writers: int, readers: int) -> None:
    """No writer of a head has two readers more than another one that holds it."""
    for head in range(num_heads):
        readers_of_head = holders_of(head, num_heads, readers)
        chosen = Counter(writer_of(head, num_heads, writers, Rank(readers, reader)) for reader in readers_of_head)
        loads = [chosen[writer] for writer in holders_of(head, num_heads, writers)]
        assert sum(loads) == len(readers_of_head)
        assert max(loads) - min(loads) <= 1


@divisions
def test_who_writes_to_whom_is_who_has_heads_for_whom(num_heads: int, writers: int, readers: int) -> None:
    layout = uniform(num_heads)
    fed = {(writer, r.index) for r in ranks(readers) for writer in writers_of(layout, writers, r)}
    assert fed == {(w.index, r.index) for w in ranks(writers) for r in ranks(readers) if heads_between(num_heads, w, r)}
    assert {reader for _, reader in fed} == set(range(readers)), "nobody is left out"


def test_alike_divisions_pair_ranks_up() -> None:
    for size in SIZES:
        for rank in ranks(size):
            assert writers_of(uniform(8), size, rank) == {rank.index}


def test_a_latent_goes_to_everybody() -> None:
    latent = KvLayout((LayerKv(1, 576, 0, "mla"),), 16, 2)
    assert [writers_of(latent, 2, rank) for rank in ranks(4)] == [{0}, {0}, {1}, {1}]
    assert [writers_of(latent, 4, rank) for rank in ranks(2)] == [{0}, {2}]


def test_layers_with_other_head_counts_add_writers() -> None:
    assert writers_of(uniform(4), 4, Rank(2, 0)) == {0, 1}
    assert writers_of(uniform(1), 4, Rank(2, 1)) == {2}
    assert writers_of(uniform(4, 1), 4, Rank(2, 0)) == {0, 1}
    assert writers_of(uniform(2, 1), 8, Rank(2, 1)) == {4}
    assert [writers_of(uniform(4, 1), 8, rank) for rank in ranks(2)] == [{0, 2}, {4, 6}]


@pytest.mark.parametrize(("num_heads", "size"), [(8, 3), (3, 2), (2, 3), (0, 1), (8, 17)])
def test_uneven_divisions_are_refused(num_heads: int, size: int) -> None:
    for ask in (
        lambda: heads_of(num_heads, Rank(size, 0)),
        lambda: holders_of(0, num_heads, size),
        lambda: writer_of(0, num_heads, size, Rank(1, 0)),
        lambda: heads_between(num_heads, Rank(size, 0), Rank(1, 0)),
        lambda: heads_between(num_heads, Rank(1, 0), Rank(size, 0)),
        lambda: writers_of(uniform(size, num_heads), size, Rank(1, 0)),
    ):
        with pytest.raises(GeometryError, match="neither divided over nor repeated"):
            ask()


@pytest.mark.parametrize(("size", "index"), [(1, 1), (4, -1), (0, 0)])
def test_no_such_rank(size: int, index: int) -> None:
    with pytest.raises(GeometryError, match=f"no rank {index} of {size}"):
        Rank(size, index)
