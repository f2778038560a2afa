"""The routes of the status page, through the whole app: what they tell of a fleet at work, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.dashboard import feed as feed_module
from pdproxy.dashboard import routes
from pdproxy.dashboard.feed import EVERY_S
from tests.fakes.calls import Call
from tests.fakes.eyes import picture_of, told
from tests.fakes.fake_engine import error_reply
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

EVENTS = "/ui/events"


def look(house: Harness, **options: Any) -> Call:
    return house.call_raw(EVENTS, b"", method="GET", **options)


def seen(call: Call) -> dict[str, Any]:
    return picture_of(told(b"".join(call.pieces)))


def card(call: Call, key: str) -> dict[str, Any]:
    found: dict[str, Any] = seen(call).get("fleet", {}).get(key, {})
    return found


async def first_picture(house: Harness) -> dict[str, Any]:
    call = look(house)
    await until(lambda: seen(call) != {})
    call.leave()
    await call.ended()
    return seen(call)


async def test_what_there_is_to_see() -> None:
    async with proxy_in_front_of() as house:
        picture = await first_picture(house)
        assert set(picture) == {"proxy", "fleet", "flow", "slow"}
        assert picture["proxy"].items() >= {"ready": True, "draining": False, "can_change": False}.items()
        assert list(picture["fleet"]) == ["prefill/prefill-0", "decode/decode-0"]
        decoder = picture["fleet"]["decode/decode-0"]
        expected = {"word": "ready", "breaker": "closed", "held": 0, "capacity": 64, "queue": 0, "legs": 0}
        assert decoder.items() >= expected.items()
        assert decoder["epoch"] == house.decoder.epoch
        assert "capacity" not in picture["fleet"]["prefill/prefill-0"], "no slots guard its memory"
        assert picture["slow"] == []


async def test_a_request_under_way_and_its_pages() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.hang_at.add("decode")
        call = house.call(stream=True, headers={"x-request-id": "mine"}, prompt=[1, 2, 3])
        await house.decoder.reached("decode")
        picture = await first_picture(house)
        [row] = picture["slow"]
        expected = {"id": "mine", "model": "tiny", "step": "first_byte", "attempts": 1, "tokens": 3, "pages": 1}
        assert row.items() >= expected.items()
        assert (row["prefiller"], row["decoder"]) == ("prefill-0", "decode-0")
        assert row["since"] >= row["started"]
        assert (picture["flow"]["in_flight"], picture["flow"]["now"]) == (1, {"first_byte": 1})
        assert picture["fleet"]["decode/decode-0"]["legs"] == 1
        busy = {card["name"]: card["requests"] for card in picture["fleet"].values()}
        assert busy == {"prefill-0": 0, "decode-0": 1}, "the prefiller has done its part"
        house.decoder.let_go("decode")
        await call.done()


async def test_what_has_ended_while_somebody_looked() -> None:
    async with proxy_in_front_of() as house:
        await house.post()
        call = look(house)
        await until(lambda: seen(call) != {})
        assert seen(call)["flow"]["ended"] == {}, "nobody looked"
        for _ in range(3):
            await house.post()
        await until(lambda: seen(call)["flow"]["ended"] == {"done": 3})
        flow = seen(call)["flow"]
        assert flow["per_s"] > 0
        assert set(flow["phase_s"]) == {
            "receive", "tokenize", "slot_wait", "prefill", "kv_wait", "first_byte", "decode"
        }  # fmt: skip
        call.leave()
        await call.ended()


async def test_tokens_are_told_while_they_come_and_failures_by_their_reason() -> None:
    async with proxy_in_front_of() as house:
        call = look(house)
        await until(lambda: seen(call) != {})
        house.decoder.hang_at.add("middle")
        request = house.call(stream=True)
        await house.decoder.reached("middle")
        await until(lambda: seen(call)["flow"]["tokens_per_s"] > 0)
        assert seen(call)["flow"]["in_flight"] == 1, "long before it ends"
        house.decoder.let_go("middle")
        await request.answer()
        assert house.proxy.recent.num_output_tokens > 0
        house.prefiller.fail_at["prefill"] = error_reply(500, "broken")
        answer = await house.post()
        await until(lambda: seen(call)["flow"]["failures"] == {answer.error["code"]: 1})
        assert seen(call)["flow"]["ended"] == {"done": 1, "failed": 1}
        assert seen(call)["flow"]["first_token_s"] == {"num": 1, "least": 20}
        assert 0 < seen(call)["flow"]["collecting_s"] < 60
        call.leave()
        await call.ended()


async def test_death_and_return_of_a_decoder_are_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it looks only once in a long while here."""
    monkeypatch.setattr(feed_module, "EVERY_S", 60.0)
    monkeypatch.setattr(feed_module, "GAP_S", 0.01)
    async with proxy_in_front_of(when_no_decoder="refuse") as house:
        call = look(house)
        await until(lambda: card(call, "decode/decode-0").get("word") == "ready")
        client, instance = house.client_of(house.decoder), house.proxy.pool.instances[1]
        client.is_up = False
        instance.suspected.set()
        await until(lambda: card(call, "decode/decode-0")["word"] == "down")
        assert "nobody listens" in card(call, "decode/decode-0")["why"]
        assert not seen(call)["proxy"]["ready"]
        house.decoder.epoch, client.is_up = "another", True
        instance.suspected.set()
        await until(lambda: card(call, "decode/decode-0")["word"] == "ready")
        assert card(call, "decode/decode-0")["epoch"] == "another"
        call.leave()
        await call.ended()


