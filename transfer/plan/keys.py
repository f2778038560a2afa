"""Names for chunks. Equal keys mean equal bytes, so a chunk which is there already need not travel again.

The KV of a token depends on every token before it. So a block's key is a hash over the whole prompt up to its end,
chained block by block (vLLM and LMCache name their blocks in the same way). Blocks of windowed groups and states are
named by the whole prompt: a window's tail is valid for its own end position only. A block that the prompt does not fill
is not shared: the next tokens go into it.

With a secret every key is a keyed hash. What must hold: somebody who does not know the secret cannot name a chunk of
any prompt. So nobody outside can pass off other bytes as a prompt's. A violation would be a key that is the same
without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from transfer.errors import GeometryError
from transfer.plan.blocks import PageAt, PageTable

CHUNK_KEY_BYTES = 16
"""The bytes of one key."""
TOKEN_BYTES = 4
"""The bytes of one token id in what is hashed."""
PRIVATE = b""
"""The key of a page that is not shared."""


def chunk_keys(token_ids: Sequence[int], table: PageTable, salt: bytes = b"", *, secret: bytes = b"") -> list[bytes]:
    """Returns one key of `CHUNK_KEY_BYTES` bytes per ordinal, or `PRIVATE`. `salt` keeps apart what must not be shared.

    `secret`, of 64 bytes at most, is that of the fleet (`transfer.trust.FleetKey.chunk_secret`): prefillers with the
    same one share chunks, and nothing is shared with anybody else. The model need not be in the salt: only sides that
    agreed on it exchange keys. Raises `GeometryError` where `table` is of another prompt.
    """
    if len(token_ids) != table.num_tokens:
        raise GeometryError(f"{len(token_ids)} token ids are not the prompt of {table!r}")
    if secret:
        salt = _digest(secret, salt)
    chain = prefix_keys(token_ids, table.chunk_size, salt)
    whole = _digest(_digest(b"whole", salt), _content(token_ids))
    return [_key_at(page, table.groups[page.group].kind, chain, whole) for page in table.pages]


def _key_at(page: PageAt, kind: str, chain: Sequence[bytes], whole: bytes) -> bytes:
    if kind != "linear" and page.block >= len(chain):
        return PRIVATE
    if kind in ("full", "mla"):
        return _digest(chain[page.block], f"{page.group}".encode())
    return _digest(whole, f"{page.group}:{page.block}".encode())


def prefix_keys(token_ids: Sequence[int], chunk_size: int, salt: bytes = b"") -> list[bytes]:
    """Returns one key per *full* block of the prompt. Each is a hash over everything up to the block's end."""
    content, size = _content(token_ids), chunk_size * TOKEN_BYTES
    keys: list[bytes] = []
    parent = _digest(b"", salt)
    for end in range(size, len(content) + 1, size):
        parent = _digest(parent, content[end - size : end])
        keys.append(parent)
    return keys


def _content(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()


def _digest(parent: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=CHUNK_KEY_BYTES, key=parent).digest()
