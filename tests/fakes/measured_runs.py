"""Runs of a load test as somebody might have measured them, to be summed up and drawn; all of it by a seed."""

from __future__ import annotations

import random
from typing import Any

from pdproxy.loadtest.log_histogram import LogHistogram
from pdproxy.loadtest.record import FORMAT, Event, GeneratorHealth, Head, Moment, Record, Run

INSTANCES = ("prefill-0", "decode-0", "decode-1")


def record(index: int = 0, **fields: Any) -> Record:
    """A whole streamed answer: first token after 100 ms, four more at 20 ms each."""
    due_s = fields.pop("due_s", float(index))
    ttft_s, tpot_s = fields.pop("ttft_s", 0.1), fields.pop("tpot_s", 0.02)
    gaps = LogHistogram()
    for _ in range(4):
        gaps.add(tpot_s)
    first_s = due_s + ttft_s
    usual: dict[str, Any] = {
        "sent_s": due_s,
        "first_byte_s": first_s,
        "first_token_s": first_s,
        "last_token_s": first_s + 4 * tpot_s,
        "done_s": first_s + 4 * tpot_s,
        "prompt_tokens_asked": 10,
        "answer_tokens_asked": 5,
        "prompt_tokens": 10,
        "answer_tokens": 5,
        "num_chunks": 5,
        "gaps": gaps,
        "status": 200,
        "question": index,
        "answer_digest": f"{index:08x}",
    }
    return Record(index=index, due_s=due_s, **usual | fields)


def failed(index: int = 0, error: str = "http_503", **fields: Any) -> Record:
    none = dict.fromkeys(("first_byte_s", "first_token_s", "last_token_s", "answer_tokens", "gaps"))
    return record(index, error=error, answer_digest="", status=503, num_chunks=0, **none | fields)


def plain(index: int = 0, **fields: Any) -> Record:
    """Not streamed."""
    none = dict.fromkeys(("first_token_s", "last_token_s", "gaps"))
    return record(index, is_stream=False, num_chunks=0, **none | fields)


def left(index: int = 0, phase: str = "prefill", **fields: Any) -> Record:
    """By its client, before it saw anything."""
    none = dict.fromkeys(("first_byte_s", "first_token_s", "last_token_s", "answer_tokens", "gaps"))
    return record(index, aborted=phase, answer_digest="", num_chunks=0, **none | fields)


def health(*, late_p99_s: float = 0.001) -> GeneratorHealth:
    return GeneratorHealth(
        cpu_share=0.2,
        late_p50_s=0.0,
        late_p99_s=late_p99_s,
        late_max_s=late_p99_s,
        lag_p50_s=0.0,
        lag_p99_s=0.001,
        lag_max_s=0.002,
        limit_s=0.005,
    )


def run_of(records: list[Record], **fields: Any) -> Run:
    """`fields` are the head's, but for `health`, `moments` and `events`."""
    parts = {name: fields.pop(name) for name in ("moments", "events") if name in fields}
    measured = fields.pop("health", None) or health()
    usual: dict[str, Any] = {
        "format": FORMAT,
        "target": "http://127.0.0.1:9100",
        "model": "tiny",
        "seed": 1,
        "started_at": 1_790_000_000.0,
        "wall_s": max((one.done_s for one in records), default=0.0),
        "warmup_s": 0.0,
        "is_interrupted": False,
        "settings": {},
    }
    return Run(head=Head(**usual | fields), health=measured, records=records, **parts)


def lively_run(*, rate: float = 8.0, seconds: float = 30.0, seed: int = 1, slowness: float = 1.0, **fields: Any) -> Run:
    """A minute in the life of a proxy: decode-0 is killed in the middle and comes back."""
    dice = random.Random(seed)
    kill_s, back_s = seconds / 3, seconds * 2 / 3
    settings = {"rate": rate, "slo": "ttft:p99<0.5,e2e:p99<2", "sizes": "fixed:10 → fixed:5"}
    records, at_s = [], 0.0
    while (at_s := at_s + dice.expovariate(rate)) < seconds:
        index = len(records)
        is_struck = kill_s <= at_s < kill_s + 1
        ttft_s = slowness * dice.lognormvariate(-2.3, 0.5) * (3 if kill_s <= at_s < back_s else 1)
        tpot_s = slowness * dice.lognormvariate(-4, 0.3)
        phases = {"tokenize": 0.002, "slot_wait": ttft_s * 0.3, "prefill": ttft_s * 0.5, "kv_wait": ttft_s * 0.1}
        phases |= {"first_byte": ttft_s * 0.1, "decode": tpot_s * 4}
        common: dict[str, Any] = {"due_s": at_s, "path": "disaggregated", "prefiller": "prefill-0"}
        if is_struck and index % 2:
            records.append(failed(index, "upstream_error", due_s=at_s, done_s=at_s + 0.2))
        else:
            records.append(
                record(
                    index,
                    ttft_s=ttft_s,
                    tpot_s=tpot_s,
                    phases=phases,
                    decoder=INSTANCES[1 + index % 2],
                    transfer_s=0.004,
                    num_kv_bytes=65536,
                    **common,
                )
            )
    return run_of(
        records,
        moments=[_moment(dice, quarter / 4, kill_s, back_s) for quarter in range(round(seconds * 4))],
        events=[
            Event(at_s=kill_s, what="kill", whom="decode-0"),
            Event(at_s=back_s, what="start", whom="decode-0"),
            Event(at_s=back_s + 2, what="up", whom="decode-0"),
        ],
        seed=seed,
        settings=settings | fields.pop("settings", {}),
        **fields,
    )


def _moment(dice: random.Random, at_s: float, kill_s: float, back_s: float) -> Moment:
    is_down = kill_s < at_s < back_s + 2
    return Moment(
        at_s=at_s,
        num_open=dice.randrange(3, 9) + 10 * is_down,
        in_flight=dice.randrange(2, 8) + 10 * is_down,
        waiting={"decode-0": 0, "decode-1": 5 * is_down},
        held={"decode-0": 0 if is_down else dice.randrange(6), "decode-1": dice.randrange(4, 8)},
        capacity={"decode-0": 8, "decode-1": 8},
        states={"prefill-0": "ready", "decode-0": "down" if is_down else "ready", "decode-1": "ready"},
    )
