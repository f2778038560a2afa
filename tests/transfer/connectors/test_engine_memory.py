"""Pages sent out of an engine's own KV cache, whatever its strides: every byte where the layout says."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from transfer.errors import GeometryError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.engine_memory import EngineMemory
from transfer.memory.views import layer_views
from transfer.plan.layout import KvLayout, LayerKv
from transfer.plan.placement import Rows
from transfer.plan.spans import SpanMap

SEED = int(os.environ.get("PDPROXY_TEST_SEED", "7"))
TOKENS, CONTENT = 4, 6
Maker = Callable[..., list[torch.Tensor]]


def layer_first(num_layers: int, num_blocks: int, num_heads: int, num_tokens: int = TOKENS) -> list[torch.Tensor]:
    """One run of memory per layer, as vLLM's LBHNC has it."""
    return list(torch.zeros(num_layers, num_blocks, num_heads, num_tokens, CONTENT).unbind(0))


def block_first(num_layers: int, num_blocks: int, num_heads: int, num_tokens: int = TOKENS) -> list[torch.Tensor]:
    """One block of all layers after the other, as vLLM's BLHNC has it."""
    return list(torch.zeros(num_blocks, num_layers, num_heads, num_tokens, CONTENT).unbind(1))


def padded(num_layers: int, num_blocks: int, num_heads: int, num_tokens: int = TOKENS) -> list[torch.Tensor]:
    """Blocks of which only the beginning is used."""
    page = num_heads * num_tokens * CONTENT
    whole = torch.zeros(num_layers, num_blocks, page + 8)
    return [one[:, :page].unflatten(1, (num_heads, num_tokens, CONTENT)) for one in whole.unbind(0)]


