"""Prefillers that become decoders, and decoders that become prefillers, while requests go through the fleet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import structs

from pdproxy.engines.http.base import EngineBroken, EngineRefused
from pdproxy.errors import InstanceConflict
from pdproxy.fleet import role_changes
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.pool import ROLES
from pdproxy.fleet.role_controller import RoleFollower
from pdproxy.fleet.roster import Entry, Roster
from tests.fakes.at_once_engine import AtOnceEngine, Meetings
from tests.fakes.fake_engine import FakeEngine, FakeReply, Seen, json_reply
from tests.fakes.fake_vllm import PARAMS, FakeNixl
from tests.fakes.fleet import Clock, Held
from tests.fakes.proxy_harness import Answer, Harness, proxy_in_front_of, until
from transfer.wire import BufferFacts

KEY = {"authorization": "Bearer operator"}
PATH = "/admin/instances"
REFUSING: Any = {"when_no_prefiller": "refuse", "when_no_decoder": "refuse"}
STORY = "Once upon a time there was a fox"


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_changes, "LOOK_S", 0.01)


class EitherRole(FakeNixl):
    """vLLM, which does not care: what it is asked says which half it is. It is never both at a time."""

    async def generate(self, seen: Seen) -> FakeReply:
        params = seen.body.get(PARAMS) or {}
        role = "prefill" if params.get("do_remote_decode") else "decode" if params else self.role
        if role != self.role:
            assert not self.pages, "it becomes a decoder while its pages are held"
            assert not self.running, "it becomes a prefiller while it writes answers"
            self.role = role
        return await super().generate(seen)


class Both(FakeEngine):
    """A built-in engine that was started with --role both."""

    def facts(self) -> BufferFacts:
        return structs.replace(super().facts(), role="both")


class Switchable(AtOnceEngine):
    """SGLang, which has to be told."""

    answer: Any = None

    async def handle(self, path: str, raw: bytes, headers: Mapping[str, str]) -> FakeReply:
        if path != "/pd_role_switch":
            return await super().handle(path, raw, headers)
        self.asked = json.loads(raw)
        if self.answer is not None:
            return FakeReply(400, [json.dumps(self.answer).encode()])
        self.role = self.asked["new_role"]
        await self.pass_point("switched")
        return json_reply({"success": True, "message": "ok", "old_role": "", "new_role": self.role})


def pairs(num_prefillers: int = 2, num_decoders: int = 2) -> dict[str, list[EitherRole]]:
    prefillers = [EitherRole("prefill") for _ in range(num_prefillers)]
    decoders = [EitherRole("decode") for _ in range(num_decoders)]
    return {"prefillers": prefillers, "decoders": decoders}


def sglangs() -> dict[str, Any]:
    meetings = Meetings()
    prefillers = [Switchable("sglang", "prefill", meetings) for _ in range(2)]
    return {"prefillers": prefillers, "decoders": [Switchable("sglang", "decode", meetings)]}


def know_each_other(house: Harness) -> None:
    engines = [*house.prefillers, *house.decoders]
    for engine in engines:
        engine.prefillers = engine.decoders = engines


async def ask(house: Harness, name: str, role: Any, query: str = "", what: str = "role") -> Answer:
    body = json.dumps({"role": role}).encode() if what == "role" else b""
    method = "DELETE" if what == "" else "POST"
    path = f"{PATH}/{name}/{what}".rstrip("/")
    operator = house if house.leader is None else Harness(house.leader, house.prefillers, house.decoders)
    return await operator.call_raw(f"{path}{query}", body, KEY, method).answer()


def now(house: Harness, name: str) -> Instance:
    proxy = house.leader or house.proxy
    instance = proxy.pool.find(name)
    assert instance is not None
    return instance


def phase(house: Harness, name: str) -> str:
    told: str = now(house, name).status()["role_change"]["phase"]
    return told


def why(house: Harness, name: str) -> str:
    told: str = now(house, name).status()["role_change"]["why"]
    return told


async def over(house: Harness, name: str, outcome: str) -> Instance:
    await until(lambda: phase(house, name) == outcome)
    await until(lambda: now(house, name).is_ready)
    await until(lambda: not (house.leader or house.proxy).pool.leaving)
    return now(house, name)


@pytest.mark.parametrize("by_front", [False, True])
async def test_a_role_changes_under_traffic_and_no_answer_is_cut_off(by_front: bool) -> None:
    async with proxy_in_front_of(**pairs(), admin_key="operator", by_front=by_front) as house:
        know_each_other(house)
        for engine in house.decoders:
            engine.hang_at.add("middle")
        calls = [house.call(stream=True), house.call(stream=True)]
        for engine in house.decoders:
            await engine.reached("middle")
        answer = await ask(house, "decode-0", "prefill")
        assert answer.status == 202
        assert answer.json()["role_change"] == {
            "from": "decode",
            "to": "prefill",
            "by": "admin",
            "phase": "draining",
            "why": "",
        }
        house.decoders[1].let_go("middle")
        during = await house.post()
        assert (during.text(), during.headers["x-pdproxy-decoder"]) == (STORY, "decode-1")
        assert (phase(house, "decode-0"), now(house, "decode-0").role) == ("draining", "decode")
        house.decoders[0].let_go("middle")
        assert [(await call.answer()).text() for call in calls] == [STORY, STORY]
        changed = await over(house, "decode-0", "done")
        assert (changed.role, changed.is_routable) == ("prefill", True)
        await until(lambda: house.proxy.pool.find("decode-0").role == "prefill")  # type: ignore[union-attr]
        assert (await ask(house, "prefill-0", "decode")).status == 202
        await over(house, "prefill-0", "done")
        assert (await ask(house, "prefill-1", "decode")).status == 202
        await over(house, "prefill-1", "done")
        await until(lambda: [one.role for one in house.proxy.pool.instances].count("prefill") == 1)
        after = await house.post()
        assert (after.text(), after.headers["x-pdproxy-prefiller"]) == (STORY, "decode-0")
        assert not any(engine.wrong_pulls for engine in (*house.prefillers, *house.decoders))


async def test_pages_that_are_held_keep_the_role() -> None:
    async with proxy_in_front_of(**pairs(), admin_key="operator") as house:
        know_each_other(house)
        held = await Held(now(house, "prefill-0"), 4).wait()
        assert (await ask(house, "prefill-0", "decode")).status == 202
        assert (await house.post()).headers["x-pdproxy-prefiller"] == "prefill-1"
        assert (phase(house, "prefill-0"), now(house, "prefill-0").role) == ("draining", "prefill")
        held.release()
        assert (await over(house, "prefill-0", "done")).role == "decode"


async def test_the_last_ready_one_of_a_role_keeps_it_unless_it_is_forced() -> None:
    async with proxy_in_front_of(**pairs(1, 2), admin_key="operator", **REFUSING) as house:
        know_each_other(house)
        refused = await ask(house, "prefill-0", "decode")
        assert (refused.status, refused.error["code"], refused.error["param"]) == (409, "instance_conflict", "force")
        assert "the last ready prefill instance of 'tiny'" in refused.error["message"]
        assert now(house, "prefill-0").is_routable
        assert (await ask(house, "decode-0", "prefill")).status == 202
        assert (await ask(house, "decode-1", "prefill")).status == 409, "the other one is about to go"
        await over(house, "decode-0", "done")
        assert (await ask(house, "decode-1", "prefill", "?force=true")).status == 202
        await until(lambda: now(house, "decode-1").role == "prefill")
        assert (await ask(house, "decode-1", "decode", "?force=true")).status == 409, "that change is under way"
        assert (await ask(house, "prefill-0", "decode")).status == 202, "no decoder is there that could lose anything"
        await over(house, "prefill-0", "done")
        await over(house, "decode-1", "done")
        assert (await house.post()).text() == STORY


async def test_where_the_others_may_answer_alone_the_last_one_may_go() -> None:
    async with proxy_in_front_of(**pairs(1, 1), admin_key="operator", probe_interval_s=0.1) as house:
        know_each_other(house)
        assert (await ask(house, "prefill-0", "decode")).status == 202
        await over(house, "prefill-0", "done")
        assert (await house.post()).headers["x-pdproxy-path"] == "local"
        assert (await ask(house, "decode-0", "prefill")).status == 202
        await over(house, "decode-0", "done")
        await until(lambda: not house.proxy.pool.admission.open_places("tiny").alone)
        swapped = await house.post()
        assert (swapped.headers["x-pdproxy-prefiller"], swapped.headers["x-pdproxy-decoder"]) == (
            "decode-0",
            "prefill-0",
        )


async def test_the_last_one_is_not_taken_away_by_the_fall_of_another() -> None:
    async with proxy_in_front_of(**pairs(), admin_key="operator", when_no_prefiller="refuse") as house:
        know_each_other(house)
        held = await Held(now(house, "prefill-0"), 4).wait()
        assert (await ask(house, "prefill-0", "decode")).status == 202
        now(house, "prefill-1").lost("it fell")
        await until(lambda: phase(house, "prefill-0") == "failed")
        assert "the last ready prefill instance" in why(house, "prefill-0")
        assert now(house, "prefill-0").is_routable
        held.release()


async def test_a_drain_that_never_ends_is_given_up() -> None:
    async with proxy_in_front_of(**pairs(), admin_key="operator", role_change_timeout_s=0.05) as house:
        know_each_other(house)
        held = await Held(now(house, "prefill-0"), 4).wait()
        assert (await ask(house, "prefill-0", "decode")).status == 202
        await until(lambda: phase(house, "prefill-0") == "failed")
        assert why(house, "prefill-0") == "after 0.05 s it still had 0 requests under way and 4 pages held"
        instance = now(house, "prefill-0")
        assert (instance.role, instance.is_routable) == ("prefill", True)
        held.release()


async def test_who_fails_in_the_new_role_goes_back_to_the_old_one() -> None:
    async with proxy_in_front_of(**pairs(), admin_key="operator", canary_timeout_s=0.1) as house:
        know_each_other(house)
        house.prefillers[0].fail_at["decode"] = FakeReply(500, [b"{}"])
        assert (await ask(house, "prefill-0", "decode")).status == 202
        back = await over(house, "prefill-0", "failed")
        assert back.role == "prefill"
        assert why(house, "prefill-0").startswith("it was not ready within 0.2 s (")
        assert why(house, "prefill-0").endswith(") and goes back to prefill")
        assert (await house.post()).text() == STORY


async def test_an_engine_that_is_restarted_meanwhile_comes_back_in_the_new_role() -> None:
    async with proxy_in_front_of(**pairs(), admin_key="operator", probe_interval_s=0.1) as house:
        know_each_other(house)
        house.decoders[0].hang_at.add("middle")
        house.decoders[1].hang_at.add("middle")
        calls = [house.call(stream=True), house.call(stream=True)]
        for engine in house.decoders:
            await engine.reached("middle")
        assert (await ask(house, "decode-0", "prefill")).status == 202
        house.decoders[0].restart()
        house.decoders[1].let_go("middle")
        texts = [(await call.answer()).text() for call in calls]
        assert STORY in texts
        assert (await over(house, "decode-0", "done")).role == "prefill"


async def test_an_engine_that_is_gone_is_in_the_new_role_when_it_is_back() -> None:
    async with proxy_in_front_of(**pairs(), admin_key="operator", canary_timeout_s=1.0) as house:
        know_each_other(house)
        gone = house.prefillers[0]
        client = house.client_of(gone)
        gone.fail_at["prefill"] = gone.fail_at["decode"] = EngineRefused("nobody listens")
        now(house, "prefill-0").lost("nobody listens")
        usual, client.get = client.get, _refuse  # type: ignore[method-assign]
        assert (await ask(house, "prefill-0", "decode")).status == 202
        await until(lambda: now(house, "prefill-0").role == "decode")
        assert phase(house, "prefill-0") == "proving"
        gone.fail_at.clear()
        client.get = usual  # type: ignore[method-assign]
        assert (await over(house, "prefill-0", "done")).role == "decode"


async def _refuse(path: str, **how: Any) -> tuple[int, bytes]:
    raise EngineRefused("nobody listens")


async def test_asked_twice_resumed_and_removed() -> None:
    async with proxy_in_front_of(**pairs(), admin_key="operator") as house:
        know_each_other(house)
        held = await Held(now(house, "prefill-0"), 4).wait()
        assert (await ask(house, "prefill-0", "prefill")).status == 202, "it has that role"
        assert "role_change" not in now(house, "prefill-0").status()
        for _ in range(2):
            assert (await ask(house, "prefill-0", "decode")).json()["role_change"]["phase"] == "draining"
        other = await ask(house, "prefill-0", "prefill")
        assert (other.status, other.error["param"]) == (409, "role")
        assert (await ask(house, "prefill-0", "", what="resume")).status == 200
        await until(lambda: phase(house, "prefill-0") == "failed")
        assert why(house, "prefill-0") == "it was put in use again"
        assert now(house, "prefill-0").is_routable
        assert (await ask(house, "prefill-0", "decode")).status == 202
        removed = await ask(house, "prefill-0", "", "?force=true", what="")
        assert removed.status == 200
        await until(lambda: not house.proxy.roles.is_busy)
        assert house.proxy.pool.find("prefill-0") is None
        held.release()


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "the body must be"),
        (b'{"role": "both"}', 400, "the body must be"),
        (b'{"role": "decode", "when": 1}', 400, "the body must be"),
        (b'{"role": "decode"}', 404, "there is no instance 'nobody'"),
    ],
)
async def test_what_is_not_understood(body: bytes, status: int, says: str) -> None:
    async with proxy_in_front_of(admin_key="operator") as house:
        answer = await house.call_raw(f"{PATH}/nobody/role", body, KEY).answer()
        assert answer.status == status
        assert says in answer.error["message"]


async def test_engines_that_have_one_role_for_good() -> None:
    async with proxy_in_front_of(admin_key="operator") as house:
        answer = await ask(house, "prefill-0", "decode")
        assert (answer.status, answer.error["param"]) == (400, "role")
        assert "was started for prefill alone; start it with --role both" in answer.error["message"]
    meetings = Meetings()
    prefiller, decoder = (AtOnceEngine("mooncake", role, meetings) for role in ROLES)
    mooncakes: Any = {"prefillers": [prefiller], "decoders": [decoder]}
    async with proxy_in_front_of(**mooncakes, admin_key="operator") as house:
        answer = await ask(house, "prefill-0", "decode")
        assert (answer.status, answer.error["param"]) == (400, "role")
        assert "engines of the kind mooncake cannot change their role" in answer.error["message"]


async def test_a_builtin_engine_for_both_roles_may_have_either() -> None:
    engines: Any = {"prefillers": [Both("prefill"), Both("prefill")], "decoders": [Both("decode")]}
    async with proxy_in_front_of(**engines, admin_key="operator", slow_start_s=0.0) as house:
        assert (await house.post()).status == 200
        engine = house.prefillers[0]
        know_each_other(house)
        house.prefillers[1].port = 7500
        engine.role, engine.port, engine.sink = "decode", 7400, house.proxy.board.deliver
        assert (await ask(house, "prefill-0", "decode")).status == 202
        assert (await over(house, "prefill-0", "done")).role == "decode"
        used = {(await house.post()).headers["x-pdproxy-decoder"] for _ in range(4)}
        assert used == {"prefill-0", "decode-0"}


async def test_sglang_is_told() -> None:
    async with proxy_in_front_of(**sglangs(), admin_key="operator") as house:
        assert (await ask(house, "prefill-0", "decode")).status == 202
        assert (await over(house, "prefill-0", "done")).role == "decode"
        assert house.prefillers[0].asked == {"new_role": "decode"}
        assert (await house.post()).status == 200


@pytest.mark.parametrize("is_unharmed", [True, False])
async def test_sglang_refuses(is_unharmed: bool) -> None:
    async with proxy_in_front_of(**sglangs(), admin_key="operator") as house:
        house.prefillers[0].answer = {"success": False, "message": "not set", "safe_to_restore": is_unharmed}
        assert (await ask(house, "prefill-0", "decode")).status == 202
        await until(lambda: phase(house, "prefill-0") == "failed")
        assert why(house, "prefill-0") == "its engine refused: not set"
        instance = now(house, "prefill-0")
        assert (instance.role, instance.is_routable) == ("prefill", is_unharmed)


async def test_sglang_is_put_in_use_again_while_it_changes() -> None:
    """Nobody can take back what it was told. It has to be empty once more, and then has the new role."""
    async with proxy_in_front_of(**sglangs(), admin_key="operator") as house:
        engine = house.prefillers[0]
        engine.hang_at.add("switched")
        assert (await ask(house, "prefill-0", "decode")).status == 202
        await engine.reached("switched")
        assert (await ask(house, "prefill-0", "", what="resume")).status == 200
        held = await Held(now(house, "prefill-0"), 1).wait()
        engine.let_go("switched")
        await until(lambda: now(house, "prefill-0").is_draining)
        assert now(house, "prefill-0").role == "prefill"
        held.release()
        assert (await over(house, "prefill-0", "done")).role == "decode"
        assert (await house.post()).status == 200


async def test_sglang_of_which_nobody_knows_stays_drained_though_it_was_put_in_use_meanwhile() -> None:
    async with proxy_in_front_of(**sglangs(), admin_key="operator") as house:
        engine = house.prefillers[0]
        engine.hang_at.add("switched")
        engine.fail_at["switched"] = EngineBroken("it hung up")
        assert (await ask(house, "prefill-0", "decode")).status == 202
        await engine.reached("switched")
        assert (await ask(house, "prefill-0", "", what="resume")).status == 200
        engine.let_go("switched")
        await until(lambda: phase(house, "prefill-0") == "failed")
        assert "so it stays drained" in why(house, "prefill-0")
        assert now(house, "prefill-0").is_draining


async def test_a_role_given_by_hand_holds_until_the_source_says_otherwise() -> None:
    async with proxy_in_front_of(**pairs(), admin_key="operator") as house:
        know_each_other(house)
        pool, membership = house.proxy.pool, house.proxy.membership
        given = {one.name: Entry(one.settings) for one in pool.instances}
        roster = Roster("a file", membership, pool, present=given.values())
        house.proxy.roles.change("prefill-0", "decode")
        await over(house, "prefill-0", "done")
        roster.want(given.values())
        roster.converge()
        assert now(house, "prefill-0").role == "decode"
        roster.want(one for name, one in given.items() if name != "prefill-0")
        roster.converge()
        assert pool.find("prefill-0") is None, "the source wants it no more, in whatever role"


@pytest.mark.parametrize("by_front", [False, True])
@pytest.mark.parametrize("kind", [FakeNixl, FakeEngine])
async def test_a_prefiller_is_done_with_a_request_when_its_kv_is_at_the_decoder(kind: Any, by_front: bool) -> None:
    """So it need not wait for the ends of long answers."""
    async with proxy_in_front_of([kind("prefill")], [kind("decode")], by_front=by_front) as house:
        house.decoder.hang_at.add("middle")
        call = house.call(stream=True)
        await house.decoder.reached("middle")
        for proxy in filter(None, (house.proxy, house.leader)):
            await until(lambda proxy=proxy: [one.num_attempts for one in proxy.pool.instances] == [0, 1])
        house.decoder.let_go("middle")
        assert (await call.answer()).text() == STORY


async def test_the_controller_has_a_decoder_become_a_prefiller() -> None:
    async with proxy_in_front_of(**pairs(1, 2), admin_key="operator") as house:
        know_each_other(house)
        clock = Clock()
        follower = RoleFollower(house.proxy.pool, house.proxy.roles, clock)
        now(house, "prefill-0").queue(1000)
        for _ in range(5):
            follower.look()
            assert not house.proxy.roles.is_busy
            clock.advance(0.9)
        follower.look()
        await over(house, "decode-0", "done")
        now(house, "prefill-0").queue(-1000)
        told = now(house, "decode-0").status()["role_change"]
        assert (told["from"], told["to"], told["by"]) == ("decode", "prefill", "controller")
        assert told["why"].startswith("1 prefill instances are 100% in use and 2 others 0%")
        page = (await house.get("/metrics")).body.decode()
        assert 'pdproxy_role_changes_total{by="controller",outcome="done",role="prefill"} 1.0' in page
        assert (await house.post()).text() == STORY


async def test_the_controller_leaves_no_role_empty_though_others_may_answer_alone() -> None:
    async with proxy_in_front_of(**pairs(1, 2), admin_key="operator") as house:
        know_each_other(house)
        held = await Held(now(house, "prefill-0"), 4).wait()
        with pytest.raises(InstanceConflict, match="the last ready prefill instance"):
            house.proxy.roles.change("prefill-0", "decode", origin="controller")
        house.proxy.roles.change("decode-0", "prefill", origin="controller")
        with pytest.raises(InstanceConflict, match="the last ready decode instance"):
            house.proxy.roles.change("decode-1", "prefill", origin="controller")
        await over(house, "decode-0", "done")
        held.release()
