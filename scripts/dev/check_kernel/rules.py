"""Checks what must hold in every state, straight from the definitions: nothing here asks the kernel for its opinion
twice.
"""

from __future__ import annotations

from pdproxy.admission.account import Account, Place
from pdproxy.admission.custody import Custody
from pdproxy.admission.line import Demand
from scripts.dev.check_kernel.world import (
    NOW,
    SHAPES,
    Plan,
    World,
    can_use,
    fit,
    letter,
    occupied,
    pairs,
    serve_alone,
)


class Violation(Exception):
    """The world is in a state that must not be."""


def check(world: World, plan: Plan) -> None:
    """Raises `Violation`, or the kernel's own `IntegrityError`."""
    _check_pages(world, plan)
    _check_custodians(world)
    world.kernel.check_integrity(NOW)
    _check_memory(world)
    _check_line(world, plan)


def _check_pages(world: World, plan: Plan) -> None:
    """Checks safety: what an engine holds for an attempt is leased from this very process."""
    for request in world.requests:
        for is_owner, page in ((True, request.owner_page), (False, request.peer_page)):
            if page != "h" or request.demand is None:
                continue
            process = world.processes[request.owner if is_owner else request.peer]
            lease, account = request.leases[not is_owner], process.place.account
            if lease is None or lease.is_returned or account is None or lease not in account.leases:
                raise Violation(
                    f"{process.place.name} holds {occupied(request, process.place)} pages for "
                    f"{request.demand.attempt}, and the ledger takes them as free"
                )
    for number, process in enumerate(world.processes):
        capacity = plan.capacity if process.place.is_owner else plan.peer_capacity
        held = sum(
            occupied(request, process.place)
            for request in world.requests
            if number == (request.owner if process.place.is_owner else request.peer)
            and (request.owner_page if process.place.is_owner else request.peer_page) == "h"
        )
        if held > capacity:
            raise Violation(f"{process.place.name} holds {held} pages and has {capacity}")
        residency = process.place.residency
        written = _written(world, process.place)
        if written != residency.used:
            raise Violation(f"{process.place.name} writes {written} tokens, and is taken for {residency!r}")
        # While there are no others, those write answers that usually do not, and nobody waits for room there.
        if process.place.is_writer and written > residency.limit and len(residency.stays) > 1:
            raise Violation(f"{process.place.name} would write {residency!r}")


def _check_custodians(world: World) -> None:
    """Checks that each lease has one custodian: its request's coroutine, or the reaper, or nobody once it has come
    back."""
    orphans = set(world.kernel.orphans)
    leases = set(world.leased())
    for lease in leases:
        request, _ = world.page(lease)
        is_open = not lease.is_returned
        if is_open + 0 != (lease in orphans) + (request.is_alive and lease not in orphans and is_open):
            raise Violation(f"nobody answers for {lease!r}, or two do")
        if (lease.custody is Custody.ORPHANED) is not (lease in orphans):
            raise Violation(f"{lease!r} and the reaper disagree")
        if is_open is not (lease in lease.account.leases):
            raise Violation(f"{lease!r} is not where it belongs")
    for process in world.processes:
        account = process.place.account
        if account is None:
            continue
        if not leases.issuperset(account.leases):
            raise Violation(f"{process.place.name} leases pages to nobody")
        for lease in account.leases:
            request, is_owner = world.page(lease)
            has_ended = request.owner_ended if is_owner else request.peer_ended
            if has_ended and process.is_known:
                raise Violation(f"{lease!r} is of a process that has ended")


def _check_memory(world: World) -> None:
    """Checks that what the kernel keeps, so that it need not look again, is still so."""
    kernel = world.kernel
    found = kernel.open_places(None)
    for is_owner in (True, False):
        there = [one for one in kernel.places if one.is_open]
        ours = [one for one in there if one.is_owner is is_owner]
        theirs = [one for one in there if one.is_owner is not is_owner]
        if not all(fit(one, other) for one in ours for other in theirs):
            ours = [one for one in ours if any(fit(one, other) for other in theirs)]
        if found.of(is_owner) != ours:
            raise Violation("the kernel remembers other places as open")
    for process in world.processes:
        is_meant = process.mode in ("open", "half")
        if process.is_known and letter(process.place) != process.letter.strip("*"):
            raise Violation(f"{process.place.name} is taken for one of another revision")
        if process.place.is_open is not is_meant:
            raise Violation(f"{process.place.name} is {process.mode}, and {'open' if not is_meant else 'closed'}")
    waiting = [request for request in world.requests if request.phase == "waiting"]
    line = [demand for one in kernel._lines.values() for demand in one]
    if {request.demand for request in waiting} != set(line) or len(line) != len(waiting):
        raise Violation("somebody who waits is not in line, or somebody in line does not wait")
    for one in kernel._lines.values():
        for shape in SHAPES:
            sizes = [demand.pages_at(shape) or 0 for demand in one if demand.is_plain]
            if one.least(shape) != min(sizes, default=None):
                raise Violation("the line miscounts its sizes")


