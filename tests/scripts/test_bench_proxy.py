"""The proxy's benchmark: its sums, its helpers, whom it disqualifies, and that it runs and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import hypothesis
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from tokenizers import Tokenizer
from typer.testing import CliRunner

from pdproxy.compiled.build import BuildError
from pdproxy.config.settings import load
from pdproxy.launch.ports import free_ports
from scripts.dev.bench_proxy import command, native, targets, texts
from scripts.dev.bench_proxy.accounts import busy_s, cpu_s, rss_mb, sessions
from scripts.dev.bench_proxy.cores import Cores, on
from scripts.dev.bench_proxy.failover import HELD_UP_S, Asked
from scripts.dev.bench_proxy.failover import make_rows as failover_rows
from scripts.dev.bench_proxy.failover import make_table as failover_table
from scripts.dev.bench_proxy.goals import check_goals
from scripts.dev.bench_proxy.load import Reach, Told, clients_of
from scripts.dev.bench_proxy.machine import version_of_peer
from scripts.dev.bench_proxy.markdown import fill
from scripts.dev.bench_proxy.native import copy_of
from scripts.dev.bench_proxy.plan import BESIDE, CALM, FULL, LONG, QUICK, SOAK, Scenario, pick
from scripts.dev.bench_proxy.plot import plot
from scripts.dev.bench_proxy.report import Findings, make_report, merge
from scripts.dev.bench_proxy.run import Measured, in_turn, take_rounds
from scripts.dev.bench_proxy.samples import (
    FIGURES,
    Sample,
    added_of,
    least_disturbed,
    make_sample,
    median_of,
    percentile,
    ratio_of,
)
from scripts.dev.bench_proxy.targets import (
    DIRECT,
    FLOOR,
    INTERPRETED,
    OTHER_PYTHON,
    OURS,
    Place,
    choose,
    floor_of,
    pdproxy_line,
)
from scripts.dev.bench_proxy.words import goal_lines, make_lines, make_table, warnings
from scripts.dev.common.errors import BenchError
from scripts.dev.common.machine import cpu_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench_proxy.py"
PATIENCE_S = 20.0
STREAM = Scenario(name="stream", what="", clients=3, requests=6, tokens=5, is_stream=True)
SHORT = Scenario(name="short", what="", clients=2, requests=4)


# ── plans ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_full_plan_has_every_kind_of_load() -> None:
    by_name = {scenario.name: scenario for scenario in FULL}
    assert len(by_name) == len(FULL)
    assert set(by_name) == {
        *("short-1", "short-32", "short-chat-32", "stream-32", "staggered-64", "staggered-512", "staggered-256"),
        *("lockstep-64", "lockstep-512", "prompt-32k-1", "prompt-32k-4", "prompt-512k-1", "prompt-512k-4"),
        *("beside-none", "beside-128k"),
        *("held-1000", "held-5000", "queue-10000"),
    }
    assert by_name["staggered-256"].token_delay_s == 0.005
    assert by_name["lockstep-512"].is_lockstep
    assert by_name["prompt-512k-4"].prompt_bytes == 512 * 1024
    assert by_name["queue-10000"].slots == 64


def test_scenarios_are_picked_by_how_their_names_begin() -> None:
    found = [one.name for one in pick(FULL, ["short", "held-5"])]
    assert found == ["short-1", "short-32", "short-chat-32", "held-5000"]
    assert pick(QUICK, []) == QUICK
    with pytest.raises(ValueError, match="no scenario is called 'shorter'; there are short-1, "):
        pick(FULL, ["shorter"])


def test_what_takes_minutes_is_picked_by_its_whole_name_only() -> None:
    assert pick(FULL, [], LONG) == FULL
    assert pick(FULL, ["soak-1m"], LONG) == (SOAK,)
    with pytest.raises(ValueError, match=r"no scenario is called 'soak'; there are .*, soak-1m"):
        pick(FULL, ["soak"], LONG)


def test_what_big_prompts_do_is_seen_beside_the_same_load_without_them() -> None:
    assert replace(BESIDE, name=CALM.name, what=CALM.what, num_beside=0) == CALM


# ── sums ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_percentiles() -> None:
    hundred = list(range(1, 101))
    assert (percentile(hundred, 50), percentile(hundred, 99), percentile(hundred, 100)) == (50, 99, 100)
    assert (percentile([7], 50), percentile([7], 99), percentile([], 50)) == (7, 7, None)
    assert percentile([1, 2, 3], 50) == 2


def told(**fields: Any) -> Told:
    usual: dict[str, Any] = {
        "requests": 4,
        "beside": 0,
        "errors": 0,
        "complaint": "",
        "tokens": 8,
        "wall_ns": 2_000_000_000,
    }
    return Told(**usual | {"first_tokens": [30_000, 10_000, 20_000], "transits": [500, 100]} | fields)


def sample(
    elsewhere: float = 0.0, unproven: int = 0, cpu: float = 0.002, along: tuple[float, ...] = (), **fields: Any
) -> Sample:
    return make_sample(
        told(**fields),
        counts_tokens=True,
        cpu_s=cpu,
        rss_mb=50.0,
        rss_mb_along=along,
        proxy_share=0.5,
        engine_share=0.2,
        clients_share=0.1,
        elsewhere_cores=elsewhere,
        num_unproven=unproven,
    )


def test_a_sample_has_its_units() -> None:
    one = sample()
    assert one.cpu_ms_per_req == pytest.approx(0.5)
    assert one.cpu_us_per_token == pytest.approx(250)
    assert (one.ttft_p50_ms, one.ttft_p99_ms) == (2.0, 3.0)
    assert (one.transit_p50_us, one.transit_p99_us) == (10.0, 50.0)
    assert one.req_per_s == pytest.approx(2.0)


def test_what_was_refused_is_no_request_served() -> None:
    assert sample(errors=2).cpu_ms_per_req == pytest.approx(1.0)
    assert sample(errors=4).req_per_s == 0


def test_prompts_beside_are_requests_but_their_cost_is_no_tokens() -> None:
    one = sample(beside=4)
    assert one.cpu_ms_per_req == pytest.approx(0.25)
    assert one.cpu_us_per_token is None
    assert one.req_per_s == pytest.approx(2.0)


@hypothesis.settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_no_figure_of_a_sample_is_out_of_bounds(seed: int) -> None:
    note(f"seed {seed}")
    dice = random.Random(seed)
    num, beside = dice.randrange(50), dice.randrange(5)
    num_errors, wall_ns, cpu_s = dice.randint(0, num + beside), dice.randrange(1, 10**10), dice.uniform(0, 5)
    found = sample(
        cpu=cpu_s,
        requests=num,
        beside=beside,
        errors=num_errors,
        wall_ns=wall_ns,
        first_tokens=[dice.randrange(10**6) for _ in range(num)],
        transits=[dice.randrange(10**5) for _ in range(dice.randrange(100))],
    )
    assert found.cpu_ms_per_req * max(1, num + beside - num_errors) == pytest.approx(cpu_s * 1e3)
    assert 0 <= found.req_per_s * wall_ns <= num * 1e9 * (1 + 1e-9)
    for low, high in ((found.ttft_p50_ms, found.ttft_p99_ms), (found.transit_p50_us, found.transit_p99_us)):
        assert (low is None) == (high is None)
        assert low is None or high is None or 0 <= low <= high


def test_ratios_and_what_is_added_are_taken_round_by_round() -> None:
    # A slow machine in the second round: the ratio of medians would be 2/3.
    ours, theirs = [0.2, 0.6, 0.2], [0.1, 0.3, 0.15]
    rounds = [
        {"a": sample(cpu=mine, first_tokens=[20_000 + number]), "b": sample(cpu=other, first_tokens=[10_000])}
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True))
    ]
    assert ratio_of(rounds, "a", "b", "cpu_ms_per_req") == pytest.approx(2.0)
    assert median_of(rounds, "a", "cpu_ms_per_req") == pytest.approx(50.0)
    assert added_of(rounds, "a", "b", "ttft_p50_ms") == pytest.approx(1.0001)
    assert ratio_of([{"a": sample(), "b": sample(cpu=0.0)}], "a", "b", "cpu_ms_per_req") is None
    assert median_of([{"a": sample(transits=[])}], "a", "transit_p50_us") is None


def test_the_least_disturbed_rounds() -> None:
    rounds = [{"a": sample(0.5), "b": sample(0.0)}, {"a": sample(0.2), "b": sample(0.3)}, {"a": sample(0.9)}]
    assert least_disturbed(rounds, 2) == [rounds[1], rounds[0]]


# ── accounts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_the_cpu_of_a_process_is_that_of_all_its_threads() -> None:
    before, mine = cpu_s([os.getpid()]), time.process_time()
    thread = threading.Thread(target=burn, args=(0.05,))
    thread.start()
    burn(0.02)
    thread.join()
    used = cpu_s([os.getpid()]) - before
    assert used >= 0.07
    assert used == pytest.approx(time.process_time() - mine, abs=0.01)


def test_a_process_is_accounted_for_with_its_children() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        pids = sessions()[process.pid]
        assert len(pids) == 2
        assert process.pid in pids
        assert cpu_s(pids) > cpu_s([process.pid]) > 0
        assert rss_mb(pids) > rss_mb([process.pid]) > 1
    finally:
        process.communicate(b"\n")
    assert process.pid not in sessions()
    assert cpu_s([process.pid]) == rss_mb([process.pid]) == 0


def test_a_name_in_proc_may_be_anything(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "stat").write_text("12 (a) 1 (b 3) S 1 12 77 0 -1")
    (tmp_path / "13").mkdir()
    assert sessions(tmp_path) == {77: [12]}


def test_interrupts_are_not_somebody_elses_work() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    lines = [
        "cpu  9 9 9 9 9 9 9 9 9 9",
        *(f"cpu{core} {core}00 20 30 900 5 700 600 50 0 0" for core in range(3)),
        "intr 5",
    ]
    assert busy_s({1}, "\n".join(lines)) == 200 / ticks
    assert busy_s({1, 2}, "\n".join(lines)) == 500 / ticks
    assert busy_s(Cores.here().both) > 0


def test_what_is_started_on_a_core_stays_there() -> None:
    before = os.sched_getaffinity(0)
    cores = Cores.here()
    with on(cores.proxy):
        ask = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
        assert subprocess.run(ask, capture_output=True, text=True).stdout == f"{{{cores.proxy}}}\n"
    assert os.sched_getaffinity(0) == before
    assert (cores.proxy != cores.helpers) == (len(before) > 1)


# ── rounds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class ScriptedStage:
    """Implements what `take_rounds` needs of a `Stage`; samples by target, in their order."""

    def __init__(self, **samples: list[Sample | BenchError]) -> None:
        self.scenario = SHORT
        self.asked: list[str] = []
        self._samples = samples

    async def take(self, target: str) -> Sample:
        self.asked.append(target)
        found = self._samples[target].pop(0)
        if isinstance(found, BenchError):
            raise found
        return found


async def rounds_of(stage: Any, measured: Measured, rounds: int, spare: int) -> list[str]:
    lines: list[str] = []
    await take_rounds(stage, measured, rounds, spare, lines.append)
    return lines


def test_every_round_begins_with_another_target() -> None:
    assert [in_turn("abc", number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert in_turn([], 3) == []


async def test_targets_are_interleaved() -> None:
    stage = ScriptedStage(a=[sample()] * 3, b=[sample()] * 3)
    await rounds_of(stage, Measured(SHORT, ["a", "b"]), 3, 0)
    assert "".join(stage.asked) == "abbaab"


async def test_a_disturbed_round_is_thrown_away_whole() -> None:
    good, bad = sample(cpu=0.1), sample(elsewhere=0.5, cpu=9.0)
    measured = Measured(SHORT, ["a", "b"])
    await rounds_of(ScriptedStage(a=[good, bad, good], b=[good] * 3), measured, 2, 2)
    assert [each["a"] for each in measured.rounds] == [good, good]
    assert measured.disturbed == [{"a": bad, "b": good}]
    assert not measured.is_noisy


async def test_where_nothing_is_undisturbed_the_best_are_taken_and_marked() -> None:
    busy, busier = sample(elsewhere=0.5), sample(elsewhere=0.9)
    measured = Measured(SHORT, ["a"])
    await rounds_of(ScriptedStage(a=[busier, busy]), measured, 1, 1)
    assert [each["a"] for each in measured.rounds] == [busy]
    assert measured.is_noisy


async def test_a_target_that_fails_is_left_out_and_said() -> None:
    measured = Measured(SHORT, ["a", "b"])
    stage = ScriptedStage(a=[sample()] * 2, b=[sample(), BenchError("it died")])
    lines = await rounds_of(stage, measured, 2, 0)
    assert (measured.targets, measured.failures) == (["a"], {"b": "it died"})
    assert [set(each) for each in measured.rounds] == [{"a", "b"}, {"a"}]
    assert "short: without b: it died" in lines


# ── the engines: what a decode leg must carry ───────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def engine(**options: int) -> Iterator[Place]:
    port, metrics, prefill, decode = free_ports(4, random.Random())
    place = Place(port=port, metrics_port=metrics, prefill_port=prefill, decode_port=decode)
    words = {"prefill_port": prefill, "decode_port": decode} | options
    program = str(native.build("engine"))
    command_line = [program, *(f"{name}={value}" for name, value in words.items())]
    process = subprocess.Popen(command_line, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield place
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def place() -> Iterator[Place]:
    with engine() as place:
        yield place


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=PATIENCE_S) as client:
        yield client


BODY: dict[str, Any] = {"model": "bench", "prompt": "Hello.", "max_tokens": 3}


def handoff(http: httpx.Client, place: Place) -> Any:
    body = BODY | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    reply = http.post(f"{place.prefill_url}/v1/completions", json=body)
    assert "@" not in reply.text
    return reply.json()["kv_transfer_params"]


def carried(http: httpx.Client, place: Place) -> tuple[int, int, int]:
    legs = http.get(f"{place.prefill_url}/bench").json()
    return legs["handed"], legs["unhanded"], legs["forged"]


class TestEngine:
    def test_a_handoff_is_proven_by_what_was_given_out(self, http: httpx.Client, place: Place) -> None:
        params = handoff(http, place)
        # Other spaces, another order: the same.
        body = json.dumps(BODY | {"kv_transfer_params": dict(sorted(params.items()))}, indent=2)
        reply = http.post(f"{place.decode_url}/v1/completions", content=body)
        assert reply.json()["choices"][0]["text"].startswith("@")
        assert carried(http, place) == (1, 0, 0)

    @pytest.mark.parametrize("field", ["remote_block_ids", "remote_engine_id", "remote_port", "do_remote_prefill"])
    def test_a_handoff_that_was_changed_is_forged(self, http: httpx.Client, place: Place, field: str) -> None:
        params = handoff(http, place)
        del params[field]
        for changed in (params, params | {field: 7}):
            http.post(f"{place.decode_url}/v1/completions", json=BODY | {"kv_transfer_params": changed})
        assert carried(http, place) == (0, 0, 2)

    def test_a_handoff_is_good_for_once(self, http: httpx.Client, place: Place) -> None:
        body = BODY | {"kv_transfer_params": handoff(http, place)}
        for _ in range(2):
            http.post(f"{place.decode_url}/v1/completions", json=body)
        assert carried(http, place) == (1, 0, 1)

    def test_a_decode_leg_without_one(self, http: httpx.Client, place: Place) -> None:
        http.post(f"{place.decode_url}/v1/completions", json=BODY)
        assert carried(http, place) == (0, 1, 0)

    def test_a_room_takes_both_legs(self, http: httpx.Client, place: Place) -> None:
        body = BODY | {"bootstrap_room": 2**62, "stream": True}
        with http.stream("POST", f"{place.prefill_url}/v1/completions", json=body):
            pass
        reply = http.post(f"{place.decode_url}/v1/completions", json=body)
        assert reply.text.count("@") == 3
        assert carried(http, place) == (1, 0, 0)
        # A decode leg that nobody prefills for gets no token.
        with pytest.raises(httpx.ReadTimeout):
            http.post(f"{place.decode_url}/v1/completions", json=body | {"bootstrap_room": 5}, timeout=0.2)
        assert carried(http, place) == (1, 0, 0)

    def test_a_stream_has_its_tokens_their_times_and_its_end(self, http: httpx.Client) -> None:
        with engine(delay_us=2000) as place:
            body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
            body |= {"kv_transfer_params": handoff(http, place)}
            before = time.monotonic_ns()
            events = http.post(f"{place.decode_url}/v1/completions", json=body).text.split("\n\n")
            after = time.monotonic_ns()
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        choices = [chunk["choices"][0] for chunk in chunks[:3]]
        times = [int(choice["text"].removeprefix("@")) for choice in choices]
        assert before < times[0]
        assert times[1] - times[0] >= 2_000_000
        assert times[2] - times[0] >= 4_000_000
        assert times[2] < after
        assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
        assert chunks[3]["usage"]["total_tokens"] > 0
        assert events[-2:] == ["data: [DONE]", ""]

    def test_a_chat(self, http: httpx.Client, place: Place) -> None:
        body = {"model": "bench", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 3}
        asked = body | {"return_token_ids": True, "kv_transfer_params": {"do_remote_decode": True}}
        reply = http.post(f"{place.prefill_url}/v1/chat/completions", json=asked).json()
        assert reply["choices"][0]["message"]["content"]
        assert reply["prompt_token_ids"]
        body |= {"kv_transfer_params": reply["kv_transfer_params"]}
        answer = http.post(f"{place.decode_url}/v1/chat/completions", json=body).json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"]["content"].startswith("@")
        streamed = http.post(f"{place.decode_url}/v1/chat/completions", json=body | {"stream": True}).text
        chunks = [json.loads(event.removeprefix("data: ")) for event in streamed.split("\n\n")[:3]]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert all(chunk["choices"][0]["delta"]["content"].startswith("@") for chunk in chunks)
        assert carried(http, place) == (1, 0, 1)

    def test_a_prompts_ids_are_told_to_who_asks(self, http: httpx.Client) -> None:
        body = BODY | {"prompt": "x" * 4000, "return_token_ids": True, "kv_transfer_params": {"do_remote_decode": True}}
        for tells in (0, 1):
            with engine(ids=tells) as place:
                choice = http.post(f"{place.prefill_url}/v1/completions", json=body).json()["choices"][0]
            assert len(choice.get("prompt_token_ids", [])) == pytest.approx(1000 * tells, abs=100)

    def test_it_says_whose_kind_it_is(self, http: httpx.Client, place: Place) -> None:
        assert http.get(f"{place.prefill_url}/v1/models").json()["data"][0]["owned_by"] == "vllm"
        assert http.get(f"{place.prefill_url}/server_info").status_code == 404
        with engine(sglang=1) as other:
            assert http.get(f"{other.decode_url}/v1/models").json()["data"][0]["owned_by"] == "sglang"
            statuses = [http.get(f"{other.decode_url}/{path}").status_code for path in ("version", "server_info")]
        assert statuses == [404, 200]

    def test_no_other_model_is_served(self, http: httpx.Client, place: Place) -> None:
        reply = http.post(f"{place.decode_url}/v1/completions", json=BODY | {"model": "pdproxy-abandoned"})
        assert reply.status_code == 404
        assert carried(http, place) == (0, 0, 0)


# ── the clients ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def load_on(scenario: Scenario, reach: Reach) -> Told:
    async with clients_of(native.build("client"), scenario, reach, PATIENCE_S) as clients:
        await clients.until("ready")
        await clients.go_on()
        await clients.until("done")
        await clients.go_on()
        return await clients.tell()


class TestClients:
    @pytest.mark.parametrize("scenario", [SHORT, STREAM], ids=lambda scenario: scenario.name)
    async def test_without_a_proxy_they_do_both_legs(
        self, http: httpx.Client, place: Place, scenario: Scenario
    ) -> None:
        reach = Reach(port=place.prefill_port, decode_port=place.decode_port)
        said = await load_on(scenario, reach)
        assert (said.requests, said.errors, said.complaint) == (scenario.requests, 0, "")
        assert said.tokens == len(said.transits) == scenario.requests * (scenario.tokens if scenario.is_stream else 1)
        assert len(said.first_tokens) == scenario.requests
        assert all(0 < each < said.wall_ns / 100 for each in (*said.first_tokens, *said.transits))
        assert carried(http, place) == (scenario.requests + scenario.warmup, 0, 0)

    async def test_open_streams_are_held(self, place: Place) -> None:
        held = Scenario(name="held", what="", clients=3, requests=3, is_stream=True, is_held=True, is_warmed=False)
        with engine(delay_us=60_000_000) as slow:
            said = await load_on(held, Reach(port=slow.prefill_port, decode_port=slow.decode_port))
        assert (said.requests, said.tokens, len(said.first_tokens)) == (3, 3, 3)

    async def test_chats(self, http: httpx.Client, place: Place) -> None:
        reach = Reach(port=place.prefill_port, decode_port=place.decode_port)
        said = await load_on(replace(SHORT, is_chat=True), reach)
        assert (said.requests, said.tokens, said.errors, said.complaint) == (SHORT.requests, SHORT.requests, 0, "")
        assert carried(http, place) == (SHORT.requests + SHORT.warmup, 0, 0)

    async def test_parts_of_the_requests_are_marked(self, place: Place) -> None:
        parts = replace(SHORT, requests=10, num_marks=5)
        reach = Reach(port=place.prefill_port, decode_port=place.decode_port)
        num_marks = 0

        def mark() -> None:
            nonlocal num_marks
            num_marks += 1

        async with clients_of(native.build("client"), parts, reach, PATIENCE_S) as clients:
            await clients.until("ready")
            await clients.go_on()
            await clients.until("done", mark)
        assert num_marks == 5

    async def test_prompts_beside_are_sent_as_long_as_the_others_last(self, http: httpx.Client, tmp_path: Path) -> None:
        (tmp_path / "prompts").write_text('one \\"prompt\\"\ntwo\n')
        scenario = replace(STREAM, num_beside=2)
        with engine(delay_us=1000) as place:
            reach = Reach(port=place.prefill_port, decode_port=place.decode_port, prompts=tmp_path / "prompts")
            said = await load_on(scenario, reach)
            handed = carried(http, place)[0]
        assert (said.errors, said.requests) == (0, scenario.requests)
        assert said.beside >= 2
        assert said.tokens == len(said.transits) == scenario.requests * scenario.tokens
        assert handed >= scenario.requests + scenario.warmup + 2 + said.beside

    async def test_there_must_be_prompts_to_send_beside(self, place: Place, tmp_path: Path) -> None:
        (tmp_path / "prompts").write_text("")
        with pytest.raises(BenchError, match="there are no prompts in it"):
            await load_on(replace(SHORT, num_beside=1), Reach(port=place.port, prompts=tmp_path / "prompts"))

    async def test_an_answer_that_is_not_a_decoders_is_an_error(self, place: Place) -> None:
        # A prefiller's reply has no token with a time: a proxy that shows it has decoded nothing.
        fresh = Scenario(name="short", what="", clients=1, requests=2, is_warmed=False)
        said = await load_on(fresh, Reach(port=place.prefill_port))
        assert (said.errors, said.complaint.strip()) == (2, "an answer is not whole")

    async def test_nobody_is_there(self) -> None:
        (port,) = free_ports(1, random.Random())
        with pytest.raises(BenchError, match=f"port {port}: Connection refused"):
            await load_on(SHORT, Reach(port=port))

    async def test_a_reply_may_come_in_any_pieces(self) -> None:
        chunks = [f"@{time.monotonic_ns():019d}".encode() * 2, b"no token", b""]
        framed = b"".join(b"%X;name=value\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks[:-1])
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        reply = head + framed + b"0\r\ntrailer: yes\r\nanother: one\r\n\r\n"
        two = Scenario(name="two", what="", clients=1, requests=3, tokens=2, is_stream=True, is_warmed=False)
        async with answering(reply) as port:
            said = await load_on(two, Reach(port=port))
        assert (said.errors, said.complaint, said.tokens) == (0, "", 6)

    async def test_an_error_status_is_told(self) -> None:
        reply = b'HTTP/1.1 503 Busy\r\ncontent-length: 14\r\n\r\nthe queue "is"'
        async with answering(reply) as port:
            said = await load_on(replace(SHORT, is_warmed=False), Reach(port=port))
            with pytest.raises(BenchError, match="requests failed while warming up: HTTP 503 the queue  is"):
                await load_on(SHORT, Reach(port=port))
        assert (said.errors, said.complaint) == (SHORT.requests, "HTTP 503 the queue  is ")

    async def test_a_connection_that_is_closed_is_an_error_and_made_anew(self) -> None:
        async with answering(b"") as port:
            said = await load_on(replace(SHORT, is_warmed=False), Reach(port=port))
        assert (said.errors, said.complaint.strip()) == (SHORT.requests, "the connection was closed")


class TestFloor:
    @pytest.mark.parametrize(
        "scenario",
        [
            SHORT,
            STREAM,
            replace(SHORT, is_chat=True),
            replace(SHORT, prompt_bytes=1 << 20, clients=3),
            replace(STREAM, tokens=3000, clients=8, requests=24),
        ],
        ids=["short", "stream", "chat", "large", "many-tokens"],
    )
    async def test_every_request_is_whole_and_carries_its_handoff(
        self, http: httpx.Client, place: Place, scenario: Scenario
    ) -> None:
        with floor(place):
            said = await load_on(scenario, Reach(port=place.port))
        assert (said.requests, said.errors, said.complaint) == (scenario.requests, 0, "")
        assert carried(http, place) == (scenario.requests + scenario.warmup, 0, 0)

    def test_a_client_that_leaves_takes_its_leg_with_it(self, http: httpx.Client) -> None:
        with engine(delay_us=5_000_000) as slow, floor(slow):
            with http.stream(
                "POST", f"http://127.0.0.1:{slow.port}/v1/completions", json=BODY | {"stream": True}
            ) as reply:
                next(reply.iter_raw())
            until(lambda: bool(http.get(f"{slow.prefill_url}/bench").json()["broken"]))

    def test_what_a_client_is_slow_to_take_is_kept_whole(self, http: httpx.Client, place: Place) -> None:
        num_tokens = 20_000  # more than the system's buffers hold
        body = json.dumps(BODY | {"stream": True, "max_tokens": num_tokens}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        got = bytearray()
        with floor(place), socket.socket() as client:
            client.settimeout(PATIENCE_S)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", place.port))
            client.sendall(head.encode() + body)
            while not got.endswith(b"\r\n0\r\n\r\n"):
                block = client.recv(1 << 16)
                assert block
                got += block
        written = re.findall(rb"@(\d{19})", got)
        assert len(written) == num_tokens
        assert written == sorted(written)


@contextlib.contextmanager
def floor(place: Place) -> Iterator[None]:
    """The floor, which must not end by itself."""
    peer = floor_of(native.build("floor"))
    process = subprocess.Popen(peer.line(peer.command, place, SHORT))
    try:
        until(lambda: answers(place.port))
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[int]:
    """A server that answers each request with these bytes, one by one; without any, it closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
                if not reply:
                    break
                for byte in reply:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


