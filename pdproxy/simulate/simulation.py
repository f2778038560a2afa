"""The module runs one simulation from its first request to its last page given back."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdproxy.errors import IntegrityError
from pdproxy.openai.request import COMPLETIONS
from pdproxy.server.process_memory import use_large_pages
from pdproxy.simulate import loop as virtual
from pdproxy.simulate.client import SimulatedClient, make_request
from pdproxy.simulate.faults import check_faults, do_faults, slow_some
from pdproxy.simulate.figures import Figures, Level
from pdproxy.simulate.loop import VirtualLoop
from pdproxy.simulate.plan import Plan
from pdproxy.simulate.simulated_fleet import SimulatedFleet
from pdproxy.simulate.traffic import Question
from pdproxy.telemetry.record import Outcome, RequestRecord

_DONE = Outcome.DONE
Ended = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result is what one simulation found. `wall_s` is real time; everything else is the same for the same plan."""

    plan: Plan
    figures: Figures
    wall_s: float
    simulated_s: float
    num_callbacks: int
    offered_per_s: float | None
    done_per_s: float | None
    in_flight: Level
    use: dict[str, Any]
    ledger: dict[str, int]
    stragglers: list[str]
    fronts: dict[str, Any] = field(default_factory=dict)
    """The messages between fronts and leader, and the transfers without room; empty for one proxy."""
    halves: tuple[Figures, ...] = ()
    """The figures of either half of the requests, where the load turns."""
    moves: tuple[tuple[float, str], ...] = ()
    """The changes of role: when each ended, in seconds, and the instance's name and new role."""

    @property
    def num_without_room(self) -> int:
        """Returns for how many transfers a decoder had no room, though pages had been granted to them by the leader of
        several proxies."""
        return int(self.fronts.get("without_room", 0))

    def as_plain(self) -> dict[str, Any]:
        """Returns the result for a JSON file."""
        return {
            "requests": self.plan.num_requests,
            "wall_s": round(self.wall_s, 3),
            "seed": self.plan.seed,
            "measured": self.figures.count,
            "simulated_s": round(self.simulated_s, 6),
            "callbacks": self.num_callbacks,
            "offered_per_s": _rounded(self.offered_per_s),
            "done_per_s": _rounded(self.done_per_s),
            "in_flight": {"mean": _rounded(self.in_flight.mean(self.simulated_s)), "max": self.in_flight.most},
            **self.figures.as_plain(),
            "use": self.use,
            "ledger": self.ledger,
            "slow": self.stragglers,
            **({"fronts": self.fronts} if self.fronts else {}),
            **({"halves": [half.as_plain() for half in self.halves]} if self.halves else {}),
            **({"moves": [[_rounded(at_s), what] for at_s, what in self.moves]} if self.moves else {}),
            "plan": self.plan.as_plain(),
        }


LARGE_AT = 1 << 14
"""The number of requests from which on it is worth while to have all memory in large pages. Memory is looked at again
at twice as many, and so on."""


