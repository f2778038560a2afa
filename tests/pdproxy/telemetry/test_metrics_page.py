"""``docs/metrics.md`` and the program agree: every metric, label, status member and phase, in both directions."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from pdproxy.admission.admission import AdmissionStatistics
from pdproxy.kv_signals.board import BoardStatistics
from pdproxy.telemetry.attempt_record import AttemptRecord, Phase
from pdproxy.telemetry.attempt_record import Path as Way
from pdproxy.telemetry.record import Outcome, RequestRecord
from tests.fakes.fail_once import fail_once
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fleet import Clock
from tests.fakes.proxy_harness import Harness, proxy_in_front_of

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(pdproxy_\w+)` \| (\w+) \| ([^|]*)\|", re.MULTILINE)


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels by name."""
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(PAGE)}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}")[1].split("\n## ")[0]


def exposed(page: str) -> dict[str, tuple[str, frozenset[str]]]:
    """The same of a metrics page; `_created` times and the process's own metrics left out."""
    kinds = {
        name: kind
        for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE)
        if name.startswith("pdproxy_") and not name.endswith("_created")
    }
    labels: dict[str, set[str]] = {}
    for sample, text in re.findall(r"^(pdproxy_\w+?)(?:\{(.*)\})? \S+$", page, re.MULTILINE):
        family = sample if sample in kinds else re.sub(r"_(bucket|sum|count)$", "", sample)
        labels.setdefault(family, set()).update(re.findall(r'(\w+)="', text))
    return {name: (kind, frozenset(labels[name] - {"le"})) for name, kind in kinds.items()}


async def exercise(house: Harness, headers: dict[str, str] | None = None) -> None:
    """One of everything that makes a metric appear."""
    await house.post(headers=headers)
    await house.post(headers=headers, n=2)
    await house.post(headers=headers, max_tokens=1)
    await house.post(headers=headers, prompt=3)
    fail_once(house.prefiller, "prefill")
    await house.post(headers=headers)
    await house.post(headers=headers, stream=True)
    await house.call_raw("/tokenize", b'{"prompt": "a b"}', headers).answer()


