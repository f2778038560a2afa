"""What two places must have alike, and what the kernel makes of places that do not."""

from __future__ import annotations

from math import inf

import pytest

from pdproxy.admission import revision as module
from pdproxy.admission.account import Place
from pdproxy.admission.grant import Grant, Refused
from pdproxy.admission.line import Demand
from pdproxy.admission.revision import ANY, MAX_KNOWN, Revision, same
from pdproxy.errors import NeverFits, NotReady
from tests.pdproxy.admission.test_kernel import Fleet


def test_what_both_tell_has_to_be_equal() -> None:
    old, new, brief = Revision({"m": "x", "dtype": "a"}), Revision({"m": "x", "dtype": "b"}), Revision({"m": "x"})
    assert old.fits(Revision({"dtype": "a", "m": "x"}))
    assert (old.fits(new), new.fits(old)) == (False, False)
    assert (old.difference(new), old.difference(brief)) == ("dtype", None)
    assert all(one.fits(other) for one in (old, new) for other in (brief, ANY))
    assert len({old, new, brief, ANY, Revision({"dtype": "a", "m": "x"})}) == 4


def test_the_terms_of_its_text_are_all_but_how_kv_is_carried() -> None:
    one = Revision({"model": "m", "chunk_size": "16", "fleet_key": "k", "dtype": "a", "block_size": "8"})
    assert one.text_terms == (("dtype", "a"), ("model", "m"))


def test_a_label_is_the_name_or_tells_revisions_apart() -> None:
    assert Revision({"revision": "v2", "dtype": "a"}).label == "v2"
    labels = {Revision({"revision": "", "dtype": dtype}).label for dtype in ("a", "b")}
    assert [len(label) for label in labels] == [8, 8]


def test_revisions_with_the_same_terms_are_one_object() -> None:
    one = same(Revision({"m": "x", "dtype": "a"}))
    assert same(Revision({"dtype": "a", "m": "x"})) is one
    other = Revision({"m": "x", "dtype": "b"})
    assert same(other) is other
    for number in range(MAX_KNOWN):  # whatever engines say, no more than so many are kept
        same(Revision({"dtype": str(number)}))
    assert len(module._KNOWN) <= MAX_KNOWN


# ── the kernel ──────────────────────────────────────────────────────────────────────────────────────────────────────

A, B = Revision({"dtype": "a"}), Revision({"dtype": "b"})


def hear(fleet: Fleet, place: Place, revision: Revision, capacity: int = 0) -> None:
    fleet.kernel.heard(
        place,
        "1",
        shape=place.is_owner,
        capacity=capacity,
        occupied=None,
        asked_at=0.0,
        now=0.0,
        revision=revision,
    )


def of_two(owners: tuple[int, ...] = (8, 8), peers: int = 2) -> Fleet:
    """The first owner and the first peer are old, all others new."""
    fleet = Fleet(owners, (0,) * peers)
    for places, sizes in ((fleet.owners, owners), (fleet.peers, (0,) * peers)):
        for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
            hear(fleet, place, B if number else A, size)
    return fleet


def pair(fleet: Fleet, demand_options: dict[str, object]) -> tuple[str, str]:
    grant = fleet.take(1, **demand_options)
    return grant.owner.name, grant.peer.name


def test_a_place_without_a_counterpart_is_not_asked() -> None:
    fleet = of_two(peers=1)
    found = fleet.kernel.open_places(None)
    assert (found.owners, found.peers) == ([fleet.owners[0]], [fleet.peers[0]])
    assert pair(fleet, {"hints": "o1", "tied_until": inf}) == ("o0", "p0"), "not even by who belongs there"


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"hints": "o1"}, ("o1", "p1")),
        ({"hints": "p1", "tied_until": inf}, ("o1", "p1")),
        ({"avoid": frozenset({"o0"})}, ("o1", "p1")),
        ({"avoid": frozenset({"o0", "p1"})}, ("o0", "p0")),
        ({"avoid": frozenset({"o0", "p0", "p1"})}, ("o1", "p1")),
        ({"text_terms": B.text_terms}, ("o1", "p1")),
    ],
    ids=["picked", "tied to a peer", "avoids one", "avoids one of each", "avoids most", "goes on"],
)
def test_both_places_are_of_one_revision(options: dict[str, object], bound: tuple[str, str]) -> None:
    assert pair(of_two(), options) == bound


def test_a_full_revision_leaves_its_share_to_the_other() -> None:
    fleet = of_two()
    assert [fleet.take(8).peer.name for _ in range(2)] == ["p0", "p1"]
    waiting = [fleet.wait(2), fleet.wait(2, text_terms=A.text_terms)]
    fleet.kernel.close(fleet.peers[1], 0.0)
    assert fleet.granted() == []
    fleet.kernel.open(fleet.peers[1], 0.0)
    hear(fleet, fleet.owners[1], B, 12)
    assert fleet.granted() == waiting[:1]


def test_what_fits_only_where_no_counterpart_is_left_is_refused() -> None:
    """It would wait for what cannot come."""
    fleet = of_two(owners=(8, 16))
    fleet.take(16)
    waiting = fleet.wait(12)
    fleet.kernel.close(fleet.peers[1], 0.0)
    assert fleet.news() == [], "it may be opened again"
    fleet.kernel.discard(fleet.peers[1], 0.0)
    (refused,) = fleet.news()
    assert isinstance(refused, Refused)
    assert refused.demand is waiting
    assert isinstance(refused.error, NeverFits)
    with pytest.raises(NeverFits):
        fleet.take(12)
    with pytest.raises(NotReady):
        fleet.take(1, text_terms=B.text_terms)


def test_a_process_of_another_revision_in_the_same_place_wakes_who_can_go_now() -> None:
    fleet = of_two(peers=1)
    fleet.take(8)
    waiting = fleet.wait(4)
    hear(fleet, fleet.peers[0], B)
    (grant,) = fleet.news()
    assert isinstance(grant, Grant)
    assert (grant.demand, grant.owner, grant.peer) == (waiting, fleet.owners[1], fleet.peers[0])


def test_an_owner_and_a_peer_of_one_revision_are_saved_up() -> None:
    fleet = Fleet((8, 8), (8, 8), max_overtakes=1)
    for place, revision in zip([*fleet.owners, *fleet.peers], (A, B, A, B), strict=True):
        hear(fleet, place, revision, 8)
    # The owner that fits it soonest is the old one, and the peer the new one.
    for owner, peer, pages in ((0, 0, (2, 6)), (1, 1, (6, 2))):
        fleet.take(*pages, pair=(fleet.owners[owner], fleet.peers[peer]))
    big: Demand = fleet.wait(8, 8)
    fleet.take(1, 1)
    assert {place.revision for place in big.saves} in ({A}, {B})
    assert len(big.saves) == 2
