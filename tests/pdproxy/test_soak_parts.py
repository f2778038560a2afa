"""The soak's own judgement: it must be able to see what is wrong, and its relay must treat signals as it says."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
import zmq.asyncio

from pdproxy.launch.ports import HOST, free_ports
from scripts.dev.common.vitals import Vitals
from scripts.dev.soak.clients import Clients
from scripts.dev.soak.counters import Counters
from scripts.dev.soak.faults import Fault, Faults
from scripts.dev.soak.leak_check import LeakCheck
from scripts.dev.soak.outages import Outages
from scripts.dev.soak.plan import make_plan
from scripts.dev.soak.questions import CHAT, COMPLETIONS, Answer, Question, make_questions
from scripts.dev.soak.relay import Fate, SignalRelay
from scripts.dev.soak.reply import Reply, Said
from scripts.dev.soak.report import is_clean, make_report
from scripts.dev.soak.run import Findings, SoakOptions
from scripts.dev.soak.soak_cluster import SoakCluster
from scripts.dev.soak.verdict import Verdict, judge, what_is_wrong_so_far
from scripts.dev.soak.witness import Witness

QUESTION = Question(COMPLETIONS, {"prompt": "x"}, Answer(Said("abc", ["a", "bc"], "length"), 1, 2))
PLAN = make_plan(Path("model"), num_prefillers=3, num_decoders=2, seed=1, page_bytes=1)
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
        reply.feed_event(json.dumps({"id": "1", "created": 1} | event).encode())
    if is_done:
        reply.feed_event(b"[DONE]")
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


# ── the proxy's deaths ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lost_connection_is_excused_only_by_an_outage_in_its_time() -> None:
    outages = Outages()
    before = outages.mark()
    assert not outages.excuse(before)
    outages.begin()
    during = outages.mark()
    assert outages.excuse(before)
    assert outages.excuse(during), "it is still down"
    outages.end()
    assert outages.excuse(before), "it was down meanwhile"
    assert not outages.excuse(outages.mark())


def test_what_came_before_the_proxy_was_killed_must_be_right() -> None:
    assert what_is_wrong_so_far(QUESTION, Reply()) == ""
    assert what_is_wrong_so_far(QUESTION, streamed(said("a"), is_done=False)) == ""
    assert "no beginning" in what_is_wrong_so_far(QUESTION, streamed(said("b"), is_done=False))
    assert what_is_wrong_so_far(TOO_LONG, Reply()) == ""
    assert "too long" in what_is_wrong_so_far(TOO_LONG, streamed(said("a"), is_done=False))


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    event = {"id": "1", "created": 1, "choices": [{"index": 0, "text": text, "finish_reason": None}]}
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize(
    ("is_killed", "sent", "verdict"),
    [
        (True, b"", Verdict.PROXY_KILLED),
        (True, HEAD + chunk("a"), Verdict.PROXY_KILLED),
        (True, HEAD + chunk("b"), Verdict.WRONG),
        (False, b"", Verdict.WRONG),
        (False, HEAD + chunk("a"), Verdict.WRONG),
    ],
)
async def test_a_connection_that_breaks(is_killed: bool, sent: bytes, verdict: Verdict) -> None:
    """Before anything came, or in the middle of a stream; `sent` is what comes before."""
    outages, counters = Outages(), Counters()

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await writer.drain()
        if is_killed:
            outages.begin()
            outages.end()
        writer.close()

    async with await asyncio.start_server(die, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        clients = Clients(f"http://{HOST}:{port}", [QUESTION], 1, 1, counters, outages)
        assert await clients.everything_once() == 1
        await clients.send_home()
    assert counters.verdicts == {verdict: 1}
    assert counters.lost.total() == (verdict is Verdict.PROXY_KILLED)


async def test_nobody_listens_while_the_proxy_is_dead() -> None:
    outages, counters = Outages(), Counters()
    [port] = free_ports(1, random.Random(1))
    clients = Clients(f"http://{HOST}:{port}", [QUESTION], 1, 1, counters, outages)
    outages.begin()
    await clients.everything_once()
    outages.end()
    await clients.everything_once()
    await clients.send_home()
    assert counters.verdicts == {Verdict.PROXY_KILLED: 1, Verdict.WRONG: 1}
    assert counters.lost == {"ConnectError": 1}


def test_the_witness_adds_up_every_process_of_a_decoder() -> None:
    witness = Witness(PLAN, Outages())
    for name, epoch, count in [
        ("decode-0", "one", 0),
        ("decode-0", "one", 2),
        ("decode-0", "two", 0),
        ("decode-0", "two", 3),
        ("decode-1", "three", 0),
    ]:
        witness.note(name, {"epoch": epoch, "num_reservations_waited": count})
    assert witness.num_waited == 5
    assert witness.by_decoder == {"decode-0": 5}


async def test_the_witness_goes_on_when_a_decoder_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.dev.soak.witness.LOOK_INTERVAL_S", 0.001)
    told = [{"epoch": "one", "num_reservations_waited": 1}, None, {"epoch": "two", "num_reservations_waited": 4}]
    asked: list[str] = []
    is_told = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        if len(asked) > len(told):
            is_told.set()
        content = told[min(len(asked), len(told)) - 1]
        if content is not None:
            body = json.dumps(content).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, HOST, 0) as server:
        decoder = replace(PLAN.engines[-1], port=server.sockets[0].getsockname()[1])
        witness = Witness(replace(PLAN, engines=(decoder,)), Outages())
        running = asyncio.create_task(witness.run())
        async with asyncio.timeout(5):
            await is_told.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert witness.num_waited == 5
    assert set(asked) == {"/kv_buffer"}


def test_the_counters_add_up() -> None:
    counters = Counters()
    counters.count(Verdict.COMPLETED, path="local")
    counters.count(Verdict.TYPED_ERROR, "503 queue_full")
    counters.count(Verdict.HUNG, "no end")
    assert (counters.num_requests, counters.paths, counters.errors) == (3, {"local": 1}, {"503 queue_full": 1})
    assert counters.failures == ["hung: no end"]


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


class QuietCluster:
    """Who is down or frozen just now, and the most there ever were, by role; and whether there is a proxy."""

    def __init__(self) -> None:
        self.plan = PLAN
        self.num_proxies = 1
        self.num_proxy_deaths = 0
        self.down: set[str] = set()
        self.most: Counter[str] = Counter()
        self.num_returns = 0
        self.num_looked_at = 0

    def kill(self, name: str) -> None:
        assert name not in self.down
        self.down.add(name)
        for role in ("prefill", "decode"):
            self.most[role] = max(self.most[role], len(self.down & set(self.plan.of_role(role))))

    terminate = freeze = kill

    def thaw(self, name: str) -> None:
        """It stays in `down` until the proxy has it back."""

    def has_overslept(self, name: str) -> bool:
        self.num_looked_at += 1
        return self.num_looked_at % 3 == 0

    async def restart(self, name: str) -> None:
        await asyncio.sleep(0)

    def kill_proxy(self) -> None:
        assert self.num_proxies == 1
        self.num_proxies = 0
        self.num_proxy_deaths += 1

    async def restart_proxy(self) -> None:
        await asyncio.sleep(0)
        self.num_proxies = 1

    async def until_serving(self, name: str) -> float:
        await asyncio.sleep(0)
        self.down.discard(name)
        self.num_returns += 1
        return 1.5


async def test_one_engine_of_each_role_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr("scripts.dev.soak.faults.asyncio.sleep", lambda seconds: sleep(0))
    cluster = QuietCluster()
    faults = Faults(cast(SoakCluster, cluster), seed=1)
    running = asyncio.create_task(faults.run())
    while cluster.num_returns < 300:
        await sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert cluster.most == {"prefill": 2, "decode": 1}
    assert {name.partition(" ")[2] for name in faults.done} == set(Fault)
    assert faults.slowest_return_s == 1.5
    assert cluster.num_proxy_deaths == 0


async def test_the_proxy_is_killed_at_seeded_moments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens to engines is the same whether or not the proxy is killed as well."""
    sleep = asyncio.sleep
    moments: list[list[float]] = []
    for every_s in (20.0, 20.0, 0.0):
        pauses: list[float] = []

        async def skip(seconds: float, told: list[float] = pauses) -> None:
            told.append(seconds)
            await sleep(0)

        monkeypatch.setattr("scripts.dev.soak.faults.asyncio.sleep", skip)
        cluster = QuietCluster()
        faults = Faults(cast(SoakCluster, cluster), seed=1, kill_proxy_every_s=every_s)
        running = asyncio.create_task(faults.run())
        while cluster.num_returns < 100:
            await sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert faults.done["proxy killed"] == cluster.num_proxy_deaths
        moments.append([seconds for seconds in pauses if seconds > 9.9])
    assert moments[0] == moments[1]
    assert len(moments[0]) > 5
    assert all(10.0 <= seconds <= 30.0 for seconds in moments[0])
    assert moments[2] == []


