"""The module draws a proxy's status page as tables for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console

from pdproxy.inspection.running_proxy import InstanceStatus, ProxyStatus, RequestStatus
from transfer.command_line.tables import Table
from transfer.logs import printable

MAX_REQUESTS = 20
"""The most requests in flight that are shown, those first that are there longest."""
MAX_WORD_BYTES = 120


def print_status(status: ProxyStatus, console: Console) -> None:
    """Prints who the proxy is, its instances, the requests in flight, and its processes or replicas."""
    _say(console, headline(status))
    for table in tables(status):
        console.print()
        table.print_to(console)


def headline(status: ProxyStatus) -> str:
    """Returns one line: the release, whether it serves, for how long it has run, and what became of its requests."""
    state = "ready" if status.ready else "not ready"
    state = "shutting down" if status.draining else "leaving" if status.leaving else state
    since = f", up {_duration(max(0.0, time.time() - status.started_at))}" if status.started_at else ""
    totals = ", ".join(f"{number} {_word(outcome)}" for outcome, number in sorted(status.totals.items()))
    return (
        f"pdproxy {_word(status.version)}: {state}{since}; {len(status.in_flight)} in flight; {totals or 'none so far'}"
    )


def tables(status: ProxyStatus) -> Iterator[Table]:
    """Yields the tables that there is something to show in."""
    yield instance_table(status.fleet)
    if status.in_flight:
        yield request_table(status.in_flight)
    if status.workers:
        yield worker_table(status)
    if status.replica is not None:
        yield replica_table(status)


def instance_table(fleet: list[InstanceStatus]) -> Table:
    headings = ("instance", "role", "state", "held", "pages", "queue", "legs", "tokens", "breaker", "why")
    table = Table(*headings, title="Instances", words=(0, 1, 2, 8, 9))
    for one in fleet:
        state = "leaving" if one.leaving else "draining" if one.draining else one.state
        table.add_row(
            _word(one.name),
            one.role,
            _word(state),
            _number(one.held),
            _number(one.capacity),
            _number(one.queue),
            str(one.legs),
            str(one.queued_tokens),
            _word(one.breaker.state),
            _word(one.why),
            style=None if one.routable else "red",
        )
    return table


def request_table(requests: list[RequestStatus]) -> Table:
    shown = sorted(requests, key=lambda one: -(one.total_s or 0.0))[:MAX_REQUESTS]
    left = len(requests) - len(shown)
    headings = ("request", "model", "path", "phase", "prefiller", "decoder", "pages", "out", "age")
    caption = f"… and {left} more" if left else ""
    table = Table(*headings, title="In flight", caption=caption, words=(0, 1, 2, 3, 4, 5))
    for one in shown:
        age_s = one.orphaned_s if one.orphan else one.total_s
        table.add_row(
            _word(one.request_id),
            _word(one.model or ""),
            _word(one.path),
            "orphan" if one.orphan else _word(one.phase),
            _word(one.prefiller or ""),
            _word(one.decoder or ""),
            _number(one.num_pages),
            _number(one.num_output_tokens),
            "" if age_s is None else f"{age_s:.1f} s",
        )
    return table


def worker_table(status: ProxyStatus) -> Table:
    table = Table("worker", "pid", "state", "attempts", title="Workers", words=(0, 2))
    for one in status.workers or ():
        table.add_row(_number(one.worker), _number(one.pid), _word(one.state), _number(one.attempts))
    return table


def replica_table(status: ProxyStatus) -> Table:
    """Returns the fronts of all replicas. Its title names the one that leads."""
    replica = status.replica
    assert replica is not None
    leads = f"{_word(replica.name)} leads, term {replica.term}" if replica.leads else "this replica does not lead"
    trouble = f"the store: {_word(replica.store_error)}" if replica.store_error else ""
    table = Table(
        "front of", "pid", "connected", "silent s", title=f"Replicas ({leads})", caption=trouble, words=(0, 2)
    )
    for one in replica.fronts:
        silent = "" if one.silent_s is None else f"{one.silent_s:.1f}"
        table.add_row(_word(one.replica), _number(one.pid), "yes" if one.connected else "no", silent)
    return table


def _number(number: int | None) -> str:
    return "" if number is None else str(number)


def _word(text: str) -> str:
    return printable(text, MAX_WORD_BYTES)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    told = [f"{number} {unit}" for number, unit in parts if number]
    return " ".join(told[:2]) or "0 s"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