async def test_who_drains_is_removed_and_leaves() -> None:
    async with proxy_in_front_of(admin_key="operator") as house:
        house.decoder.hang_at.add("middle")
        request, call = house.call(stream=True), look(house)
        await house.decoder.reached("middle")
        await until(lambda: seen(call) != {})
        assert seen(call)["proxy"]["can_change"] is True
        house.proxy.membership.drain("decode-0")
        await until(lambda: card(call, "decode/decode-0")["word"] == "draining")
        house.proxy.membership.remove("decode-0", force=True)
        await until(lambda: "decode/decode-0" not in seen(call)["fleet"])
        assert card(call, f"leaving/decode-0/{house.decoder.epoch}")["word"] == "leaving"
        house.decoder.let_go("middle")
        await request.done()
        await until(lambda: list(seen(call)["fleet"]) == ["prefill/prefill-0"])
        call.leave()
        await call.ended()


async def test_a_shutdown_ends_it_when_the_last_request_has_ended() -> None:
    async with proxy_in_front_of() as house:
        house.decoder.hang_at.add("middle")
        request, call = house.call(stream=True), look(house)
        await house.decoder.reached("middle")
        house.proxy.orchestrator.stop_accepting()
        await until(lambda: seen(call).get("proxy", {}).get("draining") is True)
        assert not call.is_whole
        house.decoder.let_go("middle")
        await request.done()
        await call.done()
        assert call.is_whole
        assert seen(call)["flow"]["in_flight"] == 0


async def test_who_takes_nothing_any_more_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "STALLED_S", 0.05)
    async with proxy_in_front_of() as house:
        call = look(house)
        call.block()
        await call.done()
        assert not call.is_whole


async def test_how_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 1)
    async with proxy_in_front_of(api_keys=("client",)) as house:
        head = await house.call_raw(EVENTS, b"", method="HEAD").answer()
        assert (head.status, head.body) == (200, b"")
        post = await house.call_raw(EVENTS, b"", method="POST").answer()
        assert (post.status, post.error["code"]) == (405, "method_not_allowed")
        call = look(house)
        await until(lambda: seen(call) != {})
        assert call.headers["content-type"].startswith("text/event-stream"), "no key is asked for, as of /status"
        assert call.headers["cache-control"] == "no-store"
        assert b"".join(call.pieces).startswith(b"retry: 1000\n\n")
        refused = await look(house).answer()
        assert (refused.status, refused.error["code"]) == (503, "too_many_viewers")
        assert refused.headers["retry-after"] == "5"
        call.leave()
        await call.ended()
        assert EVERY_S >= 0.5, "and no faster than twice a second"