def layout(num_layers: int, heads: int = 2, **more: object) -> KvLayout:
    return KvLayout((LayerKv(heads, CONTENT, 0),) * num_layers, TOKENS, 4, "float32", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [layer_first, block_first, padded])
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_every_byte_of_a_block_is_where_the_decoder_reads_it(make: Maker, ranks: tuple[int, int]) -> None:
    writers, readers = ranks
    kv, dice = layout(3, heads=4), random.Random(SEED)
    blocks, pages = dice.sample(range(16), 5), dice.sample(range(8), 5)
    truth = torch.randn(3, 16, 4, TOKENS, CONTENT, generator=torch.Generator().manual_seed(SEED))
    received = [PagedBuffer(8, kv.of_rank(readers, index).page_bytes) for index in range(readers)]
    for writer in range(writers):
        ours = kv.of_rank(writers, writer)
        heads = slice(writer * 4 // writers, (writer + 1) * 4 // writers)
        layers = make(3, 16, 4 // writers)
        for layer, tensor in enumerate(layers):
            tensor.copy_(truth[layer, :, heads])
        memory = EngineMemory(layers, ours)
        for reader in range(readers):
            theirs = kv.of_rank(readers, reader)
            spans = SpanMap(ours, theirs, memory.placement)
            for layer in range(3):
                copy(memory.whole, received[reader].pages.flatten(), spans.spans(0, blocks, pages, layer, layer + 1))
    for reader, buffer in enumerate(received):
        heads = slice(reader * 4 // readers, (reader + 1) * 4 // readers)
        for layer, views in enumerate(layer_views(buffer.pages, kv.of_rank(readers, reader))):
            assert views is not None
            assert torch.equal(views.keys[pages], truth[layer, blocks][:, heads]), f"seed {SEED}, layer {layer}"


CUTS = {"token by token": [Rows(1, CONTENT * 4)], "keys transposed": [Rows(CONTENT // 2, 4), Rows(1, CONTENT // 2 * 4)]}


def head_bytes(truth: torch.Tensor, cut: list[Rows]) -> torch.Tensor:
    """The bytes of heads, ``[heads, tokens, content]``, in the order of these rows."""
    first, parts = 0, []
    elements = truth.contiguous().view(torch.uint8)
    for num, token_bytes in cut:
        rows = elements[:, :, first : first + num * token_bytes].unflatten(2, (num, token_bytes))  # type: ignore[no-untyped-call]
        parts.append(rows.transpose(1, 2).flatten(1))
        first += num * token_bytes
    return torch.cat(parts, 1)


@pytest.mark.parametrize("make", [layer_first, block_first, padded])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("num_pieces", [2, 3])
@pytest.mark.parametrize("readers", [1, 2])
def test_a_page_has_the_bytes_of_a_block_of_as_many_tokens(
    make: Maker, cut: list[Rows], num_pieces: int, readers: int
) -> None:
    """Sent out of larger blocks to one rank or two, and put into larger blocks again."""
    kv, dice, num_blocks = layout(3, heads=4), random.Random(SEED), 8
    truth = torch.randn(3, num_blocks * num_pieces, 4, TOKENS, CONTENT, generator=torch.Generator().manual_seed(SEED))
    sources, targets = (make(3, num_blocks, 4, TOKENS * num_pieces) for _ in range(2))
    for layer, block in itertools.product(range(3), range(num_blocks)):
        tokens = torch.cat(list(truth[layer, block * num_pieces : (block + 1) * num_pieces]), 1)
        sources[layer][block] = head_bytes(tokens, cut).view(torch.float32).view(4, -1, CONTENT)
    ours, back = (EngineMemory(layers, kv.of_rank(), num_pieces, [cut] * 3) for layers in (sources, targets))
    local = dice.sample(range(num_blocks * num_pieces), 7)
    remote, last = dice.sample(range(9), 7), dice.sample(range(num_blocks * num_pieces), 7)
    for index in range(readers):
        theirs = kv.of_rank(readers, index)
        buffer, spans = PagedBuffer(9, theirs.page_bytes), SpanMap(kv.of_rank(), theirs, ours.placement)
        for layer in range(3):
            copy(ours.whole, buffer.pages.flatten(), spans.spans(0, local, remote, layer, layer + 1))
        heads = slice(index * 4 // readers, (index + 1) * 4 // readers)
        for layer, views in enumerate(layer_views(buffer.pages, theirs)):
            assert views is not None
            content = views.keys.view(torch.uint8).flatten(2)
            for page, at in zip(local, remote, strict=True):
                assert torch.equal(content[at], head_bytes(truth[layer, page, heads], cut)), f"seed {SEED}"
            if readers == 1:
                back.put(layer, torch.tensor(last), content[remote])
    if readers > 1:
        return
    for layer in range(3):
        expected = torch.zeros(num_blocks * num_pieces, 4, TOKENS, CONTENT)
        expected[last] = truth[layer, local]
        for block in range(num_blocks):
            tokens = torch.cat(list(expected[block * num_pieces : (block + 1) * num_pieces]), 1)
            assert torch.equal(targets[layer][block].contiguous().view(torch.uint8).flatten(1), head_bytes(tokens, cut))


def test_rows_that_are_not_a_tokens_bytes_are_refused() -> None:
    with pytest.raises(GeometryError, match="24 bytes per token and head, and its rows 20"):
        EngineMemory(layer_first(2, 16, 2, 8), layout(2).of_rank(), 2, [[Rows(1, 20)]] * 2)


def test_blocks_that_are_not_as_many_pages_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"= \(2, 8, 24\), and the layout says \(2, 12, 24\)"):
        EngineMemory(layer_first(2, 16, 2, 8), layout(2).of_rank(), 3, [[Rows(1, 24)]] * 2)


def test_groups_of_an_engine_share_its_blocks() -> None:
    """A hybrid model: two groups, whose layers overlay each other in one pool of blocks."""
    full, windowed = LayerKv(2, CONTENT, 0), LayerKv(2, CONTENT, 0, "sliding", 8)
    kv = KvLayout((full, windowed, full, windowed), TOKENS, 4, "float32", grouping=((0, 2), (1, 3)))
    first, second = layer_first(2, 16, 2)
    memory = EngineMemory([first, first, second, second], kv.of_rank())
    assert [group.kind for group in kv.groups] == ["full", "sliding"]
    assert memory.placement[0] == memory.placement[1]
    assert kv.of_rank().page_bytes == 2 * 2 * TOKENS * CONTENT * 4


def token_first() -> list[torch.Tensor]:
    """Heads within tokens, as vLLM's LBNHC has it."""
    return list(torch.zeros(2, 16, TOKENS, 2, CONTENT).transpose(2, 3).unbind(0))


def test_one_head_has_whatever_stride_torch_gives_it() -> None:
    """As with multi-head latent attention, which vLLM keeps by tokens."""
    whole = torch.zeros(2, 16, TOKENS, 1, CONTENT)
    layers = list(whole.transpose(2, 3).unbind(0))
    assert layers[0].stride(1) != TOKENS * CONTENT
    kv = KvLayout((LayerKv(1, CONTENT, 0, "mla"),) * 2, TOKENS, 4, "float32")
    memory = EngineMemory(layers, kv.of_rank())
    assert memory.placement[0].stride == TOKENS * CONTENT * 4


def two_allocations() -> list[torch.Tensor]:
    return [*layer_first(1, 16, 2), *layer_first(1, 16, 2)]


def unlike_strides() -> list[torch.Tensor]:
    first, second = layer_first(2, 16, 2)
    return [first, second[::2]]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (token_first(), "has the strides"),
        ([one[:, :, :, :3] for one in layer_first(2, 16, 2)], r"has \(heads, tokens, bytes\) = \(2, 4, 12\)"),
        ([one[:, :1] for one in layer_first(2, 16, 2)], r"= \(1, 4, 24\)"),
        (two_allocations(), "in 2 allocations"),
        ([one.flatten(1) for one in layer_first(2, 16, 2)], r"has the shape \(16, 48\)"),
        (unlike_strides(), "at distances of"),
    ],
)
def test_what_is_laid_out_otherwise_is_refused(layers: list[torch.Tensor], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        EngineMemory(layers, layout(2).of_rank())


@pytest.mark.parametrize("grouping", [((0,), (1,)), ((0, 1, 2), (3,)), ((0, 1), (1, 2, 3)), ((0, 1), (2, 3))])
def test_groups_that_are_not_the_layers_are_refused(grouping: tuple[tuple[int, ...], ...]) -> None:
    full, windowed = LayerKv(2, CONTENT, 0), LayerKv(2, CONTENT, 0, "sliding", 8)
    with pytest.raises(GeometryError):
        KvLayout((full, windowed, full, windowed), TOKENS, 4, "float32", grouping=grouping)


def test_another_order_of_bytes_is_another_cache() -> None:
    told = {layout(2).describe(), layout(2, packing="amx").describe(), layout(2, packing="vec").describe()}
    told |= {layout(2, grouping=((0, 1),)).describe(), layout(2, grouping=((0,), (1,))).describe()}
    assert len(told) == 5


def copy(source: torch.Tensor, target: torch.Tensor, spans: np.ndarray) -> None:  # type: ignore[type-arg]
    for ours, theirs, size in spans.tolist():
        target[theirs : theirs + size] = source[ours : ours + size]
