"""The parts of the soak of several replicas: relays that fail, faults that are drawn, and what is judged wrong."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("nixl", reason="the soak needs engines (extra: engine)")

from pdproxy.launch.ports import HOST, free_ports
from pdproxy.loadtest.stopping import beside
from scripts.dev.common.store_servers import StoreKind
from scripts.dev.soak import clients as clients_module
from scripts.dev.soak import witness
from scripts.dev.soak.clients import Clients
from scripts.dev.soak.command import app
from scripts.dev.soak.counters import Counters
from scripts.dev.soak.outages import Excuses, Outages
from scripts.dev.soak.partition import Partition, Rule, Trouble
from scripts.dev.soak.plan import REQUEST_TIMEOUT_S, make_plan
from scripts.dev.soak.questions import COMPLETIONS, Answer, Question
from scripts.dev.soak.replica_cluster import ReplicaCluster
from scripts.dev.soak.replica_faults import ReplicaFault, ReplicaFaults, StoreFault, WayFault
from scripts.dev.soak.replica_plan import FleetPlan, make_fleet_plan, replica_program, store_program
from scripts.dev.soak.reply import Reply, Said
from scripts.dev.soak.report import is_clean, make_report, problems
from scripts.dev.soak.run import Findings, ReplicaFindings, SoakOptions
from scripts.dev.soak.verdict import Verdict, ran_out_of_time, what_is_wrong_with_an_error

ENGINES = make_plan(Path("model"), num_prefillers=1, num_decoders=1, seed=1, page_bytes=1)
QUESTION = Question(COMPLETIONS, {"prompt": [1], "max_tokens": 1}, Answer(Said("a", ["a"], "length"), 1, 1))


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetPlan:
    monkeypatch.setenv("PDPROXY_REDIS_SERVER", "/somewhere/redis-server")
    return make_fleet_plan(ENGINES, num_replicas=3, store=StoreKind.REDIS, seed=1, work_dir=tmp_path)


# ── the plan ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_replica_reaches_the_store_and_is_reached_through_relays_of_its_own(plan: FleetPlan) -> None:
    ports: Counter[str] = Counter()
    for one in plan.replicas:
        command = replica_program(plan, one).command
        told = dict(pairwise(command))
        assert told["--coordinator"] == f"redis://{HOST}:{one.store_port}"
        assert told["--replica-port"] == str(one.link_port)
        assert told["--replica-advertise"] == f"{HOST}:{one.advertised_port}"
        ports.update([told["--coordinator"], told["--replica-port"], told["--replica-advertise"], told["--port"]])
    assert ports.total() == len(ports) == 12
    assert str(plan.store_ports[0]) in store_program(plan).command


# ── relays ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Partition, int]]:
    """A relay in front of an echo, and its port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, HOST, 0) as server:
        [port] = free_ports(1, random.Random())
        async with Partition(port, server.sockets[0].getsockname()[1]) as relay:
            yield relay, port


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def said_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes | None:
    """What comes back within a moment; None: nothing, not even an end."""
    writer.write(data)
    try:
        async with asyncio.timeout(0.1):
            return await reader.read(100)
    except TimeoutError:
        return None
    except ConnectionError:
        return b""


@pytest.mark.parametrize("trouble", [one for one in Trouble if one is not Trouble.CUT])
async def test_a_silence_keeps_connections_and_loses_nothing(trouble: Trouble) -> None:
    async with relayed() as (relay, port), connected(port) as first, connected(port) as second:
        assert await said_back(*first, b"one") == b"one"
        await relay.begin(Rule(trouble, b""))
        assert await said_back(*first, b"two") is None
        assert await said_back(*second, b"three") is None
        await relay.end(Rule(trouble, b""))
        assert [await first[0].read(100), await second[0].read(100)] == [b"two", b"three"]


async def test_a_cut_ends_connections_and_refuses_others_until_it_is_mended() -> None:
    async with relayed() as (relay, port):
        async with connected(port) as first:
            assert await said_back(*first, b"one") == b"one"
            await relay.begin(Rule(Trouble.CUT, b""))
            assert await said_back(*first, b"two") == b""
        async with connected(port) as second:
            assert await said_back(*second, b"three") == b""
        await relay.end(Rule(Trouble.CUT, b""))
        async with connected(port) as third:
            assert await said_back(*third, b"four") == b"four"


