"""Bounds of prompts are bounds, whatever Unicode's normal forms make of their text."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.openai.request import CHAT, COMPLETIONS, parse
from pdproxy.tokens.bounds import ChatFrame, is_plain, most_bytes, size_without_tokenizer

FORMS = ("NFC", "NFD", "NFKC", "NFKD")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def longest(text: str) -> int:
    """In UTF-8 bytes, of everything that a tokenizer may make of it before it cuts it up."""
    return max(len(unicodedata.normalize(form, one).encode()) for form in FORMS for one in (text, text.lower()))


@given(TEXTS, st.booleans())
def test_a_texts_bound_holds_in_every_normal_form(text: str, is_escaped: bool) -> None:
    request = parse(COMPLETIONS, json.dumps({"prompt": text or "x"}, ensure_ascii=is_escaped).encode())
    size = size_without_tokenizer(request)
    assert not size.is_exact
    assert size.tokens >= longest(text) + 2


@given(st.lists(TEXTS, min_size=1), st.booleans())
def test_a_chats_bound_holds_in_every_normal_form(texts: list[str], is_escaped: bool) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    request = parse(CHAT, json.dumps({"messages": messages}, ensure_ascii=is_escaped).encode())
    frame = ChatFrame(tokens=7, message_tokens=3)
    assert is_plain(request)
    assert size_without_tokenizer(request, frame).tokens >= sum(map(longest, texts)) + 7 + 3 * len(texts)


@pytest.mark.parametrize("is_escaped", [False, True])
def test_every_character_there_is_has_room(is_escaped: bool) -> None:
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        is_changed = unicodedata.decomposition(character) or character.lower() != character or 0xAC00 <= code < 0xD7A4
        if is_changed:
            text = character * 3
            assert most_bytes(json.dumps(text, ensure_ascii=is_escaped).encode()) >= longest(text) + 2, hex(code)


def test_what_is_put_together_is_not_longer_than_its_parts() -> None:
    """So that looking at characters one by one is enough."""
    for code in range(0x80, sys.maxunicode + 1):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            assert len(chr(code).encode()) <= sum(len(chr(int(part, 16)).encode()) for part in parts), hex(code)


def test_a_text_of_ascii_counts_once() -> None:
    assert most_bytes(b'"' + b"x" * 1000 + b'"') == 1002
    assert most_bytes(json.dumps("\u4f60" * 1000, ensure_ascii=False).encode()) == 3002
