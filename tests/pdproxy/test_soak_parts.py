"""The soak's own judgement: it must be able to see what is wrong, and its relay must treat signals as it says."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import zmq
import zmq.asyncio

from pdproxy.soak.books import Books
from pdproxy.soak.faults import Fault, Faults
from pdproxy.soak.house import House
from pdproxy.soak.plan import HOST, free_ports, make_plan
from pdproxy.soak.questions import CHAT, COMPLETIONS, Answer, Question, make_questions
from pdproxy.soak.relay import Fate, SignalRelay
from pdproxy.soak.reply import Reply, Said
from pdproxy.soak.report import is_clean, make_report
from pdproxy.soak.run import Findings, SoakOptions
from pdproxy.soak.tally import Tally
from pdproxy.soak.verdict import Verdict, judge
from pdproxy.soak.vitals import Vitals

QUESTION = Question(COMPLETIONS, {"prompt": "x"}, Answer(Said("abc", ["a", "bc"], "length"), 1, 2))
TOO_LONG = Question(COMPLETIONS, {"prompt": "x" * 999})
USAGE = {"prompt_tokens": 1, "completion_tokens": 2}


def whole(**changes: Any) -> Reply:
    choice = {"index": 0, "text": "abc", "finish_reason": "length", "logprobs": {"tokens": ["a", "bc"]}}
    body = {"id": "1", "created": 1, "choices": [choice], "usage": USAGE}
    reply = Reply(200)
    reply.feed_body(json.dumps(body | changes).encode())
    return reply


def streamed(*events: dict[str, Any], is_done: bool = True) -> Reply:
    reply = Reply(200)
    for event in events:
        reply.feed_line("data: " + json.dumps({"id": "1", "created": 1} | event))
    if is_done:
        reply.feed_line("data: [DONE]")
    return reply


def said(text: str, *, finish: str | None = None, tokens: list[str] | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": {"tokens": [text] if text else []}}
    if tokens is not None:
        choice["logprobs"] = {"tokens": tokens}
    return {"choices": [choice]}


def failed(status: int, code: str | None, **more: Any) -> Reply:
    reply = Reply(status)
    reply.feed_body(json.dumps({"error": {"message": "m", "type": "t", "code": code} | more}).encode())
    return reply


LAST = {"choices": [], "usage": USAGE}
BROKEN = {"error": {"message": "m", "type": "t", "code": "leg_failed"}}


@pytest.mark.parametrize(
    "reply",
    [
        whole(),
        streamed(said("a"), said("bc", finish="length"), LAST),
        whole(choices=[{"index": 0, "text": "abc", "finish_reason": "length"}]),
    ],
)
def test_right_answers(reply: Reply) -> None:
    assert judge(QUESTION, 1, reply) == (Verdict.COMPLETED, "")


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (whole(choices=[{"index": 0, "text": "abd", "finish_reason": "length"}]), "'abd'"),
        (whole(choices=[{"index": 0, "text": "abc", "finish_reason": "stop"}]), "(stop)"),
        (streamed(said("ab"), said("c", finish="length"), LAST), "tokens"),
        (whole(usage={"prompt_tokens": 1, "completion_tokens": 3}), "usage (1, 3)"),
        (whole(usage=None), "usage None"),
        (whole(choices=[]), "choices []"),
        (streamed(said("a"), said("bc", finish="length"), LAST, is_done=False), "without [DONE]"),
        (streamed(said("a"), {"id": "2"} | said("bc", finish="length"), LAST), "several ids"),
        (failed(500, None), "unexpected 500"),
        (failed(404, "model_not_found"), "unexpected 404"),
        (failed(400, "context_length_exceeded"), "unexpected 400"),
        (failed(503, "queue_full", type=None), "no type"),
        (streamed(said("b"), BROKEN, is_done=False), "no beginning"),
    ],
)
def test_wrong_answers(reply: Reply, why: str) -> None:
    verdict, told = judge(QUESTION, 1, reply)
    assert verdict is Verdict.WRONG
    assert why in told


@pytest.mark.parametrize(
    ("question", "reply", "why"),
    [
        (QUESTION, failed(503, "queue_full"), "503 queue_full"),
        (QUESTION, streamed(said("a"), BROKEN, is_done=False), "200 leg_failed"),
        (TOO_LONG, failed(400, "context_length_exceeded"), "400 context_length_exceeded"),
        (TOO_LONG, failed(503, "no_ready_instance"), "503 no_ready_instance"),
    ],
)
def test_typed_errors(question: Question, reply: Reply, why: str) -> None:
    assert judge(question, 1, reply) == (Verdict.TYPED_ERROR, why)


def test_a_request_that_is_too_long_must_not_be_answered() -> None:
    assert judge(TOO_LONG, 1, whole())[0] is Verdict.WRONG


def test_every_choice_is_looked_at() -> None:
    choices = [{"index": i, "text": text, "finish_reason": "length"} for i, text in enumerate(("abc", "abx"))]
    twice = {"prompt_tokens": 1, "completion_tokens": 4}
    assert "'abx'" in judge(QUESTION, 2, whole(choices=choices, usage=twice))[1]
    choices[1]["text"] = "abc"
    assert judge(QUESTION, 2, whole(choices=choices, usage=twice))[0] is Verdict.COMPLETED
    assert "choices [0]" in judge(QUESTION, 2, whole())[1]


def test_chat_replies_are_read() -> None:
    reply = Reply(200)
    logprobs = {"content": [{"token": "a"}, {"token": "bc"}]}
    choice = {"index": 0, "message": {"role": "assistant", "content": "abc"}, "finish_reason": "stop"}
    body = {"id": "1", "created": 1, "choices": [choice | {"logprobs": logprobs}]}
    reply.feed_body(json.dumps(body).encode())
    assert reply.choices == {0: Said("abc", ["a", "bc"], "stop")}


def test_the_tally_adds_up() -> None:
    tally = Tally()
    tally.count(Verdict.COMPLETED, path="local")
    tally.count(Verdict.TYPED_ERROR, "503 queue_full")
    tally.count(Verdict.HUNG, "no end")
    assert (tally.num_requests, tally.paths, tally.errors) == (3, {"local": 1}, {"503 queue_full": 1})
    assert tally.failures == ["hung: no end"]


def test_the_same_seed_asks_the_same_questions() -> None:
    first, second, other = (make_questions(random.Random(seed)) for seed in (1, 1, 2))
    assert first == second != other
    assert {question.path for question in first} == {COMPLETIONS, CHAT}


class Fixed(random.Random):
    """Draws these fates, then passes everything on."""

    def __init__(self, *fates: Fate) -> None:
        super().__init__(0)
        self._fates = list(fates)

    def choices(self, *_: Any, **__: Any) -> list[Any]:
        return [self._fates.pop(0) if self._fates else Fate.PASSED]

    def uniform(self, *_: float) -> float:
        return 0.05


async def relayed(fates: list[Fate], count: int) -> list[bytes]:
    """What the proxy gets of ``a``, ``b``, ``c`` and so on, until it has `count` messages."""
    port, target = free_ports(2, random.Random())
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.bind(f"tcp://{HOST}:{target}")
        relay = SignalRelay(port, target, Fixed(*fates))
        relay.is_faulty = True
        running = asyncio.create_task(relay.run())
        try:
            push.connect(f"tcp://{HOST}:{port}")
            for letter in b"abc":
                await push.send(bytes([letter]))
            async with asyncio.timeout(5):
                return [await pull.recv() for _ in range(count)]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            relay.close()


@pytest.mark.parametrize(
    ("fates", "expected"),
    [
        ([], [b"a", b"b", b"c"]),
        ([Fate.LOST], [b"b", b"c"]),
        ([Fate.DOUBLED], [b"a", b"a", b"b", b"c"]),
        ([Fate.REORDERED], [b"b", b"a", b"c"]),
        ([Fate.LATE], [b"b", b"c", b"a"]),
        ([Fate.PASSED, Fate.PASSED, Fate.REORDERED], [b"a", b"b", b"c"]),
    ],
)
async def test_the_relay(fates: list[Fate], expected: list[bytes]) -> None:
    assert await relayed(fates, len(expected)) == expected


class QuietHouse:
    """Who is down or frozen just now, and the most there ever were, by role."""

    def __init__(self) -> None:
        self.plan = make_plan(Path("model"), num_prefillers=3, num_decoders=2, seed=1, page_bytes=1)
        self.down: set[str] = set()
        self.most: Counter[str] = Counter()
        self.num_returns = 0

    def kill(self, name: str) -> None:
        assert name not in self.down
        self.down.add(name)
        for role in ("prefill", "decode"):
            self.most[role] = max(self.most[role], len(self.down & set(self.plan.of_role(role))))

    terminate = freeze = kill

    def thaw(self, name: str) -> None:
        """It stays in `down` until the proxy has it back."""

    async def restart(self, name: str) -> None:
        await asyncio.sleep(0)

    async def until_serving(self, name: str) -> float:
        await asyncio.sleep(0)
        self.down.discard(name)
        self.num_returns += 1
        return 1.5


async def test_one_engine_of_each_role_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr("pdproxy.soak.faults.asyncio.sleep", lambda seconds: sleep(0))
    house = QuietHouse()
    faults = Faults(cast(House, house), seed=1)
    running = asyncio.create_task(faults.run())
    while house.num_returns < 300:
        await sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert house.most == {"prefill": 2, "decode": 1}
    assert {name.partition(" ")[2] for name in faults.done} == set(Fault)
    assert faults.slowest_return_s == 1.5


def findings() -> Findings:
    options = SoakOptions(duration_s=60, seed=1, num_prefillers=1, num_decoders=1, num_clients=1)
    found = Findings(options, books=Books(), num_unserved=0)
    found.before = found.after = Vitals(num_fds=30, num_threads=9, num_tasks=10, rss_mb=300.0)
    return found


def test_a_clean_report() -> None:
    report = make_report(findings(), is_complete=True)
    assert is_clean(report)
    asked = "requests completed typed_errors wrong_answers hung held_at_end leaked_pages fd_growth rss_growth_mb seed"
    assert set(asked.split()) <= report.keys()
    assert not is_clean(make_report(findings(), is_complete=False))


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("wrong_answers", lambda found: found.tally.count(Verdict.WRONG)),
        ("hung", lambda found: found.tally.count(Verdict.HUNG)),
        ("held_at_end", lambda found: setattr(found.books, "num_held", 1)),
        ("leaked_pages", lambda found: setattr(found.books, "num_leaked", 1)),
        ("unserved_at_end", lambda found: setattr(found, "num_unserved", 1)),
        ("crashes", lambda found: found.crashes.append("decode-0 was killed by SIGSEGV")),
        ("fd_growth", lambda found: setattr(found, "after", replace(found.before, num_fds=40))),
        ("task_growth", lambda found: setattr(found, "after", replace(found.before, num_tasks=20))),
    ],
)
def test_what_spoils_a_report(name: str, spoil: Callable[[Findings], None]) -> None:
    found = findings()
    spoil(found)
    report = make_report(found, is_complete=True)
    assert report[name] >= 1
    assert not is_clean(report)