@pytest.mark.parametrize("trouble", [Trouble.CUT, Trouble.SILENT])
async def test_a_trouble_may_be_for_those_with_a_word_in_their_first_bytes(trouble: Trouble) -> None:
    async with relayed() as (relay, port), connected(port) as lost, connected(port) as other:
        assert await said_back(*lost, b"I am one-1") == b"I am one-1"
        assert await said_back(*other, b"I am two-2") == b"I am two-2"
        await relay.begin(Rule(trouble, b"one-1"))
        assert not await said_back(*lost, b"again")
        assert await said_back(*other, b"again") == b"again"
        async with connected(port) as late:
            assert not await said_back(*late, b"I am one-1 too")


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class QuietReplicas:
    """Three replicas of which the first leads; faults take no time."""

    def __init__(self) -> None:
        names = ["proxy-0", "proxy-1", "proxy-2"]
        self.lost = {name: Outages() for name in names}
        self.unwell = {name: Outages() for name in names}
        self.links = {name: FakeRelay() for name in names}
        self.stores = {name: FakeRelay() for name in names}
        self.num_killed = dict.fromkeys(names, 0)
        self.killed: Counter[str] = Counter()
        self.thawed = self.frozen = 0
        self.forgot: Counter[bool] = Counter()

    async def leader(self) -> str | None:
        return "proxy-0"

    def pid(self, name: str) -> int:
        return 1 << 30  # nobody's

    def fronts(self, name: str) -> list[int]:
        return [self.pid(name)]

    tree = fronts

    def member(self, name: str) -> bytes:
        return name.encode()

    async def until_well(self, name: str, was: int | None = None) -> float:
        assert self.unwell[name].is_down
        return 0.0

    def kill(self, name: str) -> None:
        assert name == "store" or self.lost[name].is_down, "clients may lose connections from before it is killed"
        self.killed[name] += 1

    async def restart_replica(self, name: str) -> None:
        """It is back."""

    def freeze(self, name: str) -> None:
        self.frozen += 1

    def thaw(self, name: str) -> None:
        self.thawed += 1

    async def start_store(self, *, forget: bool = False) -> None:
        self.forgot[forget] += 1


class FakeRelay:
    def __init__(self) -> None:
        self.rules: set[Rule] = set()
        self.seen: Counter[Rule] = Counter()

    async def begin(self, rule: Rule) -> None:
        self.rules.add(rule)
        self.seen[rule] += 1

    async def end(self, rule: Rule) -> None:
        self.rules.discard(rule)


async def storm(monkeypatch: pytest.MonkeyPatch, seed: int, num_faults: int) -> tuple[QuietReplicas, ReplicaFaults]:
    sleep = asyncio.sleep
    monkeypatch.setattr("scripts.dev.soak.replica_faults.asyncio.sleep", lambda seconds: sleep(0))
    cluster = QuietReplicas()
    faults = ReplicaFaults(cast(ReplicaCluster, cluster), seed)
    running = asyncio.create_task(faults.run())
    while faults.done.total() < num_faults and not running.done():
        await sleep(0)
    running.cancel()
    [ended] = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError), ended
    return cluster, faults


async def test_every_fault_is_done_to_the_leader_and_to_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, faults = await storm(monkeypatch, 1, 1500)
    for fault in ReplicaFault:
        assert faults.done[f"{fault}, the leader's"] > 5
        assert faults.done[f"{fault}, a follower's"] > 5
    assert all(faults.done[fault] > 5 for fault in StoreFault)
    assert cluster.forgot[True] > 5
    assert cluster.forgot[False] > 5
    for trouble in Trouble:
        assert faults.done[f"{WayFault.STORE}, the leader's, {trouble}"] > 5
        assert faults.done[f"{WayFault.LEADER}, a follower's, {trouble}"] > 5
        assert cluster.links["proxy-0"].seen[Rule(trouble, b"")] > 5
        assert cluster.links["proxy-0"].seen[Rule(trouble, b"proxy-1")] > 5
    assert not any(relay.seen for name, relay in cluster.links.items() if name != "proxy-0")


