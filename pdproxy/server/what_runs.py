"""The log is told what the proxy does at this moment, for an operator who asks why something does not get on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from pdproxy.admission.admission import Admission
from pdproxy.fleet.pool import Pool
from pdproxy.orchestrator.orchestrator import Orchestrator
from pdproxy.telemetry.record import RequestRecord

MAX_LINES = 50
"""The most lines of each kind. One more says how many there would have been."""
MAX_TASKS = 5_000
"""The most tasks that are looked at, which takes 20 ms."""
MAX_DEPTH = 100
MAX_SHOWN_DEPTH = 4
"""The most places of a task that are shown, from the innermost one on."""
_AWAITED = ("cr_await", "gi_yieldfrom", "ag_await")
_FRAMES = ("cr_frame", "gi_frame", "ag_frame")


def what_runs(orchestrator: Orchestrator, pool: Pool) -> Iterator[str]:
    """Yields lines about the requests in flight, those that wait, who holds pages, the orphans that the reaper has, and
    the tasks of the running loop."""
    records = sorted(orchestrator.records(), key=lambda record: record.started)
    yield from _most("requests in flight", [_request(record) for record in records])
    yield from _most("lines in which requests wait", [*_lines(pool.admission)])
    yield from _most("memories with pages", [*_accounts(pool)])
    orphans = [facts for facts in orchestrator.in_flight() if facts.get("orphan")]
    yield from _most("orphans", [_orphan(facts) for facts in orphans])
    tasks = asyncio.all_tasks()
    places = Counter(_where(task) for task in islice(tasks, MAX_TASKS))
    yield from _most(f"places of {len(tasks)} tasks", [f"{num} at {place}" for place, num in places.most_common()])


def _most(what: str, told: list[str]) -> Iterable[str]:
    yield f"{len(told)} {what}{':' if told else ''}"
    yield from told[:MAX_LINES]
    if len(told) > MAX_LINES:
        yield f"and {len(told) - MAX_LINES} more"


def _request(record: RequestRecord) -> str:
    told = f"{record.request_id} of {record.total_s:.1f} s"
    if (attempt := record.attempt) is None:
        return f"{told}, not measured yet"
    step, since = attempt.step
    for_s = record.total_s - (since - record.started)
    return (
        f"{told}, attempt {record.num_attempts} ({attempt.id}, {attempt.path}): {step or 'between attempts'} for "
        f"{for_s:.1f} s, prefiller {attempt.prefiller}, decoder {attempt.decoder}, {attempt.num_pages} pages"
    )


def _lines(admission: Admission) -> Iterator[str]:
    for model in admission.kernel.waiting_models():
        num, pages = admission.kernel.waiting(model)
        if num:
            yield f"model {model!r}: {num} wait for {pages} pages"


def _accounts(pool: Pool) -> Iterator[str]:
    for instance in pool.instances:
        if (pages := instance.pages) is not None:
            yield f"{instance.name}: {pages.held} of {pages.capacity} pages are held, by {pages.num_leases} leases"


def _orphan(facts: dict[str, Any]) -> str:
    return (
        f"{facts['pages']} pages of {facts['owner']} since {facts['orphaned_s']:.1f} s, for which {facts['awaits']} is "
        f"awaited: attempt {facts.get('attempt')} of {facts.get('request_id')}"
    )


def _where(task: asyncio.Task[Any]) -> str:
    """Returns the places at which the task waits, the innermost first. Compiled code has no frames and is left out."""
    places, at = [], task.get_coro()
    for _ in range(MAX_DEPTH):
        frame = next((found for name in _FRAMES if (found := getattr(at, name, None)) is not None), None)
        if frame is not None:
            folder, _, file = frame.f_code.co_filename.rpartition("/")
            places.append(f"{folder.rpartition('/')[2]}/{file}:{frame.f_lineno}")
        following = next((found for name in _AWAITED if (found := getattr(at, name, None)) is not None), None)
        if following is None:
            break
        at = following
    if not places:
        return getattr(task.get_coro(), "__qualname__", "unknown")
    return " < ".join(places[: -MAX_SHOWN_DEPTH - 1 : -1])
