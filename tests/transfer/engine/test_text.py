"""Text in pieces is the same text: whatever the tokens, wherever the stop strings, and never half a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from transfer.engine.text import UNDECODABLE, IncrementalDetokenizer, token_texts
from transfer.engine.tiny import END, SPECIAL_TOKENS, VOCABULARY_SIZE, make_tiny_tokenizer

# Few characters, so that stop strings are found and overlap; of one to four bytes, and one that joins with others.
CHARACTERS = "ab é你好😀\u0301"
texts = st.text(CHARACTERS, max_size=12) | st.text(max_size=12)
stop_sets = st.lists(st.text(CHARACTERS, min_size=1, max_size=4), max_size=4)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return make_tiny_tokenizer(tmp_path_factory.mktemp("bytes"), "bytes")


@pytest.fixture(scope="module")
def byte_fallback():
    """Words with a leading ▁, whose first loses it in decoding, and bytes for everything else."""
    pieces = ["<unk>", "<s>", "\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "é"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = [("a", "b"), ("\u2581", "ab"), ("\u2581", "a")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(Regex(" "), "\u2581")]
    )
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=False)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def whole(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


def run(tokenizer, ids, stop=(), include_stop=False):
    """The deltas, the last of them from `finish`, and the stop string found."""
    detokenizer = IncrementalDetokenizer(tokenizer, stop, include_stop)
    deltas = [detokenizer.feed(token_id) for token_id in ids]
    return [*deltas, detokenizer.finish()], detokenizer.stopped


def cut(text, stops, include_stop):
    """By definition: the stop string that is complete first; of those that end together, the longest."""
    for end in range(len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@settings(deadline=None)
@given(pieces=st.lists(texts, max_size=5), stops=stop_sets, include_stop=st.booleans())
def test_any_text_in_any_tokens_with_any_stop_strings(byte_level, pieces, stops, include_stop):
    ids = [token_id for piece in pieces for token_id in encode(byte_level, piece)]
    deltas, stopped = run(byte_level, ids, stops, include_stop)
    assert ("".join(deltas), stopped) == cut(whole(byte_level, ids), stops, include_stop)


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=40),
    stops=st.lists(st.text("the " + UNDECODABLE, min_size=1, max_size=2), max_size=2),
)
def test_any_ids_even_where_the_bytes_are_no_text(byte_level, ids, stops):
    deltas, stopped = run(byte_level, ids, stops)
    assert ("".join(deltas), stopped) == cut(whole(byte_level, ids), stops, False)


@settings(deadline=None)
@given(data=st.binary(max_size=30))
def test_any_bytes(byte_level, data):
    id_of = {token_texts(byte_level).token_bytes(i): i for i in range(VOCABULARY_SIZE)}
    ids = [id_of[bytes([byte])] for byte in data]
    assert "".join(run(byte_level, ids)[0]) == whole(byte_level, ids)


@settings(deadline=None)
@given(text=texts, stops=stop_sets)
def test_a_vocabulary_with_byte_fallback(byte_fallback, text, stops):
    ids = encode(byte_fallback, text)
    deltas, stopped = run(byte_fallback, ids, stops)
    assert ("".join(deltas), stopped) == cut(whole(byte_fallback, ids), stops, False)


def test_byte_fallback_does_not_wait_for_ever_for_a_character(byte_fallback):
    broken = byte_fallback.convert_tokens_to_ids(["<0x80>"] * 40)
    deltas, _ = run(byte_fallback, broken)
    assert "".join(deltas) == UNDECODABLE * 40
    assert max(map(len, deltas)) <= 4


def test_byte_fallback_keeps_the_space_before_a_word(byte_fallback):
    assert run(byte_fallback, encode(byte_fallback, "ab ab a"))[0] == ["ab", " ab", " a", ""]


def test_a_character_is_handed_out_with_its_last_byte(byte_level):
    ids = encode(byte_level, "é😀")
    assert len(ids) == 6
    assert run(byte_level, ids)[0] == ["", "é", "", "", "", "😀", ""]


def test_an_unfinished_character_is_replaced_at_the_end(byte_level):
    assert run(byte_level, encode(byte_level, "a😀")[:-1])[0] == ["a", "", "", "", UNDECODABLE]


def test_special_tokens_have_no_text_and_do_not_part_a_character(byte_level):
    first, second = encode(byte_level, "é")
    end = byte_level.eos_token_id
    assert run(byte_level, [end, first, end, second, end])[0] == ["", "", "", "é", "", ""]


def test_a_possible_stop_string_waits_and_is_handed_out_when_it_was_none(byte_level):
    ids = [encode(byte_level, character)[0] for character in "xabbabc"]
    assert run(byte_level, ids, ["abc"])[0] == ["x", "", "", "abb", "", "", "", ""]
    assert run(byte_level, ids[:3], ["abc"])[0] == ["x", "", "", "ab"]


@pytest.mark.parametrize(
    ("text", "stops", "shown", "found"),
    [
        ("xabcd", ["abcd", "c"], "xab", "c"),
        ("xabcd", ["bc", "abc"], "x", "abc"),
        ("aab", ["ab"], "a", "ab"),
        ("aaaa", ["aa"], "", "aa"),
        ("abab", ["abb", "aba"], "", "aba"),
    ],
)
def test_the_stop_string_that_is_complete_first_wins(byte_level, text, stops, shown, found):
    ids = [encode(byte_level, character)[0] for character in text]
    deltas, stopped = run(byte_level, ids, stops)
    assert ("".join(deltas), stopped) == (shown, found)
    assert "".join(run(byte_level, ids, stops, include_stop=True)[0]) == shown + found


def test_nothing_comes_after_a_stop_string(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level, ["b"])
    deltas = [detokenizer.feed(encode(byte_level, character)[0]) for character in "abab"]
    assert [*deltas, detokenizer.finish()] == ["a", "", "", "", ""]
    assert repr(detokenizer) == "<IncrementalDetokenizer found='b' held=''>"


@pytest.mark.parametrize("stop", [[""], ["a", ""], "ab"])
def test_stop_must_be_a_sequence_of_strings_with_something_in_them(byte_level, stop):
    with pytest.raises(ValueError, match="stop must be"):
        IncrementalDetokenizer(byte_level, stop)


def test_every_byte_has_a_token_and_a_token_its_bytes(byte_level):
    spelled = [token_texts(byte_level).token_bytes(i) for i in range(VOCABULARY_SIZE)]
    assert {bytes([byte]) for byte in range(256)} <= set(spelled)
    assert spelled[: len(SPECIAL_TOKENS)] == [token.encode() for token in SPECIAL_TOKENS]
    for token_id, piece in enumerate(spelled[len(SPECIAL_TOKENS) :], len(SPECIAL_TOKENS)):
        assert piece.decode(errors="replace") == whole(byte_level, [token_id])


def test_bytes_of_single_tokens(byte_level, byte_fallback):
    plain = token_texts(byte_level)
    assert [plain.token_bytes(i) for i in encode(byte_level, "é the")] == [b"\xc3", b"\xa9", b" the"]
    assert plain.token_bytes(byte_level.eos_token_id) == END.encode()
    assert plain.token_bytes(VOCABULARY_SIZE + 1) == b""
    fallback = token_texts(byte_fallback)
    spelled = [fallback.token_bytes(i) for i in encode(byte_fallback, "ab é好")]
    assert spelled == [b" ab", b" ", "é".encode(), b"\xe5", b"\xa5", b"\xbd"]


@pytest.mark.parametrize("word", ["<think>", "<two words é>", "<é>"])
def test_added_words_that_are_not_special_are_shown_as_the_tokenizer_does(tmp_path, word):
    tokenizer = make_tiny_tokenizer(tmp_path, "bytes")
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False)])
    ids = encode(tokenizer, f"a{word}b")
    assert len(ids) == 3
    assert "".join(run(tokenizer, ids)[0]) == whole(tokenizer, ids)


def test_texts_are_worked_out_once_per_tokenizer(byte_level):
    assert token_texts(byte_level) is token_texts(byte_level)