async def test_the_same_seed_does_the_same_to_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = [(await storm(monkeypatch, seed, 100))[1].done for seed in (1, 1, 2)]
    assert first == second != other


# ── verdicts ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "retry_after", "took_s", "wrong"),
    [
        (503, "1", 3.0, ""),
        (429, "1", 3.0, ""),
        (503, None, 3.0, "without Retry-After"),
        (503, "1", 9.0, "only after 9.0 s"),
        (502, "1", 3.0, "neither an engine"),
        (200, None, 3.0, "neither an engine"),
    ],
)
def test_an_error_without_an_excuse(status: int, retry_after: str | None, took_s: float, wrong: str) -> None:
    reply = Reply(status, retry_after=retry_after, error={"code": "c"})
    told = what_is_wrong_with_an_error(reply, took_s, limit_s=8.0)
    assert wrong in told
    assert bool(wrong) == bool(told)


ILL, SLOW = 0, 1
TOO_LONG = f"the request took longer than {REQUEST_TIMEOUT_S:g} s"


@pytest.mark.parametrize(
    ("message", "outage", "verdict"),
    [
        ("m", None, Verdict.WRONG),
        ("m", ILL, Verdict.TYPED_ERROR),
        ("m", SLOW, Verdict.WRONG),
        (TOO_LONG, None, Verdict.WRONG),
        (TOO_LONG, ILL, Verdict.TYPED_ERROR),
        (TOO_LONG, SLOW, Verdict.TYPED_ERROR),
    ],
)
async def test_an_error_is_wrong_unless_something_was_killed_or_frozen_or_too_slow_to_be_in_time(
    message: str, outage: int | None, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    outages, counters = (Outages(), Outages()), Counters()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if outage is not None:
            outages[outage].begin()
            outages[outage].end()
        body = json.dumps({"error": {"message": message, "type": "t", "code": "c"}}).encode()
        writer.write(b"HTTP/1.1 503 No\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    monkeypatch.setattr(clients_module, "ran_out_of_time", lambda reply, _: ran_out_of_time(reply, REQUEST_TIMEOUT_S))
    async with await asyncio.start_server(refuse, HOST, 0) as server:
        url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
        excuses, slow = Excuses(outages[ILL]), Excuses(outages[SLOW])
        clients = Clients(url, [QUESTION], 1, 1, counters, Outages(), excuses=excuses, slow=slow)
        await clients.everything_once()
        await clients.send_home()
    assert counters.verdicts == {verdict: 1}
    assert counters.num_too_slow == ((message, outage) == (TOO_LONG, SLOW))


@pytest.mark.parametrize(
    ("message", "took_s", "ran_out"), [(TOO_LONG, 15.1, True), (TOO_LONG, 3.0, False), ("no KV in 2.5 s", 15.1, False)]
)
def test_a_request_ran_out_of_time_when_it_had_all_of_it(message: str, took_s: float, ran_out: bool) -> None:
    assert ran_out_of_time(Reply(504, error={"message": message}), took_s) is ran_out


def test_an_outage_that_had_begun_before_a_request_is_an_excuse_also_when_it_is_over() -> None:
    outage = Outages()
    outage.begin()
    excuses = Excuses(outage)
    mark = excuses.mark()
    outage.end()
    assert excuses.hold(mark)
    assert not excuses.hold(excuses.mark())


async def test_the_pace_tells_when_a_decoder_is_too_slow_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "SLOW_S", 0.1)
    monkeypatch.setattr(witness, "LOOK_INTERVAL_S", 0.01)
    answers, served = asyncio.Event(), asyncio.Lock()
    answers.set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with served:
            await reader.readuntil(b"\r\n\r\n")
            await answers.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async with await asyncio.start_server(serve, HOST, 0) as server:
        decoder = replace(ENGINES.engines[-1], port=server.sockets[0].getsockname()[1])
        pace = witness.Pace(replace(ENGINES, engines=(decoder,)))
        [outage] = pace.outages
        async with beside(pace.run()), asyncio.timeout(5):
            await asyncio.sleep(0.1)
            assert outage.num_begun == 0
            answers.clear()
            while not outage.is_down:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            answers.set()
            while outage.is_down:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with served:
            assert outage.num_begun == 1


async def test_a_client_that_hears_nothing_counts_as_hung() -> None:
    counters = Counters()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, HOST, 0) as server:
        url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
        clients = Clients(url, [QUESTION], 1, 1, counters, Outages(), limit_s=0.1)
        async with asyncio.timeout(2):
            await clients.everything_once()
        await clients.send_home()
    assert counters.verdicts == {Verdict.HUNG: 1}


