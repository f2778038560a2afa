"""The reports tell which layers of which pages of a prompt are in memory, from what a forward pass has computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transfer.engine.cache_need import BlockTable, cache_page
from transfer.engine.model import ModelRunner, OnLayers
from transfer.plan.blocks import PageTable

Listener = Callable[[int, int, int, int], None]
"""A function that is told (ordinal of the prompt's page, cache page, first layer, end layer) of layers that are in
memory."""


def report_block(
    runner: ModelRunner, prompt_pages: PageTable, tables: Sequence[BlockTable], block: int, listener: Listener
) -> OnLayers:
    """Returns what a forward pass over `block` calls. It tells `listener` of the layers, but not of those that nobody
    reads there."""

    def report(group: int, first_layer: int, end_layer: int) -> None:
        ordinal = prompt_pages.ordinal(group, block)
        if ordinal is not None:
            runner.synchronize()
            listener(ordinal, cache_page(prompt_pages, tables, ordinal), first_layer, end_layer)

    return report


def report_reused(runner: ModelRunner, prompt_pages: PageTable, pages: Sequence[int], listener: Listener) -> None:
    """Tells of all layers of the prompt's first pages, which are in `pages` of the cache and need not be computed."""
    runner.synchronize()
    for ordinal, page in enumerate(pages):
        num_layers = len(runner.layout.groups[prompt_pages.pages[ordinal].group].layers)
        listener(ordinal, page, 0, num_layers)
