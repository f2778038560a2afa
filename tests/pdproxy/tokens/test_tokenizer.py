"""Ids: those of the whole text, whatever of it was known before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from pdproxy.tokens.tokenizer import FastTokenizer

SPECIALS = ["<s>", "<|im_start|>", "<|im_end|>", "<|im_end|>>"]
TEXTS = ["the cat sat on the mat", "  the\n\nmats cats 1234", "e\u0301 and \u00e9 don't", "\u4f60\u597d the"]


def trained(tokenizer: Tokenizer) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    frame = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", 0), ("<|im_end|>", tokenizer.token_to_id("<|im_end|>"))]
    )
    tokenizer.post_processor = frame
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(tokenizer)


def prefixed_at_the_start() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return trained(tokenizer)


def greedy() -> Tokenizer:
    """A special token that takes the spaces around it."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False, special=True)])
    return tokenizer


def without_specials() -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


KINDS: dict[Callable[[], Tokenizer], bool] = {
    byte_level: True,
    prefixed_at_the_start: False,
    greedy: False,
    without_specials: False,
}


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[FastTokenizer, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = request.param()
    tokenizer.save(str(folder / "tokenizer.json"))
    ours = FastTokenizer(folder)
    assert ours.knows_parts is KINDS[request.param]
    return ours, tokenizer


@given(
    st.lists(st.one_of(st.sampled_from([*SPECIALS, "<mask>", " ", "\n", "  "]), st.sampled_from(TEXTS), st.text())),
    st.booleans(),
)
def test_ids_are_those_of_the_whole_text(
    pair: tuple[FastTokenizer, Tokenizer], pieces: list[str], add_special_tokens: bool
) -> None:
    """Each text twice: the second time it is known."""
    ours, tokenizer = pair
    text = "".join(pieces)
    expected = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    for _ in range(2):
        assert ours.ids(text, add_special_tokens=add_special_tokens) == expected
        assert ours.count(text, add_special_tokens=add_special_tokens) == len(expected)


class Spy:
    """Notes which texts are read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.read: list[str] = []

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.read += texts
        return self._tokenizer.encode_batch_fast(texts, **options)


def spied(folder: Path, tokenizer: Tokenizer, **options: Any) -> tuple[FastTokenizer, Spy]:
    tokenizer.save(str(folder / "tokenizer.json"))
    ours = FastTokenizer(folder, **options)
    spy = Spy(ours._tokenizer)
    vars(ours)["_tokenizer"] = spy
    return ours, spy


def turn(text: str) -> str:
    return f"<|im_start|>{text}<|im_end|>"


@pytest.mark.parametrize("method", ["ids", "count"])
def test_of_a_conversation_only_what_is_new_is_read(tmp_path: Path, method: str) -> None:
    ours, spy = spied(tmp_path, byte_level())
    read = getattr(ours, method)
    read(turn("the cat"), add_special_tokens=False)
    assert spy.read == ["<|im_start|>", "the cat", "<|im_end|>"]
    spy.read.clear()
    read(turn("the cat") + turn("sat") + turn("sat"), add_special_tokens=False)
    assert spy.read == ["sat"]


def test_a_text_that_does_not_fall_apart_is_known_as_a_whole(tmp_path: Path) -> None:
    ours, spy = spied(tmp_path, prefixed_at_the_start())
    for text in (turn("a"), turn("a") + "b", turn("a")):
        ours.ids(text, add_special_tokens=False)
    assert spy.read == [turn("a"), turn("a") + "b"]


def test_memory_has_an_end(tmp_path: Path) -> None:
    ours, spy = spied(tmp_path, byte_level(), cache_bytes=2000)
    for i in range(100):
        ours.ids(f"a text like {i}", add_special_tokens=False)
    assert 0 < ours._ids.num_bytes <= 2000
    spy.read.clear()
    ours.ids("a text like 0", add_special_tokens=False)
    assert spy.read == ["a text like 0"]
