"""The size of a model's KV, read from its Hugging Face config, so that nobody works out bytes per token by hand.

Everything is counted for **one tensor-parallel rank**:

    load_config(path) → config      config.json, through transformers' class where that knows the model type
    kv_geometry(config, …) → KvGeometry      bytes per token and per sequence, by kind of layer
    layer_groups(config, …) → [LayerGroup | None]      the same, layer by layer
    capacity(geometry, buffer, chunk) → PdCapacity      what that makes of a PD buffer
    num_skipped_tokens, block_counts                 arithmetic on prompts
    page_groups, num_pages, max_prompt_tokens        where layers are unlike: which share pages, what a prompt occupies

Configs name the same thing in many ways, leave out what their class knows, and some attributes mislead. So nothing here
is guessed: what cannot be read raises `GeometryError`, which names the attribute and the flag that supplies the number
by hand. Torch is not needed; transformers is imported only to interpret a JSON object.
"""

from __future__ import annotations

from transfer.errors import GeometryError
from transfer.geometry.capacity import PdCapacity, capacity, parse_size
from transfer.geometry.config import load_config, resolve_config, unknown_type
from transfer.geometry.derive import kv_geometry, layer_groups
from transfer.geometry.groups import KINDS, KvGeometry, LayerGroup
from transfer.geometry.paging import (
    PageGroup,
    group_page_bytes,
    max_prompt_tokens,
    most_pages,
    num_pages,
    page_groups,
)
from transfer.geometry.prompts import block_counts, num_skipped_tokens

__all__ = [
    "KINDS",
    "GeometryError",
    "KvGeometry",
    "LayerGroup",
    "PageGroup",
    "PdCapacity",
    "block_counts",
    "capacity",
    "group_page_bytes",
    "kv_geometry",
    "layer_groups",
    "load_config",
    "max_prompt_tokens",
    "most_pages",
    "num_pages",
    "num_skipped_tokens",
    "page_groups",
    "parse_size",
    "resolve_config",
    "unknown_type",
]