async def test_metrics_are_those_in_the_document(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key name=shop rpm=6\n")
    decoder = FakeEngine("decode")
    decoder.kv_events = "tcp://127.0.0.1:1", "tcp://127.0.0.1:1"  # where nobody is
    async with proxy_in_front_of([], [decoder], api_keys_file=keys, path_by_load=True) as house:
        house.decoder.num_cache_pages = 64
        await house.proxy.probe.look(house.proxy.pool.of_role("decode")[0])
        await exercise(house, {"x-api-key": "key"})
        assert (await house.post(headers={"x-api-key": "key"})).status == 429
        page = (await house.get("/metrics")).body.decode()
    elsewhere = {"pdproxy_replica_leads", "pdproxy_store_silent_seconds"}  # those of a replica, which has a store
    assert exposed(page) == {name: told for name, told in documented().items() if name not in elsewhere}
    assert len(documented()) > 30
    assert "process_resident_memory_bytes" in page


def finished(*, stream: bool, num_failed: int = 0, is_continued: bool = False) -> RequestRecord:
    """A request of 1 s before its first attempt, 2 s in line, 3 s until the first byte and 4 s of answer."""
    clock = Clock()
    record = RequestRecord("r", "/v1/completions", clock=clock)
    record.stream = stream
    clock.now += 1.0
    for number in range(num_failed + 1):
        record.attempt = attempt = AttemptRecord("r", path=Way.LOCAL, clock=clock)
        clock.now += 2.0
        attempt.advance(Phase.DECODE)
        if number < num_failed:
            if is_continued:
                clock.now += 3.0
                attempt.mark_first_byte()
            attempt.advance(Phase.FAILED)
    clock.now += 3.0
    attempt.mark_first_byte()
    clock.now += 4.0
    attempt.advance(Phase.DONE)
    record.end(Outcome.DONE)
    return record


async def test_the_time_to_first_token_is_the_clients() -> None:
    async with proxy_in_front_of() as house:
        tell = house.proxy.orchestrator._observer.request_finished
        tell(finished(stream=True))
        tell(finished(stream=True, num_failed=2))
        tell(finished(stream=True, num_failed=1, is_continued=True))
        tell(finished(stream=False))
        page = (await house.get("/metrics")).body.decode()
    assert 'pdproxy_first_token_seconds_count{path="local"} 3.0' in page
    assert 'pdproxy_first_token_seconds_sum{path="local"} 22.0' in page, "1 + 2 + 3, 1 + 3 * 2 + 3, 1 + 2 + 3"


async def test_phases_are_those_in_the_document() -> None:
    [row] = [line for line in PAGE.splitlines() if line.startswith("| `phase` |")]
    async with proxy_in_front_of() as house:
        await exercise(house)
        page = (await house.get("/metrics")).body.decode()
    assert set(re.findall(r"`(\w+)`", row)) - {"phase"} == set(re.findall(r'phase="(\w+)"', page))


async def test_phases_of_every_attempt_are_counted() -> None:
    async with proxy_in_front_of() as house:
        fail_once(house.prefiller, "prefill")
        assert (await house.post()).status == 200
        page = (await house.get("/metrics")).body.decode()
        assert 'pdproxy_phase_seconds_count{phase="prefill"} 2.0' in page
        assert 'pdproxy_phase_seconds_count{phase="decode"} 1.0' in page
        assert 'pdproxy_phase_seconds_count{phase="receive"} 1.0' in page
        assert "pdproxy_retries_total 1.0" in page


async def test_what_went_wrong_and_what_is_under_way() -> None:
    async with proxy_in_front_of() as house:
        await house.post(prompt=3)
        await house.post(model="other")
        house.prefiller.hang_at.add("prefill")
        call = house.call()
        await house.prefiller.reached("prefill")
        page = (await house.get("/metrics")).body.decode()
        assert 'pdproxy_errors_total{code="model_not_found"} 1.0' in page
        assert "pdproxy_requests_in_flight 1.0" in page
        assert 'pdproxy_instance_legs{instance="prefill-0",role="prefill"} 1.0' in page
        call.leave()
        await call.done()
        await house.settled()
        page = (await house.get("/metrics")).body.decode()
        assert "pdproxy_requests_in_flight 0.0" in page
        assert 'pdproxy_reaper_attempts_total{outcome="adopted"} 1.0' in page
        assert "pdproxy_reaper_open 0.0" in page


async def test_kv_is_counted() -> None:
    async with proxy_in_front_of() as house:
        await house.post(prompt=[1] * 40)
        page = (await house.get("/metrics")).body.decode()
        assert "pdproxy_kv_pages_total 3.0" in page
        assert "pdproxy_kv_bytes_total 3072.0" in page
        assert "pdproxy_kv_transfer_seconds_count 1.0" in page
        assert 'pdproxy_prompt_tokens_total{path="disaggregated"} 40.0' in page


async def test_status_has_the_members_in_the_document() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", section("Status page").split("| `admission.*`")[0], re.MULTILINE)
    members = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=8)]) as house:
        await exercise(house)
        status = (await house.get("/status")).json()
    assert status.keys() == members
    assert set(status["reaper"]) == {"open", "adopted", "told", "freed", "dropped", "expired", "void"}
    assert set(status["admission"]) == set(status["ledger"]) == {"decode-0"}
    assert set(status["admission"]["decode-0"]) == {field.name for field in fields(AdmissionStatistics)}
    assert set(status["board"]) == {field.name for field in fields(BoardStatistics)}
    promised = {"name", "role", "url", "engine", "state", "why", "epoch", "models", "legs"}
    assert all(promised <= set(instance) for instance in status["fleet"])
    assert all(name in section("Status page") for name in promised)


def test_statistics_are_those_in_the_document() -> None:
    rows = section("Status page").split("| `admission.*`")[1]
    for names, column in ((fields(AdmissionStatistics), 1), (fields(BoardStatistics), 2)):
        cells = [line.split("|")[column] for line in rows.splitlines()[2:] if line.startswith("|")]
        assert set(re.findall(r"`(\w+)`", " ".join(cells))) == {field.name for field in names}
