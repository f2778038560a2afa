"""Prompts: as long as they should be, alike where they share a piece, and nowhere else."""

from __future__ import annotations

import json
import random

import pytest

from pdproxy.loadtest.corpus import NUM_KEY_WORDS, NUM_WORDS, Corpus, Piece, Scale
from pdproxy.loadtest.errors import WorkloadError

CORPUS = Corpus(1)
PLAIN = Scale()


@pytest.mark.parametrize("num_words", [1, 3, NUM_KEY_WORDS, 5, 700, NUM_WORDS + 40])
def test_so_many_words(num_words: int) -> None:
    text = CORPUS.render([Piece(12345678, num_words)], PLAIN)
    assert len(text.split(" ")) == num_words
    assert all(text.split(" "))


def test_the_same_key_says_the_same_and_a_longer_piece_goes_on() -> None:
    short, long = (CORPUS.render([Piece(99, length)], PLAIN) for length in (50, 80))
    assert long.startswith(short + " ")
    assert Corpus(1).render([Piece(99, 50)], PLAIN) == short
    assert Corpus(2).render([Piece(99, 50)], PLAIN) != short


def test_other_keys_differ_within_their_first_words() -> None:
    dice = random.Random(5)
    keys = {dice.getrandbits(60) for _ in range(5000)}
    heads = {CORPUS.render([Piece(key, NUM_KEY_WORDS)], PLAIN) for key in keys}
    assert len(heads) == len(keys)


def test_prompts_begin_alike_as_far_as_their_pieces_are_the_same() -> None:
    shared = Piece(7, 40)
    one, other = (CORPUS.render([shared, Piece(key, 20)], PLAIN) for key in (1, 2))
    prefix = CORPUS.render([shared], PLAIN)
    assert one.startswith(prefix + " ")
    assert other.startswith(prefix + " ")
    assert one != other


def test_a_targets_way_of_counting() -> None:
    """What a template adds is taken off the end, and a shared beginning stays as it is."""
    scale = Scale(tokens_per_word=2, overhead=10)
    text = CORPUS.render([Piece(7, 100), Piece(8, 60)], scale)
    assert len(text.split()) == 50 + 25
    assert text.startswith(CORPUS.render([Piece(7, 100)], Scale(tokens_per_word=2)))
    assert CORPUS.render([Piece(7, 3)], scale)  # never nothing


def test_token_ids() -> None:
    ids = Corpus(1, [str(number) for number in range(20, 90)], ",")
    prompt = json.loads(f"[{ids.render([Piece(3, 10), Piece(4, 300)], PLAIN)}]")
    assert len(prompt) == 310
    assert set(prompt) <= set(range(20, 90))


def test_one_word_is_not_enough() -> None:
    with pytest.raises(WorkloadError):
        Corpus(1, ["the", "the"])