# ── targets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def script(folder: Path, name: str, package: str) -> Path:
    path = folder / name
    path.write_text(f"#!/usr/bin/python3\nimport sys\nfrom {package}.cli import main\n")
    path.chmod(0o755)
    return path


class TestPeers:
    @pytest.fixture(autouse=True)
    def _on_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(targets.sys, "executable", str(tmp_path / "python"))

    def test_one_that_is_installed(self, tmp_path: Path) -> None:
        path = script(tmp_path, "vllm-router", "vllm_router")
        (peer,), missing = choose(["vllm-router"])
        assert (peer.name, peer.command, missing) == ("vllm-router", str(path), [])

    def test_one_that_is_not_is_skipped_with_what_brings_it(self) -> None:
        there, missing = choose(["vllm-router", "lmcache-example"])
        assert there == []
        assert missing[0] == "vllm-router: there is no command vllm-router: pip install vllm-router"
        assert missing[1].startswith("lmcache-example: ")

    def test_a_command_of_the_same_name_is_not_taken_for_it(self, tmp_path: Path) -> None:
        theirs = script(tmp_path, "smg", "sglang_router")
        (why,) = choose(["smg"])[1]
        assert why.startswith(f"smg: {theirs} belongs to another package: pip install smg in an environment of its own")
        (tmp_path / "other").mkdir()
        path = script(tmp_path / "other", "smg", "smg")
        ((peer,), missing) = choose([f"smg={path}"])
        assert (peer.command, missing) == (str(path), [])

    def test_a_name_nobody_knows(self) -> None:
        with pytest.raises(ValueError, match="no peer is called 'nginx'; there are vllm-router, "):
            choose(["nginx"])

    def test_smg_is_told_to_take_all_at_once(self) -> None:
        place = Place(port=1, metrics_port=2, prefill_port=3, decode_port=4)
        lines = [targets.PEERS["smg"].line("smg", place, named(name)) for name in ("held-5000", "queue-10000")]
        limits = [line[line.index("--max-concurrent-requests") + 1] for line in lines]
        assert limits == ["0", "64"]

    def test_tokens_are_counted_where_there_is_a_model(self) -> None:
        place = Place(port=1, metrics_port=2, prefill_port=3, decode_port=4)
        assert pdproxy_line(place, BESIDE, Path("folder"))[-2:] == ("--model", "folder")
        assert "--model" not in pdproxy_line(place, BESIDE)

    @pytest.mark.parametrize("scenario", FULL, ids=lambda scenario: scenario.name)
    def test_every_line_says_where_the_engines_are(self, scenario: Scenario) -> None:
        place = Place(port=1, metrics_port=2, prefill_port=3, decode_port=4)
        for line in (
            pdproxy_line(place, scenario),
            *(peer.line("x", place, scenario) for peer in targets.PEERS.values()),
        ):
            assert {"http://127.0.0.1:3", "http://127.0.0.1:4"} <= set(line)
            assert (str(scenario.slots) in line) == (scenario.slots is not None)

    @pytest.mark.parametrize("scenario", FULL, ids=lambda scenario: scenario.name)
    def test_our_line_is_understood(self, scenario: Scenario) -> None:
        place = Place(port=1000, metrics_port=1001, prefill_port=1002, decode_port=1003)
        line = pdproxy_line(place, scenario)
        settings = load(list(line[line.index("serve") + 1 :]))
        assert (settings.port, settings.concurrent_pages) == (1000, scenario.slots)