def replicas_found(**found: Any) -> Findings:
    options = SoakOptions(duration_s=60, seed=1, num_prefillers=1, num_decoders=1, num_clients=1)
    told = replace(ReplicaFindings(3, StoreKind.REDIS, disagreements=[], left_behind=[]), **found)
    return Findings(options, told)


def test_a_clean_report_of_replicas() -> None:
    report = make_report(replicas_found(), is_complete=True)
    assert is_clean(report)
    assert (report["proxies"], report["store"]) == (3, "redis")


@pytest.mark.parametrize("name", ["disagreements", "left_behind", "alarms"])
def test_what_spoils_a_report_of_replicas(name: str) -> None:
    report = make_report(replicas_found(**{name: ["this is wrong"]}), is_complete=True)
    assert not is_clean(report)
    assert problems(report) == ["this is wrong"]


@pytest.mark.parametrize(("num_too_slow", "clean"), [(5, True), (6, False)])
def test_a_twentieth_of_all_requests_may_run_out_of_time_at_slow_engines(num_too_slow: int, clean: bool) -> None:
    findings = replicas_found()
    findings.counters.verdicts[Verdict.TYPED_ERROR] = 100
    findings.counters.num_too_slow = num_too_slow
    report = make_report(findings, is_complete=True)
    assert report["too_slow_percent"] == num_too_slow
    assert is_clean(report) is clean


PAGE = {"replica": {"name": "here-1", "term": 7, "leads": True, "fronts": [{"pid": 10, "connected": True}]}}


@pytest.mark.parametrize(
    ("pages", "wrong"),
    [
        ([PAGE, PAGE], 0),
        ([PAGE, None], 1),
        ([None, None], 2),
        ([PAGE, {"replica": {**PAGE["replica"], "name": "here-2"}}], 1),
        ([PAGE, {"replica": {**PAGE["replica"], "term": 6}}], 1),
        ([{"replica": {**PAGE["replica"], "fronts": []}}] * 2, 1),
        ([{"replica": {**PAGE["replica"], "fronts": [{"pid": 10, "connected": False}]}}] * 2, 1),
    ],
)
async def test_replicas_that_do_not_agree(
    plan: FleetPlan, pages: list[Any], wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ReplicaCluster(cast(Any, None), replace(plan, replicas=plan.replicas[:2]))
    told = dict(zip(cluster.lost, pages, strict=True))

    async def status_of(replica: Any) -> Any:
        return told[replica.name]

    monkeypatch.setattr(cluster, "status_of", status_of)
    monkeypatch.setattr(cluster, "fronts", lambda name: [10] if name == "proxy-0" else [])
    assert len(await cluster.disagreements()) == wrong


def test_what_a_fleet_leaves_behind(plan: FleetPlan) -> None:
    cluster = ReplicaCluster(cast(Any, None), plan)
    for one in plan.replicas:
        plan.temporary(one).mkdir()
    assert cluster._left_behind() == []
    (plan.temporary(plan.replicas[1]) / "pdproxy-x").mkdir()
    assert "proxy-1 leaves ['pdproxy-x']" in cluster._left_behind()[0]
    cluster.num_killed["proxy-1"] = 1
    assert cluster._left_behind() == []


def test_a_store_is_for_several_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["--store", "etcd"])
    assert "--proxies" in capsys.readouterr().err
