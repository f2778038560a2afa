"""The module makes a tokenizer, and prompts of known length in its tokens, on the spot from text that every Python
brings along.

What tokenizing costs depends on the text: one sentence over and over is nearly free. The standard library's sources are
prose and code of many words, at the usual four bytes per token.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.dev.common.errors import BenchError

NUM_PROMPTS = 4
"""The number of different prompts: they differ so that none is known from just before."""
VOCABULARY = 32_000
TRAIN_BYTES = 1 << 22
CHARS_PER_TOKEN = 8
"""The number of characters that are taken for each token, which is more than any source has."""


@dataclass(frozen=True, slots=True)
class Texts:
    model: Path
    """The folder of a model, which has a tokenizer and nothing else."""
    prompts: Path
    """Holds a file with a prompt per line, as a JSON string without its quotes."""


def make_texts(folder: Path, num_tokens: int) -> Texts:
    """Makes a tokenizer and prompts of `num_tokens` tokens each, which takes seconds. Raises `BenchError` where there
    is too little text."""
    text = "".join(_sources(TRAIN_BYTES + NUM_PROMPTS * num_tokens * CHARS_PER_TOKEN))
    tokenizer = train(text[:TRAIN_BYTES])
    texts = Texts(folder / "model", folder / "prompts.jsonl")
    texts.model.mkdir()
    tokenizer.save(str(texts.model / "tokenizer.json"))
    texts.prompts.write_text("".join(f"{json.dumps(one)[1:-1]}\n" for one in cut(tokenizer, text, num_tokens)))
    return texts


def train(text: str) -> Tokenizer:
    """Returns a byte-level BPE tokenizer that has learnt from this text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def cut(tokenizer: Tokenizer, text: str, num_tokens: int) -> Iterator[str]:
    """Yields `NUM_PROMPTS` pieces of `num_tokens` tokens. Raises `BenchError` where there is too little text."""
    at = 0
    for _ in range(NUM_PROMPTS):
        piece = text[at : at + num_tokens * CHARS_PER_TOKEN]
        (encoding,) = tokenizer.encode_batch([piece])
        if len(encoding.ids) < num_tokens:
            raise BenchError(
                f"this Python's sources are too little text for {NUM_PROMPTS} prompts of {num_tokens} tokens"
            )
        end = encoding.offsets[num_tokens - 1][1]
        yield piece[:end]
        at += end


def _sources(num_chars: int) -> Iterator[str]:
    """Yields the standard library's sources, as many as that takes."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if num_chars <= 0:
            return
        if "site-packages" in path.parts:
            continue
        text = path.read_text(errors="replace")
        num_chars -= len(text)
        yield text
