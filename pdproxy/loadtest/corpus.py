"""The module makes prompts: words without sense, in an order drawn once. A key decides which piece is cut from them.

The same key gives the same words, so prompts that begin with the same pieces begin alike. Different keys differ from
the first word on, so that nothing is shared by accident. To cut a piece costs the same whatever its length.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pdproxy.loadtest.errors import WorkloadError

NUM_WORDS = 1 << 15
NUM_KEY_WORDS = 4
"""The number of words with which a piece begins and which spell its key."""

_COMMON = """
the of and a to in is you that it he was for on are as with his they at be this have from or one had by word but
not what all were we when your can said there use an each which she do how their if will up other about out many
then them these so some her would make like him into time has look two more write go see number no way could people
my than first water been call who oil its now find long down day did get come made may part over new sound take only
little work know place year live me back give most very after thing our just name good sentence man think say great
where help through much before line right too mean old any same tell boy follow came want show also around form
three small set put end does another well large must big even such because turn here why ask went men read need land
different home us move try kind hand picture again change off play spell air away animal house point page letter
mother answer found study still learn should world high every near add food between own below country plant last
"""
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece is a part of a prompt: its key, and its length in tokens."""

    key: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Scale:
    """Scale says how an engine counts words: `overhead` tokens for an empty prompt (the template's), and
    `tokens_per_word` for each word."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0


class Corpus:
    """Corpus renders prompts out of words that are joined by `separator`. It is immutable once made, and raises
    `WorkloadError` for fewer than two different words."""

    def __init__(self, seed: int, words: Sequence[str] = WORDS, separator: str = " ") -> None:
        if len(set(words)) < 2:
            raise WorkloadError("prompts need at least two different words")
        self._words = words
        self._separator = separator
        chosen = random.Random(f"{seed} corpus").choices(words, k=NUM_WORDS)
        self._text = separator.join(chosen) + separator
        self._starts = array("Q", [0])
        for word in chosen:
            self._starts.append(self._starts[-1] + len(word) + len(separator))

    def render(self, pieces: Sequence[Piece], scale: Scale) -> str:
        """Returns the text of the pieces, one after the other. What the engine adds by itself is taken off the last
        piece."""
        sizes = [piece.num_tokens for piece in pieces]
        if sizes:
            sizes[-1] -= round(scale.overhead)
        cut = (
            self._cut(piece.key, max(1, round(size / scale.tokens_per_word)))
            for piece, size in zip(pieces, sizes, strict=True)
        )
        return self._separator.join(cut)

    def _cut(self, key: int, num_words: int) -> str:
        head = self._spell(key, min(num_words, NUM_KEY_WORDS))
        num_left = num_words - NUM_KEY_WORDS
        return self._separator.join([head, self._run(key % NUM_WORDS, num_left)]) if num_left > 0 else head

    def _spell(self, key: int, num_words: int) -> str:
        spelt = []
        for _ in range(num_words):
            key, digit = divmod(key, len(self._words))
            spelt.append(self._words[digit])
        return self._separator.join(spelt)

    def _run(self, start: int, num_words: int) -> str:
        """Returns `num_words` words from word `start` on; the first word of the text follows the last one."""
        parts = []
        while num_words > 0:
            end = min(start + num_words, NUM_WORDS)
            parts.append(self._text[self._starts[start] : self._starts[end]])
            num_words -= end - start
            start = 0
        return "".join(parts).removesuffix(self._separator)
