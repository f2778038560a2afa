"""``python -m tests.helpers.careless_replica serve …`` is `pdproxy` with faults planted, for the soak's
`PDPROXY_SOAK_PROXY`, to see that its witness notices. A leader grants at once what others may still hold: it hears no
claims, and does not believe decoders that pages are in use, but that they have four times as many as they say.
"""

from __future__ import annotations

from math import inf
from typing import Any

from pdproxy import cli
from pdproxy.admission.account import Account
from pdproxy.fronts import hub, messages, replica

assemble, heard = replica.assemble, Account.heard


def assemble_at_once(*args: Any, **options: Any) -> Any:
    if "claims_until" in options:
        options["claims_until"] = -inf
    return assemble(*args, **options)


def claim_nothing(self: hub.Session, message: messages.Claim) -> None:
    """Lets the front go on with pages that this leader knows nothing of."""


def hear_of_none_in_use(self: Account, capacity: int, occupied: int | None, *args: Any, **options: Any) -> bool:
    return heard(self, 4 * capacity, None if occupied is None else 0, *args, **options)


if __name__ == "__main__":
    replica.assemble = assemble_at_once
    hub.Session.claim = claim_nothing  # type: ignore[method-assign]
    Account.heard = hear_of_none_in_use  # type: ignore[method-assign]
    cli.main()
