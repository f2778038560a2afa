"""The step from token ids to text, one by one: what may be sent now, and what must wait for the next token to be known.

Two things make text wait: a character whose bytes are not all there yet, and characters that might be the beginning of
a stop string. Neither ever makes it wait for long, and what was handed out is never taken back.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

UNDECODABLE = "\N{REPLACEMENT CHARACTER}"
MAX_BYTES_PER_CHARACTER = 4


class IncrementalDetokenizer:
    """An `IncrementalDetokenizer` holds the text of one answer as it grows.

    Everything `feed` and `finish` return, put together, is
    ``tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)``, cut at the stop string that
    is complete first (of several that end at the same character, the longest). So it does not depend on how the text is
    divided into tokens. Exact for byte-level vocabularies, whatever the bytes; for others as long as the tokens' bytes
    are valid UTF-8.

    `tokenizer` is a transformers tokenizer and must not change any more. An empty stop string is a ValueError.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        texts = token_texts(tokenizer)
        self._special_ids = texts.special_ids
        self._decoder = texts.new_decoder()
        self._stops = _StopScanner(stop, include_stop)

    def __repr__(self) -> str:
        return f"<IncrementalDetokenizer {self._stops!r}>"

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer, or None. After it nothing comes out any more."""
        return self._stops.found

    def feed(self, token_id: int) -> str:
        """Returns the text that this token makes certain, which is often empty. Special tokens have none."""
        return "" if token_id in self._special_ids else self._stops.feed(self._decoder.feed(token_id))

    def finish(self) -> str:
        """Returns the rest: text that waited, with the replacement character for a character that was never completed.

        It may still find a stop string, so look at `stopped` afterwards. Call it once; nothing can be fed after it.
        """
        return self._stops.feed(self._decoder.finish()) + self._stops.finish()


class _StopScanner:
    """A `_StopScanner` finds the first stop string in a text that comes in pieces.

    State: `_held`, the end of the text seen so far that is the beginning of a stop string; `found`, once there is one.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        if isinstance(stops, str) or "" in stops:
            raise ValueError(f"stop must be a sequence of strings that are not empty, not {stops!r}")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.found: str | None = None

    def __repr__(self) -> str:
        return f"found={self.found!r} held={self._held!r}"

    def feed(self, text: str) -> str:
        if self.found is not None or not text:
            return ""
        text = self._held + text
        matches = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if matches:
            end, _, self.found = min(matches)
            self._held = ""
            return text[: end if self._include_stop else end - len(self.found)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of `text` are the beginning of `stop`; fewer than all of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class _Decoder(Protocol):
    """A `_Decoder` turns the ids of one sequence, without special tokens, into text."""

    def feed(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TokenTexts:
    """`TokenTexts` tells what single tokens of a vocabulary stand for. There is one per tokenizer, shared by all
    requests."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = _is_byte_level(tokenizer)

    def new_decoder(self) -> _Decoder:
        return _ByteDecoder(self) if self._is_byte_level else _WindowDecoder(self._tokenizer)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that this token adds to a text, which may be a part of a character; for a special token,
        its own name.

        The result is empty for an id that the vocabulary does not have.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None or token_id in self.special_ids:
            return (piece or "").encode()
        if self._is_byte_level:
            return _piece_bytes(piece)
        single_byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)  # SentencePiece's byte fallback
        return bytes.fromhex(single_byte[1]) if single_byte else self._text_within(token_id).encode()

    def _text_within(self, token_id: int) -> str:
        """Returns what the token adds to a text that has begun: many decoders drop the space before a text's first
        word."""
        once, twice = (_decode(self._tokenizer, [token_id] * times) for times in (1, 2))
        return twice[len(once) :]


@lru_cache(maxsize=8)
def token_texts(tokenizer: Any) -> TokenTexts:
    """Returns the one `TokenTexts` of this tokenizer object."""
    return TokenTexts(tokenizer)


class _ByteDecoder:
    """A `_ByteDecoder` is for byte-level vocabularies: every token is a run of bytes, and a text is all of them as
    UTF-8."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._utf8.decode(self._texts.token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """A `_WindowDecoder` is for any other vocabulary. It decodes the last few tokens again, and hands out what is new.

    State: `_window`, ids decoded together, the first `_num_context` of which were handed out long ago and are there
    because a token's text may depend on the one before it; `_num_shown`, characters of its text handed out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_context = 0
        self._num_shown = 0

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        text = _decode(self._tokenizer, self._window)
        num_waiting = len(self._window) - self._num_context
        if text.endswith(UNDECODABLE) and num_waiting < MAX_BYTES_PER_CHARACTER:
            return ""
        fresh = text[self._num_shown :]
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        self._num_shown = len(_decode(self._tokenizer, self._window))
        return fresh

    def finish(self) -> str:
        return _decode(self._tokenizer, self._window)[self._num_shown :]


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"


def _piece_bytes(piece: str) -> bytes:
    """Returns the bytes of a byte-level piece, which spells every byte as one printable character. A piece with any
    other character is its own text.

    The latter are words added to the vocabulary; the rule is the one by which `tokenizers` decodes them.
    """
    spelled = [_BYTE_OF.get(character) for character in piece]
    return piece.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character. Printable Latin-1 characters stand for themselves, the other bytes for the
    code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