class Simulation:
    """Simulation runs one plan.

    Mutable state: figures, how many are under way, when the first and the last request that count were due, how many
    whole answers came between, and how busy the instances were until then.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._fleet = SimulatedFleet(
            plan.settings,
            plan.speed,
            plan.prefillers,
            plan.decoders,
            plan.seed,
            num_proxies=plan.proxies,
            weather=plan.weather,
            can_be_lost=plan.is_about_proxies,
        )
        self._stragglers = slow_some(plan.stragglers, self._fleet.engines, plan.seed)
        self._session_header = plan.settings.session_header.lower()
        self.figures = Figures(plan.slo)
        self.halves = () if plan.traffic.then is None else (Figures(plan.slo), Figures(plan.slo))
        self.in_flight = Level()
        self._first_due: float | None = None
        self._last_due = 0.0
        self._num_done = 0
        self._is_counting = False
        self._busy: dict[str, Any] = {}

    async def run(self, began: float) -> Result:
        """Runs the plan and returns the result. `began` is its start by the real clock. Raises `IntegrityError` where
        anything is left at the end."""
        plan, fleet = self._plan, self._fleet
        check_faults(plan.faults, fleet.whom)
        try:
            async with (
                fleet.running(is_probed=bool(plan.faults) or plan.settings.role_controller),
                asyncio.TaskGroup() as doing,
            ):
                faults = doing.create_task(do_faults(plan.faults, fleet.whom))
                if plan.traffic.clients:
                    await self._ask_in_turn()
                else:
                    await self._ask_all()
                faults.cancel()
            fleet.check_idle()
            if num_open := self.figures.outcomes[Outcome.RUNNING]:
                raise IntegrityError(f"{num_open} requests ended without an outcome")
        finally:
            fleet.close()
        return self._result(time.perf_counter() - began)

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _ask_all(self) -> None:
        """Asks each question when it is due, whatever becomes of the others."""
        loop, questions = self._loop, self._plan.traffic.questions(self._plan.num_requests, self._plan.seed)
        over: asyncio.Future[None] = loop.create_future()
        asking: dict[asyncio.Task[None], Ended] = {}
        is_all_asked = False
        large_at = [LARGE_AT]

        def answered(task: asyncio.Task[None]) -> None:
            asking.pop(task)()
            if over.done():
                return
            error = None if task.cancelled() else task.exception()
            if error is not None:
                over.set_exception(error)
            elif is_all_asked and not asking:
                over.set_result(None)

        def ask(question: Question) -> None:
            """Sends a question that is due."""
            if question.index == large_at[0]:
                large_at[0] *= 2
                use_large_pages()
            served, ended = self._ask(question, question.due_s)
            task = loop.create_task(served)
            asking[task] = ended
            task.add_done_callback(answered)
            await_next()

        def await_next() -> None:
            nonlocal is_all_asked
            question = next(questions, None)
            if question is not None:
                loop.call_at(question.due_s, ask, question)
            else:
                is_all_asked = True

        await_next()
        try:
            await over
        finally:
            for task in asking:
                task.cancel()

    async def _ask_in_turn(self) -> None:
        """Lets the plan's number of clients ask, each its next question after the other's answer."""
        plan, loop = self._plan, self._loop
        questions = plan.traffic.questions(plan.num_requests, plan.seed)

        async def client() -> None:
            for question in questions:
                served, ended = self._ask(question, loop.time())
                try:
                    await served
                finally:
                    ended()
                if plan.traffic.think_s:
                    await asyncio.sleep(plan.traffic.think_s)

        async with asyncio.TaskGroup() as asking:
            for _ in range(plan.traffic.clients):
                asking.create_task(client())

    def _ask(self, question: Question, due: float) -> tuple[Coroutine[Any, Any, None], Ended]:
        """Returns the service of one request by one client, which has to be awaited to whatever end, and what has to be
        called then."""
        if question.index >= self._plan.num_warmup:
            if self._first_due is None:
                self._first_due = due
                self._is_counting = True
            self._last_due = due
        if question.index == self._plan.num_requests - 1:
            # What happens from now on, while the fleet empties, tells nothing of what it does under this traffic.
            self._is_counting = False
            self._busy = self._busy_shares()
        client = SimulatedClient(self._loop, question.group, self._session_header)
        record = RequestRecord(str(question.index), COMPLETIONS, clock=self._loop.time)
        record.received()
        self.in_flight.change(1, due)
        served = self._fleet.serve(question.index, make_request(question), client, record)
        if self._plan.patience_s is not None:
            served = _patiently(served, client, self._plan.patience_s)
        return served, partial(self._ended, question, client, record, due)

    def _ended(self, question: Question, client: SimulatedClient, record: RequestRecord, due: float) -> None:
        self.in_flight.change(-1, self._loop.time())
        if self._is_counting and record.outcome is _DONE:
            self._num_done += 1
        if question.index < self._plan.num_warmup:
            return
        self._note(self.figures, client, record, question.num_answer_tokens - 1, due)
        if self.halves:
            half = self.halves[question.index >= self._plan.num_requests // 2]
            self._note(half, client, record, question.num_answer_tokens - 1, due)

    def _note(
        self, figures: Figures, client: SimulatedClient, record: RequestRecord, num_more: int, due: float
    ) -> None:
        """Notes in `figures` how a request ended. `num_more` tokens were to come behind the first."""
        outcome = record.outcome
        figures.outcomes[outcome] += 1
        if record.num_attempts > 1:
            figures.num_retries += record.num_attempts - 1
        if record.error is not None:
            figures.errors[record.error] += 1
        if outcome is not _DONE or client.first_at is None:
            return
        figures.paths[record.path] += 1
        tpot_s = (client.last_at - client.first_at) / num_more if num_more > 0 else None
        figures.served(client.first_at - due, tpot_s, client.last_at - due)
        if record.attempt is not None:
            phases = figures.phases
            for name, seconds in record.attempt.phase_seconds().items():
                if name in phases:
                    phases[name].add(seconds)

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _result(self, wall_s: float) -> Result:
        end_s = self._loop.time()
        first = self._first_due if self._first_due is not None else 0.0
        span_s = self._last_due - first
        assert isinstance(self._loop, VirtualLoop)
        return Result(
            plan=self._plan,
            figures=self.figures,
            wall_s=wall_s,
            simulated_s=end_s,
            num_callbacks=self._loop.num_callbacks,
            offered_per_s=(self.figures.count - 1) / span_s if span_s > 0.0 else None,
            done_per_s=self._num_done / span_s if span_s > 0.0 else None,
            in_flight=self.in_flight,
            use=self._use(),
            ledger=self._fleet.ledger(),
            stragglers=self._stragglers,
            fronts=self._fronts(),
            halves=self.halves,
            moves=tuple(self._fleet.moves),
        )

    def _fronts(self) -> dict[str, Any]:
        """Returns what passed between fronts and leader, and whether it was enough to keep pages apart."""
        proxies, plan = self._fleet.proxies, self._plan
        if proxies is None:
            return {}
        cpu_s, asked_s = proxies.num_messages * plan.message_cpu_s, self._last_due
        return {
            "proxies": plan.proxies,
            "messages_per_request": _rounded(proxies.num_messages / plan.num_requests),
            "batches_per_request": _rounded(proxies.num_batches / plan.num_requests),
            "without_room": self._fleet.num_without_room,
            "leaders": proxies.num_leaders,
            "leader_core_share": _rounded(cpu_s / asked_s) if cpu_s and asked_s else None,
        }

    def _busy_shares(self) -> dict[str, Any]:
        """Returns how busy the instances were until now, while requests came."""
        prefillers, decoders = self._fleet.prefillers.values(), self._fleet.decoders.values()
        now_s = self._loop.time()
        busy_s = sum(one.batch.busy_s for one in decoders)
        gaps = [one.batch.gaps.percentile(99.0) for one in decoders]
        return {
            "prefillers_busy": _shares([one.prompts.busy_s for one in prefillers], now_s),
            "decoders_busy": _shares([one.batch.busy_s for one in decoders], now_s),
            "mean_batch": _rounded(sum(one.batch.sequence_s for one in decoders) / busy_s) if busy_s else 0.0,
            "token_gap_p99_s": _spread([gap for gap in gaps if gap is not None]),
        }

    def _use(self) -> dict[str, Any]:
        """Returns how busy the instances were while requests came, and what they had used in the end."""
        prefillers, decoders = self._fleet.prefillers.values(), self._fleet.decoders.values()
        cached = sum(one.prompts.num_cached_tokens for one in prefillers)
        read = sum(one.prompts.num_read_tokens for one in prefillers)
        return {
            **self._busy,
            "most_pages": max(one.most_pages for one in decoders),
            "pd_buffer_pages": self._plan.speed.pd_buffer_pages,
            "given_way": self._fleet.num_given_way,
            "kv_cache_tokens": self._plan.speed.kv_cache_tokens,
            "cached_share": _rounded(cached / (cached + read)) if cached + read else 0.0,
        }


def _shares(busy_s: list[float], of_s: float) -> dict[str, float | None]:
    """Returns the shares of `of_s` seconds in which the instances were busy."""
    if of_s <= 0.0:
        return {"mean": None, "least": None, "most": None}
    return _spread([each / of_s for each in busy_s])


def _spread(values: list[float]) -> dict[str, float | None]:
    """Returns the mean of the instances' values, the least and the most."""
    if not values:
        return {"mean": None, "least": None, "most": None}
    return {
        "mean": _rounded(sum(values) / len(values)),
        "least": _rounded(min(values)),
        "most": _rounded(max(values)),
    }


async def _patiently(served: Coroutine[Any, Any, None], client: SimulatedClient, patience_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s) as client.patience:
            await served


def simulate(plan: Plan) -> Result:
    """Runs a plan and returns the result. Raises `SimulationError`, `ConfigError` for what cannot be; `IntegrityError`,
    `StuckError` for what should not be."""
    began = time.perf_counter()

    async def main() -> Result:
        return await Simulation(plan).run(began)

    with _rarely_collected():
        return virtual.run(main())


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Makes the garbage collector run rarely while the block runs: requests leave next to no cycles behind, and looking
    for them costs a third of the time."""
    before, is_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    if not is_frozen:  # else it would be thawed below with the rest
        gc.freeze()
    gc.set_threshold(2_000_000, 10, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not is_frozen:
            gc.unfreeze()


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