def findings() -> Findings:
    options = SoakOptions(duration_s=60, seed=1, num_prefillers=1, num_decoders=1, num_clients=1)
    found = Findings(options, leaks=LeakCheck(), num_unserved=0, witness=Witness(PLAN, Outages()))
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
        ("wrong_answers", lambda found: found.counters.count(Verdict.WRONG)),
        ("hung", lambda found: found.counters.count(Verdict.HUNG)),
        ("held_at_end", lambda found: setattr(found.leaks, "num_held", 1)),
        ("leaked_pages", lambda found: setattr(found.leaks, "num_leaked", 1)),
        (
            "reservations_waited",
            lambda found: found.witness.note("decode-0", {"epoch": "e", "num_reservations_waited": 1}),
        ),
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


def test_who_waited_soon_after_the_proxy_was_killed_is_counted_by_himself() -> None:
    outages = Outages()
    witness = Witness(PLAN, outages)
    buffer = {"epoch": "e1", "num_reservations_waited": 1}
    witness.note("decode-0", buffer)
    outages.begin()
    witness.note("decode-0", buffer | {"num_reservations_waited": 4})
    assert (witness.num_waited, witness.num_after_kill) == (1, 3)


def test_who_ended_itself_because_it_overslept_has_not_crashed() -> None:
    cluster = SoakCluster(cast(Any, None), cast(Any, None))
    ended = {"prefill-0": 75, "decode-0": 1, "decode-1": None}
    cluster._running = cast(Any, {name: SimpleNamespace(status=status, tail=[]) for name, status in ended.items()})
    assert cluster.has_overslept("prefill-0")
    assert not cluster.has_overslept("prefill-0"), "once"
    cluster.note_crashes()
    assert (cluster.num_overslept, [words.partition(" ")[0] for words in cluster.crashes]) == (1, ["decode-0"])
