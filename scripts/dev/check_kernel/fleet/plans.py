"""The fleets that are searched, most of which begin in the middle: what happens before is always the same."""

from __future__ import annotations

from scripts.dev.check_kernel.fleet.world import Plan

PLANS = (
    Plan("fleet: one decoder"),
    Plan("fleet: a decoder that knows no terms", knows_terms=False),
    Plan("fleet: two decoders, sizes", capacities=(3, 2), asks=(1, 2)),
    Plan("fleet: a store that forgets nothing", capacities=(3,), asks=(1, 2), is_forgetful=False, num_faults=6),
    Plan(
        "fleet: a front is lost, and another has claimed",
        capacities=(4,),
        num_attempts=3,
        prelude="ask a 2,ask b 2,settle,send a1,arrive a1,ready a1,send b1,arrive b1,settle,die b,forget,elect,"
        "follow a,settle,glance 2 d0",
    ),
    Plan("fleet: a grant is on its way", prelude="ask a 2,up 0,ask b 2,up 1"),
    Plan(
        "fleet: two orphans",
        capacities=(4,),
        prelude="ask a 2,ask b 2,settle,send a1,send b1,arrive a1,leave a1 errand,leave b1 lease,end 1",
    ),
    Plan("fleet: a leg is late", prelude="ask b 2,settle,send b1,settle,stop b,forget,elect,follow a,ask a 2,settle"),
    Plan(
        "fleet: a front was taken for gone",
        prelude="ask a 2,ask b 2,settle,send a1,arrive a1,settle,stop a,tick,settle,tick,settle,tick,settle,go a",
    ),
    Plan(
        "fleet: two leaders later",
        capacities=(4,),
        num_terms=4,
        prelude="ask a 2,settle,send a1,arrive a1,stop a,forget,elect,follow b,ask b 2,settle,forget,elect",
        num_faults=6,
    ),
)
