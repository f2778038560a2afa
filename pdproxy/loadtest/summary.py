"""The module computes the figures of a run: what was asked, what came back, how fast, where the time went, and whether
that is enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec

from pdproxy.loadtest.headers import PHASES
from pdproxy.loadtest.latency import INTERRUPTED, TITLES, Distribution, distribution, distribution_of, is_failed
from pdproxy.loadtest.record import Event, GeneratorHealth, Record, Run, Setting
from pdproxy.loadtest.slo import Judgement, Slo, all_met

PROXY_PHASES = PHASES
"""The proxy's phases in order; ``first_byte`` is from the handover to the decoder to its first byte."""
OUTER_PHASES = ("unsent", "first_token", "rest")
"""The phases that can be told of any server: before the request was sent, up to the first token, from there to the
end."""


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Stretch is the time from one event to the next, with the requests that were due in it."""

    begin_s: float
    end_s: float
    after: str
    """Holds the event with which the stretch begins; it is empty at the beginning of the run."""
    num_requests: int
    num_failed: int
    ttft: Distribution
    e2e: Distribution


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary holds one run's figures. Warm-up does not count. Rates are per second, latencies in seconds.

    What was answered, and what was good, is divided by the same seconds (`measured_s`), and what was asked by no more
    of them (`asked_s`). So good requests per second are never more than whole answers, nor these more than what was
    asked.
    """

    target: str
    model: str
    seed: int
    started_at: float
    wall_s: float
    measured_s: float
    is_interrupted: bool
    settings: dict[str, Setting]
    generator: GeneratorHealth
    is_trusted: bool
    """False where the generator was late: then the figures are the generator's own, and not to be quoted."""

    num_requests: int
    num_ok: int
    num_good: int
    """Counts the whole answers that were within every limit of the target; without a target, all of them."""
    num_at_once: int
    """Counts the streamed answers of two tokens or more that one read of the socket brought whole. Their time per token
    is 0, and tells nothing of the engine."""
    num_failed: int
    num_aborted: int
    """Counts the requests whose client left on purpose."""
    num_interrupted: int
    errors: dict[str, int]
    """Counts the failures by their code, the most frequent first."""

    asked_s: float | None
    """Holds the seconds of the schedule in which the requests were due."""
    offered_rps: float | None
    """Holds the requests due per second, over `asked_s`."""
    throughput_rps: float
    """Holds the whole answers per second, until the last one had come."""
    prompt_tps: float
    answer_tps: float
    cached_share: float | None
    """Holds the share of the prompts' tokens that the engine had kept, where it tells."""

    latencies: dict[str, Distribution]
    phases: dict[str, Distribution]
    """Holds the time in each phase by the proxy's own clock, where there is one; of whole answers."""
    outer_phases: dict[str, Distribution]
    """Holds the time in each phase as seen from outside; of whole answers that were streamed."""
    transfer: Distribution
    """Holds the time that the transfer of the KV took."""
    kv_bytes: int

    paths: dict[str, int]
    prefillers: dict[str, int]
    decoders: dict[str, int]
    stretches: list[Stretch]
    """Holds the stretches of the run; there are some only where anything was done to the target."""

    slo: list[Judgement]
    is_slo_met: bool | None
    """True where the target was met; None where no target was given, or where it is not judged."""
    is_slo_judged: bool
    """False where the generator was too late to tell whether the target was met."""
    good_share: float | None
    """Holds the share of good requests among those that can be judged; good ones were answered within every limit of
    the target."""
    goodput_rps: float | None
    """Holds the good requests per second, until the last answer had come."""


def summarize(run: Run, slo: Slo) -> Summary:
    """Returns the figures of a run, over the requests that count."""
    records = run.measured
    ok = [record for record in records if record.is_ok]
    failed = [record for record in records if is_failed(record)]
    num_good, num_judged = good_of(records, slo)
    judgements = slo.judge(records, run.health)
    is_met = all_met(judgements)
    per_s = 1 / run.measured_s if run.measured_s > 0 else 0.0
    return Summary(
        target=run.head.target,
        model=run.head.model,
        seed=run.head.seed,
        started_at=run.head.started_at,
        wall_s=run.head.wall_s,
        measured_s=run.measured_s,
        is_interrupted=run.head.is_interrupted,
        settings=run.head.settings,
        generator=run.health,
        is_trusted=run.health.is_trusted,
        num_requests=len(records),
        num_ok=len(ok),
        num_good=num_good,
        num_at_once=sum(record.tpot_s == 0 for record in ok),
        num_failed=len(failed),
        num_aborted=sum(bool(record.aborted) and not record.error for record in records),
        num_interrupted=sum(record.error == INTERRUPTED for record in records),
        errors=_counts(failed, lambda record: record.error),
        asked_s=asked_s(run),
        offered_rps=offered_rps(run),
        throughput_rps=len(ok) * per_s,
        prompt_tps=sum(record.prompt_tokens or 0 for record in ok) * per_s,
        answer_tps=sum(record.answer_tokens or 0 for record in ok) * per_s,
        cached_share=_cached_share(ok),
        latencies={metric: distribution_of(records, metric) for metric in TITLES},
        phases=phases_of(ok),
        outer_phases=outer_phases_of(ok),
        transfer=distribution(record.transfer_s for record in ok if record.transfer_s is not None),
        kv_bytes=sum(record.num_kv_bytes or 0 for record in ok),
        paths=_counts(ok, lambda record: record.path),
        prefillers=_counts(ok, lambda record: record.prefiller),
        decoders=_counts(ok, lambda record: record.decoder),
        stretches=list(_stretches(run)),
        slo=judgements,
        is_slo_met=is_met,
        is_slo_judged=is_met is not None or not judgements,
        good_share=num_good / num_judged if num_judged else None,
        goodput_rps=num_good * per_s if num_judged else None,
    )


