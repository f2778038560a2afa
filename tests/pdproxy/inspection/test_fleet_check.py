"""What a check finds wrong with a fleet, and that it leaves nothing there and ends, whatever an engine does."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.engines.http.base import EngineUnreachable
from pdproxy.errors import ConfigError
from pdproxy.inspection import fleet_check
from pdproxy.inspection.findings import Report
from pdproxy.inspection.fleet_check import FleetCheck
from pdproxy.inspection.pairs import choose_pairs
from tests.fakes.fake_engine import FakeClient, FakeEngine, FakeReply, error_reply, json_reply
from tests.fakes.raw_peer import Wire, raw_peer
from transfer.trust import NOT_SIGNED

QUICK = {"probe_timeout_s": 0.3, "canary_timeout_s": 1.0, "connect_timeout_s": 0.3}


class Fleet:
    """Scripted engines, and a check of them."""

    def __init__(self, engines: Sequence[FakeEngine], tables: dict[str, dict[str, Any]] | None = None) -> None:
        numbers = {"prefill": 0, "decode": 0}
        self.clients: dict[str, FakeClient] = {}
        instances = []
        for engine in engines:
            number = numbers[engine.role]
            numbers[engine.role] += 1
            engine.epoch += f"-{number}"
            engine.port = 7300 + number
            engine.decoders = [one for one in engines if one.role == "decode"]
            engine.prefillers = [one for one in engines if one.role == "prefill"]
            name, url = f"{engine.role}-{number}", f"http://{engine.role}{number}:1"
            self.clients[url] = FakeClient(engine)
            table = {"name": name, "role": engine.role, "url": url, "engine": "builtin"}
            instances.append(InstanceSettings(**(table | (tables or {}).get(name, {}))))
        self.engines = engines
        self.instances = tuple(instances)

    async def checked(self, *, stop: Callable[[FleetCheck], object] = lambda check: None, **options: Any) -> Report:
        given = {name: options.pop(name) for name in ("max_pairs", "limit_s") if name in options}
        settings = Settings(**({"instances": self.instances} | QUICK | options))
        report = Report("test")
        check = FleetCheck(settings, report, make_client=lambda one: self.clients[one.url], **given)
        for engine in self.engines:
            engine.sink = check.proxy.board.deliver
        stop(check)
        before = asyncio.all_tasks()
        await check.run()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        check.proxy.check_integrity()
        return report


def one_pair() -> list[FakeEngine]:
    return [FakeEngine("prefill"), FakeEngine("decode")]


def problems(report: Report) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.problem, one.instances) for one in report.findings]


async def test_a_fleet_that_works() -> None:
    engines = [FakeEngine("prefill"), FakeEngine("prefill"), FakeEngine("decode"), FakeEngine("decode")]
    report = await Fleet(engines).checked()
    assert report.findings == []
    assert report.is_good
    assert sorted((pair.prefiller, pair.decoder) for pair in report.pairs) == [
        (f"prefill-{i}", f"decode-{j}") for i in (0, 1) for j in (0, 1)
    ]
    assert [(one.answers, one.num_pairs, one.num_good_pairs) for one in report.instances] == [(True, 2, 2)] * 4
    assert all(not engine.pages for engine in engines)


async def test_many_pairs_have_each_instance_once() -> None:
    engines = [FakeEngine("prefill") for _ in range(3)] + [FakeEngine("decode") for _ in range(2)]
    report = await Fleet(engines).checked(max_pairs=5)
    assert len(report.pairs) == 3
    assert all(one.num_good_pairs for one in report.instances)


@pytest.mark.parametrize(("num_prefillers", "num_decoders"), [(1, 1), (2, 7), (7, 2), (5, 5), (0, 3)])
def test_pairs_are_chosen(num_prefillers: int, num_decoders: int) -> None:
    prefillers, decoders = list(range(num_prefillers)), list(range(100, 100 + num_decoders))

    def fits(one: int, other: int) -> bool:
        return one != 0 or other == 100

    every = [(one, other) for one in prefillers for other in decoders if fits(one, other)]
    assert choose_pairs(prefillers, decoders, fits, len(every)) == every
    if len(every) > 1:
        few = choose_pairs(prefillers, decoders, fits, len(every) - 1)
        assert {one for one, _ in few} == {one for one, _ in every}
        assert {other for _, other in few} == {other for _, other in every}
        assert set(few) <= set(every)
        assert len(few) <= len(prefillers) + len(decoders)


async def test_nobody_listens() -> None:
    fleet = Fleet(one_pair())
    fleet.clients["http://decode0:1"].is_up = False
    report = await fleet.checked()
    assert ("unreachable", ("decode-0",)) in problems(report)
    assert ("model", ("prefill-0",)) in problems(report)  # nobody is left to decode for it
    assert not report.is_good
    assert report.pairs == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_frozen_engine_is_silent(role: str) -> None:
    engines = one_pair()
    fleet = Fleet(engines)
    frozen = engines[0] if role == "prefill" else engines[1]
    started = time.monotonic()
    with frozen.frozen():
        report = await fleet.checked()
    assert time.monotonic() - started < 5
    assert ("silent", (f"{role}-0",)) in problems(report)


async def test_wrong_role_and_wrong_model() -> None:
    engines = one_pair()
    engines[1].model = "other"
    report = await Fleet(engines, {"decode-0": {"model": "tiny"}}).checked()
    assert ("model", ("decode-0",)) in problems(report)
    engines = one_pair()
    fleet = Fleet(engines)
    engines[0].role = "decode"
    report = await fleet.checked()
    assert ("role", ("prefill-0",)) in problems(report)


async def test_unlike_pages_do_not_fit() -> None:
    report = await Fleet([FakeEngine("prefill", chunk_size=16), FakeEngine("decode", chunk_size=32)]).checked()
    assert [problem for problem, _ in problems(report)] == ["misfit", "misfit"]
    assert "chunk_size" in report.findings[0].why or "page" in report.findings[0].why
    assert report.pairs == []


async def test_a_key_is_missing() -> None:
    engines = one_pair()
    engines[0].fail_at["/kv_buffer"] = error_reply(401, "no")
    report = await Fleet(engines).checked()
    found = next(one for one in report.findings if one.instances == ("prefill-0",))
    assert found.problem == "key"
    assert "--engine-api-key" in found.what_to_do


async def test_another_kind_of_engine() -> None:
    engines = one_pair()
    engines[0].fail_at["/kv_buffer"] = error_reply(404, "no")
    engines[0].fail_at["/metrics"] = FakeReply(200, [b"vllm:num_requests_running 0\n"])
    engines[0].fail_at["/version"] = json_reply({"version": "0.32.0"})
    report = await Fleet(engines).checked()
    found = next(one for one in report.findings if one.instances == ("prefill-0",))
    assert found.problem == "unlike_its_kind"
    assert "vLLM 0.32.0" in found.why


async def test_a_url_with_v1() -> None:
    engines = one_pair()
    engines[0].fail_at["/kv_buffer"] = error_reply(404, "no")
    fleet = Fleet(engines, {"prefill-0": {"url": "http://prefill0:1/v1"}})
    fleet.clients["http://prefill0:1/v1"] = fleet.clients["http://prefill0:1"]
    report = await fleet.checked()
    found = next(one for one in report.findings if one.problem == "unlike_its_kind")
    assert (
        found.what_to_do == "leave out /v1 at the end of `url`: the proxy adds it itself, and /health is not below it"
    )


@pytest.mark.parametrize("signals", ["failed", "lost"])
async def test_kv_does_not_arrive(signals: str) -> None:
    engines = one_pair()
    engines[1].signals = signals
    report = await Fleet(engines).checked()
    assert problems(report) == [("kv_lost", ("prefill-0", "decode-0"))]
    assert "127.0.0.1:7300" in report.findings[0].what_to_do
    assert not engines[1].pages, "the check has left pages at the decoder"


@pytest.mark.parametrize(("key", "words"), [(None, "this check has none"), ("0f" * 32, "this check has another one")])
async def test_decoders_with_a_key_are_told_once_each(key: str | None, words: str) -> None:
    """A check without the fleet's key can try nothing, and says that, and not that KV is lost."""
    engines = [FakeEngine("prefill"), FakeEngine("prefill"), FakeEngine("decode"), FakeEngine("decode")]
    for engine in engines:
        engine.takes_kv, engine.refuses_kv = False, NOT_SIGNED
    report = await Fleet(engines).checked(attempt_key=key)
    assert sorted(problems(report)) == [("key", ("decode-0",)), ("key", ("decode-1",))]
    assert words in report.findings[0].why
    assert "--attempt-key-file" in report.findings[0].what_to_do


