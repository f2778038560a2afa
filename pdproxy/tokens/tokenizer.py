"""The module holds a model's fast tokenizer. Other threads do not wait for it, and it does not read twice what it
knows.

`Tokenizer.encode` holds the GIL for as long as it runs; ``encode_batch_fast`` releases it. Python still has to make a
list of the ids, which takes 2 ms for 128,000 of them.

The ids of a text are not the ids of its pieces put together: the start of a piece may join with the end of the piece
before. But a tokenizer cuts a text at special tokens before it does anything else, so that the parts between them are
encoded independently of each other. So a conversation that has grown by a message is read only from that message on.
This holds where special tokens take nothing of the text around them, and where it does not matter which part is the
first. Both are tried out when a tokenizer is loaded. For a tokenizer that fails there, and for a text without special
tokens, only the whole text can be recognised.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from pdproxy.errors import ConfigError
from pdproxy.tokens.lru import LruCache

FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
CACHE_BYTES = 32 << 20
"""The most bytes of ids that are kept: room for eight million ids."""

NUM_ADDED_TOKENS = 64
_PARALLELISM = "TOKENIZERS_PARALLELISM"
_SAMPLES = ("a", " a b ", "\n", "\n\nA", "12345", "  ", "e\u0301 \u00e9", "'s", "\u2581x", "\u4f60\u597d", "\t{}\r\n")
"""The texts that a tokenizer might treat differently in front of a special token, behind it, or at the start."""

T = TypeVar("T")


class FastTokenizer:
    """A `FastTokenizer` is the tokenizer in the model folder `path`. Several threads may use it.

    Raises `ConfigError` where the folder has no tokenizer that can be read.

    Mutable state: the parts of texts that are known, by their ids or by their number only.
    """

    def __init__(self, path: Path, *, cache_bytes: int = CACHE_BYTES) -> None:
        os.environ.setdefault(_PARALLELISM, "false")  # else a text in parts would be given to all cores at once
        self._tokenizer = _load(path / FILE)
        self.added_tokens = _added_tokens(self._tokenizer, path / CONFIG_FILE)
        """Some of the tokens that are looked for in a text before all else, here or in what transformers builds."""
        self._border = _border(self._tokenizer)
        self._frame = _frame(self._tokenizer)
        self._ids: LruCache[array[int]] = LruCache(cache_bytes)
        self._counts: LruCache[int] = LruCache(cache_bytes)

    @property
    def knows_parts(self) -> bool:
        """Tells whether texts are cut at special tokens, so that their parts can be recognised."""
        return self._border is not None

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        """Returns how many ids `ids` would return."""
        if add_special_tokens and self._frame is None:
            return len(self._whole(text))
        before, after = self._frame if self._frame is not None and add_special_tokens else ([], [])
        return len(before) + sum(self._of_parts(text, self._counts, len, lambda _: 0)) + len(after)

    def ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns exactly the ids of the whole text."""
        if add_special_tokens and self._frame is None:
            return self._whole(text).ids
        before, after = self._frame if self._frame is not None and add_special_tokens else ([], [])
        ids = list(before)
        for part in self._of_parts(text, self._ids, _as_array, _num_bytes):
            ids.extend(part)
        return ids + after

    def _whole(self, text: str) -> Encoding:
        return self._tokenizer.encode_batch_fast([text])[0]

    def _of_parts(
        self, text: str, known: LruCache[T], read: Callable[[Encoding], T], num_bytes: Callable[[T], int]
    ) -> list[T]:
        """Returns one value for each part of `text`: the `known` one, or else what `read` makes of the part."""
        parts = [text] if self._border is None else [part for part in self._border.split(text) if part]
        keys = [blake2b(part.encode(), digest_size=16).digest() for part in parts]
        found = {key: value for key in keys if (value := known.get(key)) is not None}
        missing = {key: part for key, part in zip(keys, parts, strict=True) if key not in found}
        encodings = self._tokenizer.encode_batch_fast(list(missing.values()), add_special_tokens=False)
        for key, encoding in zip(missing, encodings, strict=True):
            found[key] = read(encoding)
            known.put(key, found[key], num_bytes(found[key]))
        return [found[key] for key in keys]


def _load(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises nothing narrower
        raise ConfigError(f"model: {file} cannot be read as a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _added_tokens(tokenizer: Tokenizer, config: Path) -> list[str]:
    """Returns the first `NUM_ADDED_TOKENS` added tokens that the tokenizer or the file `config` names."""
    tokens = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    try:
        told = json.loads(config.read_bytes()).get("added_tokens_decoder", {}).values()
        tokens += [token["content"] for token in told]
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        pass  # A folder may well have no such file, and none of this has to be in it.
    return list(dict.fromkeys(tokens))[:NUM_ADDED_TOKENS]


def _border(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Returns the pattern at which texts are cut; None where parts are not independent.

    The pattern finds the texts which the tokenizer looks for before all else, the longest first, as the tokenizer does
    itself.
    """
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    if not added or any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    texts = sorted((token.content for token in added), key=len, reverse=True)
    if not _fall_apart(tokenizer, texts):
        return None
    return re.compile(f"({'|'.join(map(re.escape, texts))})")


def _fall_apart(tokenizer: Tokenizer, specials: Sequence[str]) -> bool:
    """Tells whether the parts of sample texts have the same ids alone as together: all pairs of samples around one
    special token, and some around each.
    """
    tried = [(left, specials[0], right) for left, right in product(_SAMPLES, _SAMPLES)]
    tried += [(left, one, right) for one in specials for left, right in zip(_SAMPLES[1:], _SAMPLES, strict=False)]
    wholes = tokenizer.encode_batch_fast(["".join(parts) for parts in tried], add_special_tokens=False)
    alone = {text: _encode(tokenizer, text) for text in (*_SAMPLES, *specials)}
    return all(
        whole.ids == [i for part in parts for i in alone[part]] for whole, parts in zip(wholes, tried, strict=True)
    )


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Returns the special tokens that the tokenizer writes in front of every text and behind it; None where it does
    more than that.
    """
    frames = []
    for sample in _SAMPLES:
        bare, framed = _encode(tokenizer, sample), tokenizer.encode_batch_fast([sample])[0].ids
        starts = [start for start in range(len(framed)) if framed[start : start + len(bare)] == bare]
        if len(starts) != 1:
            return None
        frames.append((framed[: starts[0]], framed[starts[0] + len(bare) :]))
    return frames[0] if all(frame == frames[0] for frame in frames) else None


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _as_array(encoding: Encoding) -> array[int]:
    return array("I", encoding.ids)


def _num_bytes(ids: array[int]) -> int:
    return len(ids) * ids.itemsize