def offered_rps(run: Run) -> float | None:
    """Returns the requests due per second, or None where there were none."""
    seconds = asked_s(run)
    return len(run.measured) / seconds if seconds else None


def asked_s(run: Run) -> float | None:
    """Returns the seconds, not more than were measured, in which the requests that count were due. It is None where
    there were none."""
    dues = [record.due_s for record in run.measured]
    if not dues or run.measured_s <= 0:
        return None
    return min(run.measured_s, _scheduled_s(run) or _spanned_s(dues, run.head.warmup_s) or run.measured_s)


def _scheduled_s(run: Run) -> float | None:
    """Returns the seconds of the schedule that count, or None where something other than time ended it."""
    settings = run.head.settings
    ends_s = settings.get("duration_s")
    if not isinstance(ends_s, int | float) or settings.get("num_requests") or settings.get("arrivals") == "trace":
        return None
    return max(0.0, ends_s - run.head.warmup_s)


def _spanned_s(dues: Sequence[float], begin_s: float) -> float:
    """Returns the seconds up to the last request, or from the first to the last and a mean gap more, where that is
    longer: requests that are a second apart take a second each."""
    first_s, last_s, num = min(dues), max(dues), len(dues)
    return max(last_s - begin_s, (last_s - first_s) * num / (num - 1) if num > 1 else 0.0)


def good_of(records: Sequence[Record], slo: Slo) -> tuple[int, int]:
    """Returns how many requests were good, and of how many that can be judged. Without a target, every whole answer is
    good."""
    judged = [is_good for is_good in map(slo.is_met_by, records) if is_good is not None]
    return sum(judged), len(judged)


def phases_of(records: Sequence[Record]) -> dict[str, Distribution]:
    """Returns the proxy's phases that occurred, in order, with their times."""
    names = dict.fromkeys([*PROXY_PHASES, *(name for record in records for name in record.phases)])
    found = {name: [r.phases[name] for r in records if name in r.phases] for name in names}
    return {name: distribution(seconds) for name, seconds in found.items() if seconds}


def outer_split(record: Record) -> dict[str, float]:
    """Returns a request's seconds by `OUTER_PHASES`; it is empty where the time of the first token is not known."""
    if record.first_token_s is None:
        return {}
    return {
        "unsent": record.sent_s - record.due_s,
        "first_token": record.first_token_s - record.sent_s,
        "rest": record.done_s - record.first_token_s,
    }


def outer_phases_of(records: Sequence[Record]) -> dict[str, Distribution]:
    splits = [split for split in map(outer_split, records) if split]
    return {name: distribution(split[name] for split in splits) for name in OUTER_PHASES} if splits else {}


def told(event: Event) -> str:
    """Returns one event in a few words."""
    return " ".join(part for part in (event.what, event.whom, event.note) if part)


def _stretches(run: Run) -> Iterator[Stretch]:
    """Yields the stretches, over all requests, those of the warm-up too: something may have been done to them."""
    if not run.events:
        return
    marks = [(0.0, ""), *((event.at_s, told(event)) for event in run.events), (max(run.head.wall_s, 0.0), "")]
    for (begin_s, after), (end_s, _) in pairwise(marks):
        due = [record for record in run.records if begin_s <= record.due_s < end_s]
        yield Stretch(
            begin_s=begin_s,
            end_s=end_s,
            after=after,
            num_requests=len(due),
            num_failed=sum(map(is_failed, due)),
            ttft=distribution_of(due, "ttft"),
            e2e=distribution_of(due, "e2e"),
        )


def _cached_share(records: Sequence[Record]) -> float | None:
    """Returns the share of the prompts' tokens that the engine had kept. An engine that says that it had kept more of a
    prompt than there is of it had kept all of it."""
    told = [(one.cached_tokens, one.prompt_tokens) for one in records if one.cached_tokens is not None]
    pairs = [(min(cached, prompt), prompt) for cached, prompt in told if prompt]
    return sum(cached for cached, _ in pairs) / sum(prompt for _, prompt in pairs) if pairs else None


def _counts(records: Sequence[Record], key: Callable[[Record], str]) -> dict[str, int]:
    """Returns how often each key occurs, the most frequent first; it leaves out empty keys."""
    return {name: count for name, count in Counter(map(key, records)).most_common() if name}