@pytest.mark.parametrize("point", ["prefill", "prefill_done", "decode", "first"])
async def test_an_engine_that_stops_half_way_is_named_and_keeps_nothing(point: str) -> None:
    engines = one_pair()
    for engine in engines:
        engine.hang_at.add(point)
    started = time.monotonic()
    report = await Fleet(engines).checked()
    assert time.monotonic() - started < 8
    assert {problem for problem, _ in problems(report)} == {"silent"}
    assert not report.is_good
    assert not engines[1].pages


async def test_pages_that_do_not_come_back_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_check, "SETTLE_S", 0.3)
    engines = one_pair()
    engines[1].signals, engines[1].answers_cancel = "lost", False
    report = await Fleet(engines).checked()
    assert ("pages_left", ("decode-0",)) in problems(report)


async def test_engines_that_refuse_say_why() -> None:
    engines = one_pair()
    engines[0].fail_at["prefill"] = error_reply(400, "no such thing as max_tokens")
    report = await Fleet(engines).checked()
    assert problems(report) == [("engine_refused", ("prefill-0", "decode-0"))]
    assert "no such thing" in report.findings[0].why


async def test_tokenizers_that_disagree() -> None:
    class Other:
        def ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [7] * len(text)

    engines = one_pair()
    engines[1].tokenizer = Other()
    report = await Fleet(engines).checked()
    assert problems(report) == [("tokenizer", ("prefill-0", "decode-0"))]
    assert [pair.is_good for pair in report.pairs] == [True]


