"""What goes wrong with the reference proxy (LMCache's example), fault by fault, and does not go wrong here.

Its starvation of large requests has a file of its own, ``test_starvation.py``; waiting at scale too,
``test_waiting_is_free.py``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections import Counter
from typing import Any

import pytest

from pdproxy.assemble import assemble
from pdproxy.config.settings import Settings
from pdproxy.errors import ConfigError
from tests.fakes.fake_engine import WORDS, FakeEngine
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import Call, Harness, proxy_in_front_of, until
from tests.fakes.suspension import cost_of_waiting
from transfer.geometry import capacity, kv_geometry

TEXT = "".join(WORDS)
GIB = 2**30


def attempts_of(engine: FakeEngine) -> list[str]:
    return [call.body["kv_transfer_params"]["attempt"] for call in engine.generations()]


def num_waiting(house: Harness) -> int:
    """For slots."""
    return house.proxy.pool.admission.num_waiting


async def leave(*calls: Call) -> None:
    for call in calls:
        call.leave()
    for call in calls:
        await call.done()


# ── one semaphore for all decoders; its capacity ignores TP, MLA and fp8 KV and can come out as 0 ───────────────────


async def test_every_decoder_has_slots_of_its_own() -> None:
    """A full buffer stops nobody whose KV goes into another one."""
    decoders = [FakeEngine("decode", num_pages=4), FakeEngine("decode", num_pages=8)]
    async with proxy_in_front_of(decoders=decoders) as house:
        house.prefiller.hang_at.add("prefill")
        calls = [house.call(prompt=[1] * 64) for _ in range(4)]
        await until(lambda: len(house.prefiller.generations()) == 3 and num_waiting(house) == 1)
        books = [decoder.held for decoder in house.proxy.pool.of_role("decode")]
        assert books == [4, 8]
        await leave(*calls)


def pages(*, cache: str = "latent", **options: Any) -> int:
    """Of a buffer of 1 GiB per rank; the model is as DeepSeek-V2-Lite where it has a latent, else as Llama-3-8B."""
    sizes: dict[str, Any] = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
    if cache == "latent":
        sizes |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        config = {"model_type": "deepseek_v2", "num_key_value_heads": 32, **sizes}
    else:
        config = {"model_type": "llama", "num_key_value_heads": 8, **sizes}
    geometry = kv_geometry(config | {"torch_dtype": "bfloat16"}, **options)
    return capacity(geometry, GIB, 256).pages


def test_capacity_knows_ranks_latents_and_fp8() -> None:
    whole = pages(cache="heads")
    assert whole == GIB // (32 * 2 * 8 * 128 * 2 * 256)
    assert pages(cache="heads", tp_size=4) == 4 * whole, "KV heads are divided over the ranks"
    assert pages(cache="heads", tp_size=16) == 8 * whole, "and repeated where there are fewer heads than ranks"
    assert pages(cache="heads", kv_cache_dtype="fp8") == 2 * whole
    assert pages() == GIB // (32 * (512 + 64) * 2 * 256)
    assert pages(tp_size=4) == pages(), "every rank has the whole latent"


def test_a_buffer_smaller_than_a_page_is_refused_at_the_start(tmp_path: Any) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    settings = Settings(prefill=("http://p:1",), decode=("http://d:1",), model=tmp_path, pd_buffer_size=4096)
    with pytest.raises(ConfigError, match="pd_buffer_size"):
        assemble(settings)


# ── waiting by polling: 100 waiting requests burn 0.64 of a core ────────────────────────────────────────────────────


async def test_a_hundred_waiting_requests_do_not_turn_the_loop() -> None:
    """Fifty wait for KV that does not come and hold all slots; fifty wait for slots."""
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=50)]) as house:
        house.decoder.signals = "lost"
        calls = [house.call(prompt=[1]) for _ in range(100)]
        await until(lambda: num_waiting(house) == house.proxy.board.statistics().num_waiting == 50)
        num_turns, cpu_s = await cost_of_waiting(0.2)
        assert num_turns <= 12, "the sleeper's own, and those of the proxy's clocks: not one for each that waits"
        assert cpu_s < 0.05
        await leave(*calls)


# ── a lost notification hangs the client and keeps its slots; there is no deadline and no FAILED ────────────────────


async def test_a_lost_notification_ends_by_its_deadline_and_the_slots_come_back() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=2)], kv_timeout_s=0.05) as house:
        house.decoder.signals = "lost"
        answer = await house.post(prompt=[1] * 32)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        await house.settled()
        assert house.held == 0
        house.decoder.signals = "ready"
        assert (await house.post(prompt=[1] * 32)).status == 200, "all slots are free again"


async def test_a_failed_transfer_is_known_long_before_the_deadline() -> None:
    async with proxy_in_front_of(retries=0, kv_timeout_s=1e6) as house:
        house.decoder.signals = "failed"
        answer = await house.post()
        assert (answer.status, answer.error["code"]) == (502, "kv_transfer_failed")


# ── a client that leaves while queued or in prefill is not noticed, its prefill is still sent ───────────────────────


async def test_who_leaves_while_queued_is_never_prefilled() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=2)]) as house:
        house.prefiller.hang_at.add("prefill")
        first, queued = house.call(prompt=[1] * 32), house.call(prompt=[1] * 32)
        await until(lambda: num_waiting(house) == 1)
        await leave(queued)
        await leave(first)
        await house.settled()
        assert len(house.prefiller.generations()) == 1


async def test_who_leaves_in_prefill_is_noticed_there() -> None:
    async with proxy_in_front_of() as house:
        house.prefiller.hang_at.add("prefill")
        call = house.call()
        await house.prefiller.reached("prefill")
        await leave(call)
        assert house.prefiller.closed == ["/v1/completions"]
        await house.settled()
        assert house.decoder.cancelled == attempts_of(house.prefiller)
        assert house.decoder.generations() == []


# ── one bookkeeping entry leaks per abandoned request; ids are a counter and repeat after a restart ─────────────────


async def abandon_in_each_phase(house: Harness) -> None:
    for engine, point in (
        (house.prefiller, "prefill"),
        (house.prefiller, "prefill_done"),
        (house.decoder, "decode"),
        (house.decoder, "middle"),
    ):
        engine.forget()
        engine.hang_at = {point}
        call = house.call(stream=True, prompt=[1])
        await engine.reached(point)
        queued = house.call(prompt=[1] * 1024)  # all pages
        await asyncio.sleep(0)
        await leave(call, queued)
        await house.settled()
        engine.hang_at = set()


def living_objects() -> Counter[str]:
    """Ours, by type."""
    gc.collect()
    kinds = [type(one) for one in gc.get_objects()]
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(("pdproxy.", "transfer.")))


async def test_abandoned_requests_leave_no_entry_anywhere() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode")]) as house:
        for _ in range(10):
            await abandon_in_each_phase(house)  # fills what keeps the latest few for the status page
        before = living_objects()
        for _ in range(10):
            await abandon_in_each_phase(house)
        assert living_objects() - before == Counter()


async def test_ids_do_not_repeat_after_a_restart() -> None:
    ids: list[str] = []
    for _ in range(2):
        async with proxy_in_front_of() as house:
            for _ in range(3):
                await house.post()
            ids += attempts_of(house.prefiller)
    assert len(set(ids)) == len(ids) == 6


# ── prefiller i is always paired with decoder i ─────────────────────────────────────────────────────────────────────


async def test_prefillers_and_decoders_are_not_paired() -> None:
    prefillers, decoders = [FakeEngine("prefill") for _ in range(2)], [FakeEngine("decode") for _ in range(2)]
    async with proxy_in_front_of(prefillers, decoders) as house:
        full = house.proxy.pool.of_role("decode")[0]
        lease = await Held(full, 60).wait()
        answers = [await house.post() for _ in range(4)]
        lease.release()
        assert {answer.headers["x-pdproxy-decoder"] for answer in answers} == {"decode-1"}
        assert {answer.headers["x-pdproxy-prefiller"] for answer in answers} == {"prefill-0", "prefill-1"}


# ── stream=false answered as SSE; max_tokens absent → 500; max_tokens=1 → a broken body; oversized prompt → 500 ─────


async def test_what_is_not_streamed_is_json() -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(stream=False)
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert answer.json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_may_be_absent(stream: bool) -> None:
    async with proxy_in_front_of() as house:
        answer = await house.call_raw(
            "/v1/completions", json.dumps({"model": "tiny", "prompt": "a", "stream": stream}).encode()
        ).answer()
        assert answer.status == 200
        assert (answer.text() if stream else answer.json()["choices"][0]["text"]) == TEXT
        assert "max_tokens" not in house.decoder.generations()[0].body


@pytest.mark.parametrize("stream", [False, True])
async def test_one_token_is_a_whole_answer(stream: bool) -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(max_tokens=1, stream=stream)
        assert answer.status == 200
        if stream:
            assert answer.text() == WORDS[0]
            assert answer.events()[-1] == "[DONE]"
        else:
            assert answer.json()["choices"][0]["text"] == WORDS[0]


@pytest.mark.parametrize(("oversized", "status"), [("local", 200), ("refuse", 400)])
async def test_an_oversized_prompt_is_served_or_refused_and_no_500(oversized: str, status: int) -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=2)], oversized=oversized) as house:
        answer = await house.post(prompt=[1] * 33)
        assert answer.status == status
        if status == 200:
            assert answer.headers["x-pdproxy-path"] == "local"
        else:
            assert answer.error["code"] == "context_length_exceeded"


# ── the client's Authorization header is replaced by `Bearer None`; shutdown raises ─────────────────────────────────


@pytest.mark.parametrize("headers", [{"authorization": "Bearer sk-of-the-client"}, {}])
async def test_authorization_is_the_clients_or_none(headers: dict[str, str]) -> None:
    async with proxy_in_front_of() as house:
        await house.post(headers=headers)
        for engine in (house.prefiller, house.decoder):
            assert engine.generations()[0].headers.get("authorization") == headers.get("authorization")


async def test_shutdown_with_requests_in_every_phase_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode", num_pages=2)]) as house:
        house.decoder.hang_at.add("middle")
        streaming = house.call(stream=True, prompt=[1])
        await house.decoder.reached("middle")
        house.prefiller.hang_at.add("prefill")
        prefilling, queued = house.call(prompt=[1] * 32), house.call(prompt=[1] * 32)
        await until(lambda: num_waiting(house) == 1)
        house.proxy.orchestrator.stop_accepting()
        house.proxy.orchestrator.abort_all()
        assert [(await call.answer()).status for call in (streaming, prefilling, queued)] == [200, 503, 503]
        assert streaming.so_far().events()[-1]["error"]["code"] == "shutting_down"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


# ── an extra HTTP round trip to an engine's /tokenize for each request ──────────────────────────────────────────────


async def test_a_request_costs_one_call_to_each_engine() -> None:
    async with proxy_in_front_of() as house:
        await house.post()
        assert [call.path for call in house.prefiller.calls] == ["/v1/completions"]
        assert [call.path for call in house.decoder.calls] == ["/v1/completions"]
