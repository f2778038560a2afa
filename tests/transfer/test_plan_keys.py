"""Names of chunks: equal where the bytes are, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.errors import GeometryError
from transfer.geometry import PageGroup
from transfer.plan.blocks import page_table
from transfer.plan.keys import CHUNK_KEY_BYTES, PRIVATE, chunk_keys, prefix_keys

FULL, SLIDING = PageGroup("full", 4), PageGroup("sliding", 4, 6)
STATE = PageGroup("linear", 4, state_pages=2)
CHUNK = 4

prompts = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30)


def keys(prompt: list[int], *groups: PageGroup, salt: bytes = b"") -> dict[tuple[int, int], bytes]:
    """By group and block."""
    table = page_table(groups or (FULL,), len(prompt), CHUNK)
    made = chunk_keys(prompt, table, salt)
    assert all(key == PRIVATE or len(key) == CHUNK_KEY_BYTES for key in made)
    return dict(zip(table.pages, made, strict=True))


@given(prompts, prompts, prompts)
@settings(deadline=None)
def test_equal_prefixes_have_equal_keys_and_others_never(shared: list[int], one: list[int], other: list[int]) -> None:
    first, second = shared + one, shared + other
    ours, theirs = keys(first), keys(second)
    for (_, block), key in ours.items():
        end = (block + 1) * CHUNK
        if key != PRIVATE and (0, block) in theirs and theirs[0, block] != PRIVATE:
            assert (key == theirs[0, block]) == (first[:end] == second[:end])


@given(prompts, st.data())
@settings(deadline=None)
def test_one_token_changed_changes_every_key_from_there_on(prompt: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(prompt) - 1))
    other = [*prompt]
    other[at] ^= 1
    ours, theirs = keys(prompt, FULL, SLIDING, STATE), keys(other, FULL, SLIDING, STATE)
    for (group, block), key in ours.items():
        is_before = group == 0 and block < at // CHUNK
        assert (key == theirs[group, block]) == (is_before or key == PRIVATE)


@given(prompts)
@settings(deadline=None)
def test_every_key_is_another(prompt: list[int]) -> None:
    made = [key for key in keys(prompt, FULL, FULL, SLIDING, STATE).values() if key != PRIVATE]
    assert len(set(made)) == len(made)


def test_only_whole_blocks_are_shared() -> None:
    assert keys(list(range(10)))[0, 2] == PRIVATE
    assert PRIVATE not in keys(list(range(12))).values()
    assert keys([1, 2, 3]) == {(0, 0): PRIVATE}
    assert keys(list(range(10)), FULL, SLIDING)[1, 2] == PRIVATE


def test_a_window_s_tail_is_named_by_the_whole_prompt() -> None:
    prompt = list(range(12))
    ours, longer = keys(prompt, FULL, SLIDING, STATE), keys([*prompt, 9], FULL, SLIDING, STATE)
    assert ours == keys(prompt, FULL, SLIDING, STATE)
    assert [ours[0, block] for block in range(3)] == [longer[0, block] for block in range(3)]
    assert ours[1, 2] != longer[1, 2], "its tail ends elsewhere"
    assert ours[2, 0] != longer[2, 0], "a state is of one position"


def test_salt_keeps_apart() -> None:
    prompt = list(range(12))
    plain, salted = keys(prompt, FULL, SLIDING, STATE), keys(prompt, FULL, SLIDING, STATE, salt=b"x" * 100)
    assert not set(plain.values()) & set(salted.values())
    assert salted == keys(prompt, FULL, SLIDING, STATE, salt=b"x" * 100)
    assert keys(prompt, salt=b"a") != keys(prompt, salt=b"b")


def test_groups_have_keys_of_their_own_in_their_order() -> None:
    prompt = list(range(8))
    one, two = keys(prompt, FULL, SLIDING), keys(prompt, SLIDING, FULL)
    assert one[0, 0] != two[1, 0]
    assert one[1, 1] != two[0, 1]


def test_the_keys_of_a_prefix_are_the_prefix_of_the_keys() -> None:
    prompt = list(range(23))
    whole = prefix_keys(prompt, CHUNK)
    assert len(whole) == 5
    for length in range(24):
        assert prefix_keys(prompt[:length], CHUNK) == whole[: length // CHUNK]
    assert prefix_keys([258], 1) != prefix_keys([1, 2], 1)[:1]


@pytest.mark.parametrize("length", [11, 13])
def test_a_table_of_another_prompt_is_refused(length: int) -> None:
    with pytest.raises(GeometryError, match=f"{length} token ids"):
        chunk_keys([1] * length, page_table([FULL], 12, CHUNK))


@given(prompts)
@settings(deadline=None)
def test_a_secret_changes_every_key_and_nothing_else(prompt: list[int]) -> None:
    """Equal prompts have equal keys under one secret; under another one, or under none, they have none in common."""
    table = page_table([FULL, SLIDING, STATE], len(prompt), CHUNK)
    plain, ours, theirs = (chunk_keys(prompt, table, secret=secret) for secret in (b"", b"o" * 32, b"t" * 32))
    assert ours == chunk_keys(prompt, table, secret=b"o" * 32)
    assert [key == PRIVATE for key in plain] == [key == PRIVATE for key in ours]
    assert not ({*plain} & {*ours} | {*plain} & {*theirs} | {*ours} & {*theirs}) - {PRIVATE}
    assert chunk_keys(prompt, table, b"salt", secret=b"o" * 32) != ours or set(ours) == {PRIVATE}


def test_without_a_secret_keys_are_what_they_were() -> None:
    """Engines of different releases share chunks, as long as none of them has a fleet key."""
    made = chunk_keys(range(8), page_table([FULL, STATE], 8, CHUNK), b"s")
    assert [key.hex() for key in made[1:3]] == ["107a8cb0e6b2338279a2d880a3ae4d44", "9b1a61d3c2a2872704dd21b1c755c300"]