# ── reports ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def findings(*measured: Measured) -> Findings:
    machine = {"cores": 2, "cpu": "a CPU", "kernel": "6", "proxy_core": 1, "helper_core": 0, "python": "3.11"}
    machine["packages"] = {"uvloop": "0.22"}
    return Findings("2026-01-01T00:00:00+00:00", machine, 1, True, ["smg: there is no command smg"], list(measured))


def measured_with(scenario: Scenario = SHORT, /, **samples: Sample) -> Measured:
    return Measured(scenario, list(samples), [dict(samples)])


def report_of(*measured: Measured) -> dict[str, Any]:
    return make_report(findings(*measured), is_complete=True)


def named(name: str) -> Scenario:
    (scenario,) = (one for one in (*FULL, *LONG) if one.name == name)
    return scenario


class TestCopies:
    def test_each_target_has_a_copy_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Path] = []
        monkeypatch.setattr(native, "_folder", lambda: tmp_path)
        monkeypatch.setattr(native, "compile_into", lambda folder: (folder.mkdir(), made.append(folder)))
        first = native.copies(tmp_path / "first", is_compiled=True)
        again = native.copies(tmp_path / "again", is_compiled=True)
        assert first.compiled == again.compiled
        assert len(made) == 1, "it is kept"
        assert (first.interpreted / "pdproxy" / "cli.py").is_file()
        assert native.copies(tmp_path / "not", is_compiled=False).compiled is None

    def test_what_does_not_compile(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(folder: Path) -> None:
            raise BuildError("it does not compile")

        monkeypatch.setattr(native, "_folder", lambda: tmp_path)
        monkeypatch.setattr(native, "compile_into", fails)
        with pytest.raises(BenchError, match="it does not compile"):
            native.copies(tmp_path / "work", is_compiled=True)


class TestReport:
    def test_a_row_has_what_is_promised(self) -> None:
        samples = {DIRECT: sample(), OURS: sample(cpu=0.001), "vllm-router": sample(cpu=0.002)}
        report = make_report(findings(measured_with(**samples)), is_complete=True)
        bare, ours, peer = report["rows"]
        assert [row["target"] for row in report["rows"]] == [DIRECT, "pdproxy", "vllm-router"]
        for row in report["rows"]:
            assert row["scenario"] == "short"
            assert set(FIGURES) <= set(row)
        assert ours["ratios"]["vllm-router"]["cpu_ms_per_req"] == pytest.approx(0.5)
        assert ours["ratios"]["vllm-router"]["rss_mb"] == pytest.approx(1.0)
        assert (bare["ratios"], peer["ratios"]) == ({}, {})
        assert (ours["added_ttft_p50_ms"], bare["added_ttft_p50_ms"]) == (0.0, None)
        assert not ours["is_disqualified"]
        assert json.loads(json.dumps(report))["missing"] == ["smg: there is no command smg"]

    def test_pdproxy_is_no_peer_of_its_own(self) -> None:
        """It is compared with itself, and that is no goal."""
        samples = {DIRECT: sample(), OURS: sample(cpu=0.002), INTERPRETED: sample(cpu=0.001)}
        report = report_of(measured_with(named("short-32"), **samples))
        assert report["rows"][1]["ratios"][INTERPRETED]["cpu_ms_per_req"] == pytest.approx(2.0)
        assert report["goals"] == []

    def test_the_floor_is_no_peer_and_everybody_is_so_far_above_it(self) -> None:
        samples = {DIRECT: sample(), FLOOR: sample(cpu=0.0005), OURS: sample(cpu=0.002), "smg": sample(cpu=0.001)}
        report = report_of(measured_with(named("short-32"), **samples))
        assert [row["over_floor"] for row in report["rows"][1:]] == [pytest.approx(each) for each in (1.0, 4.0, 2.0)]
        assert set(report["rows"][2]["ratios"]) == {"smg"}
        assert [row[5] for row in make_table(report).rows] == ["–", "1.00", "4.00", "2.00"]
        (row,) = report_of(measured_with(**{OURS: sample()}))["rows"]
        assert row["over_floor"] is None

    def test_who_skips_the_handoff_is_disqualified(self) -> None:
        samples = {DIRECT: sample(), OURS: sample(), "vllm-router": sample(unproven=1)}
        report = make_report(findings(measured_with(**samples)), is_complete=True)
        assert [row["is_disqualified"] for row in report["rows"]] == [False, False, True]
        assert [row[-1] for row in make_table(report).rows] == ["", "", "disqualified: decodes without their handoff"]

    def test_who_refuses_is_compared_with_nobody(self) -> None:
        samples = {OURS: sample(), "vllm-router": sample(errors=1), "smg": sample()}
        (ours, *_) = report_of(measured_with(**samples))["rows"]
        assert set(ours["ratios"]) == {"smg"}
        (ours, *_) = report_of(measured_with(**samples | {OURS: sample(errors=1)}))["rows"]
        assert ours["ratios"] == {}

    def test_memory_along_a_long_run_is_told(self) -> None:
        along = (40.0, *(50.0 + tenth for tenth in range(10)))
        lines = make_lines(report_of(measured_with(named("soak-1m"), **{OURS: sample(along=along)})))
        assert lines[-1] == (
            "soak-1m: pdproxy's memory is 40.0 MB at the start, 50.0 after 10%, 54.0 after 50%, 59.0 at the end"
        )

    def test_what_big_prompts_do_to_others_tokens_is_told(self) -> None:
        calm, beside = sample(transits=[10_000]), sample(transits=[25_000], beside=3)
        measured = (measured_with(CALM, **{OURS: calm}), measured_with(BESIDE, **{OURS: beside}))
        assert make_lines(report_of(*measured))[-1] == (
            "3 prompts of 128,000 tokens beside the streams, pdproxy: token transit p99 2.50 ms instead of 1.00"
        )

    def test_what_stands_against_the_figures_is_said(self) -> None:
        busy = measured_with(**{DIRECT: sample(), OURS: sample()})
        busy.is_noisy = True
        busy.failures = {"smg": "it does not come up"}
        said = warnings(make_report(findings(busy), is_complete=True))
        assert said == [
            "skipped smg: there is no command smg",
            "short: without smg: it does not come up",
            "other processes were busy: the figures of short are not to be quoted",
        ]

    def test_the_helpers_shares_are_told(self) -> None:
        report = make_report(findings(measured_with(**{DIRECT: sample(), OURS: sample()})), is_complete=True)
        text = "\n".join(make_lines(report))
        assert "engines: at most 20% of their core (short, direct)" in text
        assert "clients: at most 10% of their core" in text

    def test_an_interrupted_run_has_something_to_tell(self) -> None:
        report = make_report(findings(Measured(SHORT, [DIRECT, OURS])), is_complete=False)
        assert (report["rows"], report["is_complete"]) == ([], False)
        assert not make_table(report).rows
        assert make_lines(report)

    def test_disturbed_rounds_are_better_than_none_but_marked(self) -> None:
        measured = Measured(SHORT, [OURS], disturbed=[{OURS: sample(elsewhere=1.0)}])
        (row,) = make_report(findings(measured), is_complete=False)["rows"]
        assert row["is_noisy"]
        assert row["cpu_ms_per_req"] == pytest.approx(0.5)

    def test_a_picture_has_a_point_for_each_peer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: list[tuple[list[float], str]] = []

        class Axes:
            @property
            def xaxis(self) -> Axes:
                return self

            def scatter(self, at: list[float], lines: list[float], label: str, **options: Any) -> None:
                drawn.append((at, label))

            def get_legend_handles_labels(self) -> tuple[list[Any], list[str]]:
                return [], []

            def __getattr__(self, name: str) -> Any:
                return lambda *args, **options: None

        class Figure:
            def __init__(self, **options: Any) -> None: ...

            def subplots(self, lines: int, columns: int, **options: Any) -> list[list[Axes]]:
                return [[Axes() for _ in range(columns)] for _ in range(lines)]

            def __getattr__(self, name: str) -> Any:
                return lambda *args, **options: None

        library: Any = ModuleType("matplotlib")
        library.Figure = Figure
        library.FixedLocator = library.FuncFormatter = library.NullLocator = lambda *args: None
        for name in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
            monkeypatch.setitem(sys.modules, name, library)
        samples = {DIRECT: sample(), OURS: sample(cpu=0.001), "smg": sample(cpu=0.002), "other": sample(cpu=0.004)}
        plot(make_report(findings(measured_with(**samples)), is_complete=True), Path("x.png"))
        assert drawn[:2] == [([pytest.approx(0.5)], "smg"), ([pytest.approx(0.25)], "other")]


def goal(report: dict[str, Any], what: str) -> dict[str, Any]:
    (found,) = (one for one in report["goals"] if one["what"] == what)
    return dict(found)


class TestClaims:
    def test_what_was_not_measured_is_not_judged(self) -> None:
        assert check_goals([]) == []
        assert report_of(measured_with(named("short-32"), **{OURS: sample()}))["goals"] == []

    def test_the_cpu_of_a_short_request(self) -> None:
        peers = {"vllm-router": sample(cpu=0.002), "smg": sample(cpu=0.0012)}
        report = report_of(measured_with(named("short-32"), **{OURS: sample(cpu=0.0014)}, **peers))
        best = goal(report, "CPU per short request, of vllm-router's")
        assert best == {
            "what": "CPU per short request, of vllm-router's",
            "aim": "at most 0.65",
            "found": "0.70 (short-32, vllm-router)",
            "holds": False,
            "is_noisy": False,
        }
        others = goal(report, "CPU per short request, of every peer's")
        assert (others["found"], others["holds"]) == ("1.17 (short-32, smg)", False)
        cheaper = report_of(measured_with(named("short-32"), **{OURS: sample(cpu=0.0011)}, **peers))
        assert goal(cheaper, "CPU per short request, of vllm-router's")["holds"]
        assert goal(cheaper, "CPU per short request, of every peer's")["holds"]

    def test_the_worst_scenario_counts(self) -> None:
        measured = [
            measured_with(named(name), **{OURS: sample(cpu=cpu), "vllm-router": sample(cpu=0.002)})
            for name, cpu in (("prompt-32k-1", 0.0013), ("prompt-32k-4", 0.0011))
        ]
        found = goal(report_of(*measured), "CPU per prompt of 32 KiB, of vllm-router's")
        assert (found["found"], found["holds"]) == ("0.65 (prompt-32k-1, vllm-router)", False)

    def test_latencies_are_the_best_peers_but_for_a_twentieth(self) -> None:
        peers = {"vllm-router": sample(first_tokens=[20_000]), "smg": sample(first_tokens=[10_000])}
        what = "TTFT p50, of the best peer's, in every scenario"
        for mine, holds in ((10_400, True), (10_600, False)):
            report = report_of(measured_with(named("short-1"), **{OURS: sample(first_tokens=[mine])}, **peers))
            assert goal(report, what)["holds"] is holds
        # Counting tokens, which peers do not do, is none of this goal.
        slow = {OURS: sample(first_tokens=[90_000])}
        assert report_of(measured_with(BESIDE, **slow, **peers))["goals"] == []

    def test_memory_stays_where_it_is_after_the_first_tenth(self) -> None:
        what = "memory's growth in a million requests, after the first tenth"
        for end, holds in ((50.9, True), (51.1, False)):
            measured = measured_with(named("soak-1m"), **{OURS: sample(along=(40.0, 50.0, end))})
            assert goal(report_of(measured), what)["holds"] is holds

    def test_big_prompts_beside_streams(self) -> None:
        what = "tokens of other streams, p99, later beside prompts of 128,000 tokens by"
        for transit, holds in ((51_000, True), (53_000, False)):
            calm = measured_with(CALM, **{OURS: sample(transits=[2_000])})
            beside = measured_with(BESIDE, **{OURS: sample(transits=[transit])})
            beside.is_noisy = True
            found = goal(report_of(calm, beside), what)
            assert (found["holds"], found["is_noisy"]) == (holds, True)

    def test_they_are_said(self) -> None:
        samples = {OURS: sample(cpu=0.001), "vllm-router": sample(cpu=0.002)}
        report = report_of(measured_with(named("stream-32"), **samples))
        assert goal_lines(report)[0] == (
            "reached CPU per token, no delay, of vllm-router's: 0.50 (stream-32, vllm-router), aim: at most 0.65"
        )

    def test_no_goal_is_judged_by_a_run_in_which_we_failed(self) -> None:
        samples = {OURS: sample(errors=1), "vllm-router": sample()}
        assert report_of(measured_with(named("short-32"), **samples))["goals"] == []


class TestMerge:
    def test_a_scenario_is_taken_from_the_last_that_has_it(self) -> None:
        first = report_of(
            measured_with(named("held-1000"), **{OURS: sample()}),
            measured_with(named("short-32"), **{OURS: sample(cpu=0.1), "smg": sample(cpu=0.2)}),
        )
        second = report_of(measured_with(named("short-32"), **{OURS: sample(cpu=0.3)}))
        merged = merge([first, second])
        assert [(row["scenario"], row["cpu_ms_per_req"]) for row in merged["rows"]] == [
            ("short-32", pytest.approx(75.0)),
            ("held-1000", pytest.approx(0.5)),
        ]
        assert merged["goals"] == []
        assert merge([second, first])["goals"] == first["goals"]

    def test_failures_go_with_their_scenario(self) -> None:
        failed = measured_with(named("short-32"), **{OURS: sample()})
        failed.failures = {"smg": "it does not come up"}
        good = measured_with(named("short-32"), **{OURS: sample(), "smg": sample()})
        assert merge([report_of(failed), report_of(good)])["failures"] == []
        assert len(merge([report_of(good), report_of(failed)])["failures"]) == 1

    def test_machines_are_not_mixed(self) -> None:
        one = report_of(measured_with(**{OURS: sample()}))
        for differs in ({"cpu": "another"}, {"compiled": True}):
            other = one | {"machine": one["machine"] | differs}
            with pytest.raises(ValueError, match="different machines"):
                merge([one, other])


class TestMarkdown:
    def filled(self, what: str, *measured: Measured) -> list[str]:
        before = f"# A page\n\n<!-- bench_proxy: {what} -->\nold\n<!-- /bench_proxy -->\n\nthe rest\n"
        after = fill(before, report_of(*measured))
        head, _, rest = after.partition(f"<!-- bench_proxy: {what} -->\n")
        body, _, tail = rest.partition("<!-- /bench_proxy -->")
        assert (head, tail) == ("# A page\n\n", "\n\nthe rest\n")
        return body.splitlines()

    def test_the_figures_that_matter_have_a_line_per_proxy(self) -> None:
        samples = {DIRECT: sample(), OURS: sample(cpu=0.001), "smg": sample(cpu=0.002)}
        table = self.filled("summary", measured_with(named("short-32"), **samples))
        assert table[0].startswith("| proxy | CPU ms per short request |")
        assert table[1] == "|" + "---|" * (table[0].count("|") - 1)
        assert [line.split("|")[1:3] for line in table[2:]] == [[" pdproxy ", " 0.250 "], [" smg ", " 0.500 (0.50) "]]
        assert table[2].count("–") == table[0].count("|") - 3

    def test_all_figures_have_a_line_per_scenario_and_target(self) -> None:
        table = self.filled("table", measured_with(**{DIRECT: sample(), OURS: sample()}))
        assert [line.split("|")[1:3] for line in table[2:]] == [[" short ", " direct "], [" short ", " pdproxy "]]

    def test_when_and_where(self) -> None:
        (line,) = self.filled("run", measured_with(**{OURS: sample()}))
        there = "2 cores of a CPU, Linux 6, Python 3.11, pdproxy interpreted"
        assert line == f"2026-01-01, {there}; medians of 1 rounds; uvloop 0.22."

    def test_what_a_core_carries(self) -> None:
        (line,) = self.filled("carries", measured_with(named("short-32"), **{OURS: sample(cpu=0.0002)}))
        assert line == "* short requests: 20,000 a second, of 50.0 µs each (`short-32`)"

    def test_goals_and_notes(self) -> None:
        samples = {OURS: sample(cpu=0.002), "vllm-router": sample(cpu=0.002)}
        table = self.filled("goals", measured_with(named("stream-32"), **samples))
        cell = " CPU per token, no delay, of vllm-router's "
        assert table[2] == f"|{cell}| at most 0.65 | 1.00 (stream-32, vllm-router) | **missed** |"
        (note,) = self.filled("notes", measured_with(named("soak-1m"), **{OURS: sample(along=(1.0, 2.0))}))
        assert note.startswith("* soak-1m: ")

    def test_a_document_must_have_a_place_and_a_place_a_meaning(self) -> None:
        with pytest.raises(ValueError, match="there is no place for figures"):
            fill("# A page\n", report_of())
        with pytest.raises(ValueError, match="nothing is called 'graph'"):
            fill("<!-- bench_proxy: graph -->\n<!-- /bench_proxy -->", report_of())

    @pytest.mark.parametrize("name", ["docs/speed.md"])
    def test_our_documents_have_places(self, name: str) -> None:
        text = (ROOT / name).read_text()
        report = report_of(measured_with(named("short-32"), **{OURS: sample(), "smg": sample()}))
        assert "| short-32 | pdproxy |" in fill(text, report)


class TestTexts:
    def test_prompts_have_just_so_many_tokens_and_are_unlike(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(texts, "TRAIN_BYTES", 20_000)
        made = texts.make_texts(tmp_path, 500)
        tokenizer = Tokenizer.from_file(str(made.model / "tokenizer.json"))
        prompts = [json.loads(f'"{line}"') for line in made.prompts.read_text().splitlines()]
        assert [len(tokenizer.encode(prompt).ids) for prompt in prompts] == [500] * texts.NUM_PROMPTS
        assert len({prompt[:100] for prompt in prompts}) == texts.NUM_PROMPTS

    def test_too_little_text(self) -> None:
        with pytest.raises(BenchError, match="too little text for 4 prompts of 100 tokens"):
            list(texts.cut(texts.train("one two three " * 20), "one two three " * 20, 100))


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


class TestCommand:
    def run(self, *words: str) -> tuple[int, str]:
        result = CliRunner().invoke(command.app, list(words), env={"COLUMNS": "200"})
        return result.exit_code, result.output

    def test_a_picture_is_refused_before_anything_is_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(command, "can_plot", lambda: False)
        monkeypatch.setattr(command, "_run", lambda *args: pytest.fail("it measures"))
        status, output = self.run("--plot", "x.png")
        assert status == 2
        assert "pip install 'pdproxy[bench]'" in output

    @pytest.mark.parametrize("words", [("--scenarios", "fast"), ("--peers", "nginx")])
    def test_strange_names_are_refused(self, words: tuple[str, str]) -> None:
        status, output = self.run(*words)
        assert status == 2
        assert f"is called {words[1]!r}" in output

    def test_another_checkout_is_copied_by_its_own_code(self, tmp_path: Path) -> None:
        folder = copy_of(ROOT, tmp_path, is_compiled=False)
        assert (folder / "pdproxy" / "orchestrator" / "orchestrator.py").read_bytes() == (
            ROOT / "pdproxy/orchestrator/orchestrator.py"
        ).read_bytes()

    def test_a_folder_without_pdproxy_is_no_checkout(self, tmp_path: Path) -> None:
        status, output = self.run("--peers", f"earlier={tmp_path}")
        assert status == 2
        assert "there is no pdproxy in" in output

    @pytest.mark.parametrize(
        ("version", "why"),
        [("", "cannot be run"), ("no Python at all", "cannot be run"), (".cpython-399.so 3.99.1", "is Python 3.99.1,")],
    )
    def test_another_python_has_to_fit(self, version: str, why: str, tmp_path: Path) -> None:
        python = tmp_path / "python"
        if version:
            python.write_text(f"#!/bin/sh\necho {version}\n")
            python.chmod(0o755)
        status, output = self.run("--peers", f"python={python}")
        assert status == 2
        assert why in " ".join(output.split())

    @pytest.mark.parametrize(
        ("words", "is_compiled", "has_interpreted"),
        [((), True, False), (("--peers", "interpreted"), True, True), (("--no-compile",), False, False)],
    )
    def test_pdproxy_is_compiled(
        self, words: tuple[str, ...], is_compiled: bool, has_interpreted: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = self.findings(monkeypatch, None, *words)
        assert (found.machine["compiled"], found.has_interpreted) == (is_compiled, has_interpreted)
        assert found.missing == []

    def test_where_it_cannot_be_compiled_it_is_measured_as_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.findings(monkeypatch, "there is no compiler")
        assert not found.machine["compiled"]
        assert found.missing == ["compiling pdproxy: there is no compiler"]

    def findings(self, monkeypatch: pytest.MonkeyPatch, why_not: str | None, *words: str) -> Findings:
        """With which it would measure."""
        found: list[Findings] = []
        monkeypatch.setattr(command, "why_not_compiled", lambda: why_not)
        monkeypatch.setattr(command, "_run", lambda findings, *rest: found.append(findings) or 0)
        self.run(*words)
        return found[0]

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native.shutil, "which", lambda name: None)
        monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(BenchError, match="apt install gcc, or pip install ziglang"):
            native.build("engine")

    def test_an_earlier_run_is_shown_drawn_and_written_down_again(self, tmp_path: Path) -> None:
        samples = {DIRECT: sample(), OURS: sample(cpu=0.001), "smg": sample(cpu=0.002)}
        for name in ("short-1", "short-32"):
            report = report_of(measured_with(named(name), **samples))
            (tmp_path / name).write_text(json.dumps(report))
        (tmp_path / "page.md").write_text("<!-- bench_proxy: table -->\n<!-- /bench_proxy -->\n")
        files = ("--json", str(tmp_path / "all.json"), "--markdown", str(tmp_path / "page.md"))
        status, output = self.run("--from", f"{tmp_path / 'short-1'},{tmp_path / 'short-32'}", *files)
        assert status == 0, output
        assert "0.250" in output
        rows = json.loads((tmp_path / "all.json").read_text())["rows"]
        assert [row["scenario"] for row in rows] == ["short-1"] * 3 + ["short-32"] * 3
        assert "| short-32 | smg | 0.500 |" in (tmp_path / "page.md").read_text()

    def test_an_earlier_run_that_is_not_there(self, tmp_path: Path) -> None:
        status, output = self.run("--from", str(tmp_path / "nothing.json"))
        assert status == 2
        assert "No such file" in output

    def test_a_peers_version_is_asked_of_its_own_python(self, tmp_path: Path) -> None:
        path = tmp_path / "smg"
        for text, version in ((f"#!{sys.executable}\n", metadata.version("msgspec")), ("\x7fELF", None)):
            path.write_text(text)
            assert version_of_peer(replace(targets.PEERS["smg"], name="msgspec", command=str(path))) == version

    def test_a_cpu_without_a_model(self) -> None:
        assert cpu_model("processor : 0\nmodel name\t: One: Two\n") == "One: Two"
        assert cpu_model("processor : 0\n") == os.uname().machine


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--quick", "--no-compile", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def children_of(pid: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            found |= {int(path.parent.name)} if parent == pid else set()
    return found


def test_a_quick_run(tmp_path: Path) -> None:
    """It measures pdproxy by another Python as well, which has none of the libraries."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$4" >>{tmp_path}/ran\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with started("--json", str(tmp_path / "report.json"), "--peers", f"python={python}") as process:
        output, errors = process.communicate(timeout=50)
    assert process.returncode == 0, errors
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_complete"]
    assert report["machine"]["compiled"] is False
    assert report["machine"]["packages"][OTHER_PYTHON] == platform.python_version()
    assert (tmp_path / "ran").read_text().split().count("serve") == len(QUICK)
    assert [(row["scenario"], row["target"]) for row in report["rows"]] == [
        (scenario.name, target) for scenario in QUICK for target in (DIRECT, OURS, OTHER_PYTHON, FLOOR)
    ]
    for row in report["rows"]:
        assert (row["errors"], row["is_disqualified"]) == (0, False)
        assert row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0
        assert row["transit_p99_us"] >= row["transit_p50_us"] > 0
        assert (row["cpu_ms_per_req"] > 0) == (row["rss_mb"] > 0) == (row["target"] != DIRECT)
    assert "CPU ms/req" in output
    assert "engines: at most" in output


def test_an_engine_that_freezes_fails_no_request(tmp_path: Path) -> None:
    with started("--failover", "--rounds", "1", "--json", str(tmp_path / "report.json")) as process:
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    kinds = [(frozen, answers) for frozen in ("decoder", "prefiller") for answers in ("streamed", "whole")]
    assert [(row["frozen"], row["answers"]) for row in rows] == kinds
    for row in rows:
        assert (row["failed"], row["complaint"]) == (0, "")
        assert row["requests"] >= row["held_up"] > 0
        assert row["delay_max_s"] >= row["delay_p50_s"] > HELD_UP_S
        assert (row["ratio"] is not None) == (row["answers"] == "whole")
        assert (row["broken_off"] > 0) == (row["frozen"] == "decoder" and row["answers"] == "streamed")
    assert "whole/streamed" in output


def test_a_failed_request_is_told_and_has_no_delay() -> None:
    failed = [Asked(0.0, 60.0, complaint="TimeoutError: ", delay_s=58.0)]
    rows = failover_rows(
        {
            ("decode", True): [Asked(0.0, delay_s=4.0), Asked(0.0, delay_s=0.1)],
            ("decode", False): [Asked(0.0, delay_s=6.0), *failed],
            ("prefill", True): [Asked(0.0)],
            ("prefill", False): failed,
        }
    )
    assert [row["failed"] for row in rows] == [0, 1, 0, 1]
    assert [row["delay_max_s"] for row in rows] == [4.0, 6.0, None, None]
    assert [row["ratio"] for row in rows] == [None, 1.5, None, None]
    assert rows[1]["complaint"] == "TimeoutError: "
    assert [row[-1] for row in failover_table(rows).rows] == ["", "1.50", "", ""]


def test_failover_is_a_benchmark_of_its_own() -> None:
    result = CliRunner().invoke(command.app, ["--failover", "--peers", "smg"])
    assert result.exit_code == 2
    assert "--failover" in result.output


def test_ctrl_c_ends_every_process_and_writes_what_is_known(tmp_path: Path) -> None:
    with started("--json", str(tmp_path / "report.json")) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "of CPU per request" in line)
        children = children_of(process.pid)
        assert len(children) >= 3
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGINT
    assert json.loads((tmp_path / "report.json").read_text())["is_complete"] is False
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_two_runs_that_compile_at_once_share_what_the_first_has_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compile_slowly(copy: Path) -> None:
        copy.mkdir()
        (copy / "ours").touch()
        if not others:  # while it compiles, another run comes and is done first
            others.append(copy)
            native.copies(tmp_path / "other", is_compiled=True)

    others: list[Path] = []
    monkeypatch.setattr(native, "_folder", lambda: tmp_path)
    monkeypatch.setattr(native, "copy_into", lambda folder: None)
    monkeypatch.setattr(native, "compile_into", compile_slowly)
    compiled = native.copies(tmp_path / "work", is_compiled=True).compiled
    assert compiled is not None
    assert (compiled / "ours").exists()
    assert [path for path in tmp_path.iterdir() if path != compiled] == []
