"""Checks what must hold in every state, straight from the definitions: nothing here asks the kernel for its opinion
twice.
"""

from __future__ import annotations

from itertools import product

from pdproxy.admission.account import Account, Place
from pdproxy.admission.custody import Custody
from pdproxy.admission.line import Demand
from scripts.dev.check_kernel.world import NOW, OWNER, PEER, Plan, World, can_use, occupied


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
                    f"{process.place.name} holds {occupied(request, is_owner)} pages for {request.demand.attempt}, "
                    "and the ledger takes them as free"
                )
    for number, process in enumerate(world.processes):
        capacity = plan.capacity if process.place.is_owner else plan.peer_capacity
        held = sum(
            occupied(request, process.place.is_owner)
            for request in world.requests
            if number == (request.owner if process.place.is_owner else request.peer)
            and (request.owner_page if process.place.is_owner else request.peer_page) == "h"
        )
        if held > capacity:
            raise Violation(f"{process.place.name} holds {held} pages and has {capacity}")


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
        if found.of(is_owner) != [one for one in kernel.places if one.is_open and one.is_owner is is_owner]:
            raise Violation("the kernel remembers other places as open")
    for process in world.processes:
        is_meant = process.mode in ("open", "half")
        if process.place.is_open is not is_meant:
            raise Violation(f"{process.place.name} is {process.mode}, and {'open' if not is_meant else 'closed'}")
    waiting = [request for request in world.requests if request.phase == "waiting"]
    line = [demand for one in kernel._lines.values() for demand in one]
    if {request.demand for request in waiting} != set(line) or len(line) != len(waiting):
        raise Violation("somebody who waits is not in line, or somebody in line does not wait")
    for one in kernel._lines.values():
        for shape in (OWNER, PEER):
            sizes = [demand.pages_at(shape) or 0 for demand in one if demand.is_plain]
            if one.least(shape) != min(sizes, default=None):
                raise Violation("the line miscounts its sizes")


def _check_line(world: World, plan: Plan) -> None:
    """Checks liveness: nobody in line could go; nobody is passed too often; what is saved up is saved up for
    somebody."""
    kernel = world.kernel
    waiting = [request.demand for request in world.requests if request.phase == "waiting" and request.demand]
    for account, demand in kernel._saved.items():
        if demand not in waiting or demand.overtakes < plan.max_overtakes or not demand.saves:
            raise Violation(f"{account!r} is saved up for {demand!r}, who has no need of it")
        if not can_use(kernel, demand, account.place) or account.place.account is not account:
            raise Violation(f"{account!r} is saved up for {demand!r}, who cannot use it")
    for demand in waiting:
        if set(demand.saves) != {account for account, one in kernel._saved.items() if one is demand}:
            raise Violation(f"{demand!r} has other accounts than are saved up for it")
        if len({account.place.is_owner for account in demand.saves}) != len(demand.saves):
            raise Violation(f"two accounts of one side are saved up for {demand!r}")
        if demand.hints.passed > plan.max_overtakes + plan.max_passes:
            raise Violation(f"{demand!r} has been passed {demand.hints.passed} times")
        for owner, peer in product(kernel.places, kernel.places):
            if owner.is_owner and not peer.is_owner and _may_go(world, demand, owner) and _may_go(world, demand, peer):
                raise Violation(f"{demand!r} could go to {owner.name} and {peer.name}, and waits")


def _may_go(world: World, demand: Demand, place: Place) -> bool:
    kernel, account = world.kernel, place.account
    if not can_use(kernel, demand, place):
        return False
    if account is None:
        return not place.is_owner
    pages = demand.pages_at(place.shape) or 0
    if not pages:
        return True
    return fits(account, pages) and kernel._saved.get(account, demand) is demand


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
        sides = [
            any(
                can_use(world.kernel, demand, process.place)
                and (
                    process.place.account is None
                    or fits(process.place.account, demand.pages_at(process.place.shape) or 0)
                )
                for process in world.processes
                if process.place.is_owner is is_owner
            )
            for is_owner in (True, False)
        ]
        if all(sides):
            return False
    return all(process.place.account is None or not process.place.account.leases for process in world.processes)
