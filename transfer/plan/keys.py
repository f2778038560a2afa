"""Names for chunks: equal keys mean equal bytes, so that a chunk which is there already need not travel again.

The KV of a token depends on every token before it. So a block's key is a hash over the whole prompt up to its end,
chained block by block (vLLM and LMCache name their blocks in the same way). Blocks of windowed groups and states are
named by the whole prompt: a window's tail is valid for its own end position only. A block that the prompt does not fill
is not shared: the next tokens go into it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from transfer.plan.blocks import PageTable

KEY_BYTES = 16
PRIVATE = b""
"""The key of a page that is nobody else's business."""


def chunk_keys(token_ids: Sequence[int], table: PageTable, salt: bytes = b"") -> list[bytes]:
    """One key of `KEY_BYTES` bytes per ordinal, or `PRIVATE`. `salt` keeps apart what must not be shared.

    The model need not be in the salt: only sides that agreed on it exchange keys.
    """
    chain = prefix_keys(token_ids, table.chunk_size, salt)
    whole = _digest(chain[-1] if chain else salt, np.asarray(token_ids, dtype=np.uint32).tobytes())
    keys = []
    for page in table.pages:
        group = table.groups[page.group]
        if group.kind not in ("full", "mla"):
            keys.append(_digest(whole, f"{page.group}:{page.block}".encode()))
        elif page.block < len(chain):
            keys.append(_digest(chain[page.block], str(page.group).encode()))
        else:
            keys.append(PRIVATE)
    return keys


def prefix_keys(token_ids: Sequence[int], chunk_size: int, salt: bytes = b"") -> list[bytes]:
    """One key per *full* block of the prompt, each over everything before it."""
    ids = np.asarray(token_ids, dtype=np.uint32)
    keys: list[bytes] = []
    parent = _digest(b"", salt)
    for end in range(chunk_size, len(ids) + 1, chunk_size):
        parent = _digest(parent, ids[end - chunk_size : end].tobytes())
        keys.append(parent)
    return keys


def _digest(parent: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES, key=parent).digest()
