"""One streamed request's way through the code stays short enough to be followed."""

from __future__ import annotations

from tests.helpers.walk import walk

# A little more than it walks: what arrives in one piece, and what in two, is the machine's doing. So the shortest of a
# few walks counts.
NUM_WALKS = 3
MAX_ENTRIES, MAX_FILES, MAX_RETURNS, MAX_DEPTH = 804, 84, 442, 9


async def test_a_streamed_request_does_not_walk_farther_than_before() -> None:
    found = min([await walk() for _ in range(NUM_WALKS)], key=lambda one: len(one.entered))
    assert found.depth <= MAX_DEPTH, str(found)
    assert len(set(found.files)) <= MAX_FILES, str(found)
    assert len(found.entered) <= MAX_ENTRIES, str(found)
    assert found.num_returns <= MAX_RETURNS, str(found)