def _check_line(world: World, plan: Plan) -> None:
    """Checks liveness: nobody in line could go; nobody is passed too often; what is saved up is saved up for
    somebody."""
    kernel = world.kernel
    waiting = [request.demand for request in world.requests if request.phase == "waiting" and request.demand]
    for place, demand in kernel._saved.items():
        if demand not in waiting or demand.overtakes < plan.max_overtakes or not demand.saves:
            raise Violation(f"{place.name} is saved up for {demand!r}, who has no need of it")
        if not can_use(kernel, demand, place):
            raise Violation(f"{place.name} is saved up for {demand!r}, who cannot use it")
    for demand in waiting:
        if set(demand.saves) != {place for place, one in kernel._saved.items() if one is demand}:
            raise Violation(f"{demand!r} has other places than are saved up for it")
        if len({place.is_owner for place in demand.saves}) != len(demand.saves):
            raise Violation(f"two places of one side are saved up for {demand!r}")
        if len(demand.saves) == 2 and not fit(*demand.saves):
            raise Violation(f"places are saved up for {demand!r} of which one means nothing to the other")
        if demand.hints.passed > plan.max_overtakes + plan.max_passes:
            raise Violation(f"{demand!r} has been passed {demand.hints.passed} times")
        for owner, peer in pairs(kernel, demand):
            if _may_go(world, demand, owner) and _may_go(world, demand, peer):
                raise Violation(f"{demand!r} could go to {owner.name} and {peer.name}, and waits")


def _may_go(world: World, demand: Demand, place: Place) -> bool:
    kernel, account = world.kernel, place.account
    if account is None and place.is_owner and not serve_alone(kernel):
        return False
    pages = 0 if account is None or serve_alone(kernel) else demand.pages_at(place.shape) or 0
    tokens = 0 if place.is_owner else demand.room.tokens
    if not _has_room(world, place, pages, tokens):
        return False
    saved = kernel._saved.get(place)
    if saved is None or saved is demand:
        return True
    if pages and account is not None and not fits(account, pages + (saved.pages_at(place.shape) or 0)):
        return False
    return not tokens or _written(world, place) + tokens + saved.room.tokens <= place.residency.limit


def _has_room(world: World, place: Place, pages: int, tokens: int) -> bool:
    if pages and place.account is not None and not fits(place.account, pages):
        return False
    if not tokens:
        return True
    written = _written(world, place)
    return written + tokens <= place.residency.limit or not place.residency.stays


def _written(world: World, place: Place) -> int:
    """Returns the tokens of those who are alive and whose answers are written at `place`, as far as it has not been
    heard that its process has ended."""
    number = next(number for number, process in enumerate(world.processes) if process.place is place)
    is_known = world.processes[number].is_known
    return sum(
        request.demand.room.tokens
        for request in world.requests
        if request.demand is not None
        and request.is_alive
        and request.peer == number
        and not (request.peer_ended and is_known)
    )


def fits(account: Account, pages: int) -> bool:
    return sum(lease.pages for lease in account.leases) + account.foreign + pages <= account.capacity


def is_clean(world: World) -> bool:
    """Tells whether nobody holds anything, and no request that waits could go if everything were free."""
    if any(request.phase not in ("idle", "waiting") for request in world.requests):
        return False
    for request in world.requests:
        demand = request.demand
        if demand is None:
            continue
        for pair in pairs(world.kernel, demand):
            if pair[0] is pair[1] or all(
                place.account is None or fits(place.account, demand.pages_at(place.shape) or 0) for place in pair
            ):
                return False
    return all(process.place.account is None or not process.place.account.leases for process in world.processes)