async def test_the_time_limit_ends_it() -> None:
    engines = one_pair()
    engines[0].hang_at.add("prefill")
    started = time.monotonic()
    report = await Fleet(engines).checked(limit_s=0.3, canary_timeout_s=60.0)
    assert time.monotonic() - started < 5
    assert problems(report) == [("not_tried", ())]
    assert not engines[1].pages


async def test_it_can_be_stopped_and_settles() -> None:
    engines = one_pair()
    engines[0].hang_at.add("prefill_done")
    fleet = Fleet(engines)
    tasks = []

    def stop(check: FleetCheck) -> None:
        async def when_there() -> None:
            await engines[0].reached("prefill_done")
            check.stop()

        tasks.append(asyncio.create_task(when_there()))

    report = await _stopped(fleet, stop)
    await asyncio.gather(*tasks)
    assert problems(report) == [("not_tried", ())]
    assert "stopped" in report.findings[0].why
    assert not engines[1].pages


async def _stopped(fleet: Fleet, stop: Callable[[FleetCheck], object]) -> Report:
    report = Report("test")
    settings = Settings(instances=fleet.instances, probe_timeout_s=0.3, canary_timeout_s=60.0)
    check = FleetCheck(settings, report, make_client=lambda one: fleet.clients[one.url])
    for engine in fleet.engines:
        engine.sink = check.proxy.board.deliver
    stop(check)
    await check.run()
    return report


async def test_tls_is_told_from_other_silence() -> None:
    fleet = Fleet(one_pair())

    class Untrusted(FakeClient):
        async def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
            raise EngineUnreachable("certificate") from ssl.SSLCertVerificationError("certificate has expired")

    fleet.clients["http://decode0:1"] = Untrusted(fleet.engines[1])
    assert ("tls", ("decode-0",)) in problems(await fleet.checked())


async def test_bytes_that_come_one_by_one_for_ever() -> None:
    async def drip(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while True:
            await wire.send(b" ")
            await asyncio.sleep(0.02)

    async with raw_peer(drip) as prefiller, raw_peer(drip) as decoder:
        urls = [f"http://127.0.0.1:{peer.port}" for peer in (prefiller, decoder)]
        settings = Settings(prefill=(urls[0],), decode=(urls[1],), **QUICK)  # type: ignore[arg-type]
        report = Report("test")
        started = time.monotonic()
        await FleetCheck(settings, report).run()
        assert time.monotonic() - started < 5
        assert {problem for problem, _ in problems(report)} == {"silent"}


def test_a_configuration_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="no decode instance"):
        FleetCheck(Settings(prefill=("http://p:1",)), Report("test"))
