"""The fleet changed over HTTP, by whoever has the key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdproxy.assemble import assemble
from pdproxy.config.settings import Settings
from pdproxy.errors import ConfigError
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import Answer, Harness, proxy_in_front_of, until

KEY = {"authorization": "Bearer operator"}
PATH = "/admin/instances"


async def ask(
    house: Harness,
    method: str,
    path: str = PATH,
    body: str = "",
    *,
    headers: dict[str, str] | None = None,
) -> Answer:
    call = house.call_raw(path, body.encode(), KEY if headers is None else headers, method)
    return await call.answer()


def new(**different: Any) -> str:
    fields = {"name": "decode-9", "role": "decode", "url": "http://d0:1"} | different
    return str(fields).replace("'", '"')


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", PATH), ("POST", PATH), ("POST", PATH + "/decode-0/drain"), ("DELETE", PATH + "/decode-0")],
)
async def test_off_without_a_key_and_closed_without_the_right_one(method: str, path: str) -> None:
    async with proxy_in_front_of() as house:
        answer = await ask(house, method, path)
        assert (answer.status, answer.error["code"]) == (403, "admin_disabled")
        assert "--admin-key" in answer.error["message"]
    async with proxy_in_front_of(admin_key="operator", api_keys=("client",)) as house:
        for shown in ({}, {"authorization": "Bearer client"}, {"authorization": "Bearer"}):
            answer = await ask(house, method, path, headers=shown)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert not house.proxy.pool.instances[1].is_draining


async def test_the_operators_key_is_no_clients_key() -> None:
    async with proxy_in_front_of(admin_key="operator", api_keys=("client",)) as house:
        assert (await house.post(headers=KEY)).status == 401


async def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\noperator\n")
    async with proxy_in_front_of(admin_key_file=file) as house:
        assert (await ask(house, "GET")).status == 200
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"admin_key_file: .* has no keys"):
        assemble(Settings(prefill=("http://p:1",), decode=("http://d:1",), admin_key_file=file))


async def test_list() -> None:
    async with proxy_in_front_of(admin_key="operator") as house:
        listed = (await ask(house, "GET")).json()
        assert [one["name"] for one in listed["data"]] == ["prefill-0", "decode-0"]
        assert [one["routable"] for one in listed["data"]] == [True, True]


@pytest.mark.parametrize("name", ["rack-1/decode", "a/drain", "/"])
async def test_a_name_with_a_slash_can_be_drained_and_removed(name: str) -> None:
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    async with proxy_in_front_of(decoders=decoders, admin_key="operator", canary=False) as house:
        assert (await ask(house, "DELETE", f"{PATH}/decode-1")).status == 200
        assert (await ask(house, "POST", body=new(name=name, url="http://d1:1"))).status == 201
        assert (await ask(house, "POST", f"{PATH}/{name}/drain")).json()["draining"] is True
        assert house.proxy.pool.instances[-1].is_draining
        assert (await ask(house, "DELETE", f"{PATH}/{name}")).json()["name"] == name
        assert len(house.proxy.pool.instances) == 2


async def test_replace_a_decoder_without_losing_a_request() -> None:
    async with proxy_in_front_of(admin_key="operator") as house:
        house.decoder.hang_at.add("middle")
        call = house.call(stream=True)
        await house.decoder.reached("middle")
        assert (await ask(house, "POST", PATH + "/decode-0/drain")).json()["draining"] is True
        assert (await house.post()).status == 503, "it gets nothing new"
        busy = await ask(house, "DELETE", PATH + "/decode-0")
        assert (busy.status, busy.error["code"], busy.error["param"]) == (409, "instance_conflict", "force")
        house.decoder.let_go("middle")
        assert (await call.answer()).text() == "Once upon a time there was a fox"
        await house.settled()
        gone = (await ask(house, "DELETE", PATH + "/decode-0")).json()
        assert (gone["name"], gone["leaving"]) == ("decode-0", False)
        added = await ask(house, "POST", body=new())
        assert (added.status, added.json()["state"]) == (201, "unknown")
        await until(lambda: house.proxy.pool.is_ready)
        answer = await house.post()
        assert (answer.status, answer.headers["x-pdproxy-decoder"]) == (200, "decode-9")


async def test_removed_by_force_what_is_under_way_there_goes_on() -> None:
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    for decoder in decoders:
        decoder.signals = "lost"
    async with proxy_in_front_of(decoders=decoders, admin_key="operator", wait=False, canary=False) as house:
        await house.is_ready()
        call = house.call()
        await until(lambda: house.proxy.board.statistics().num_waiting == 1)
        name, at = next((f"decode-{i}", decoder) for i, decoder in enumerate(decoders) if decoder.pages)
        answer = await ask(house, "DELETE", f"{PATH}/{name}?force=true")
        assert answer.status == 200
        [(attempt, num_pages)] = at.pages.items()
        at._say("ready", attempt, 0, num_pages)
        assert (await call.answer()).headers["x-pdproxy-decoder"] == name
        assert sum(len(decoder.generations()) for decoder in decoders) == 1
        await until(lambda: not house.proxy.pool.leaving)


async def test_removed_by_force_what_waits_for_pages_is_served_elsewhere() -> None:
    """The one that was removed has them first, but gets nothing new."""
    decoders = [FakeEngine("decode", num_pages=4), FakeEngine("decode", num_pages=4)]
    async with proxy_in_front_of(decoders=decoders, admin_key="operator") as house:
        first, second = [await Held(one, 4).wait() for one in house.proxy.pool.of_role("decode")]
        call = house.call()
        await until(lambda: house.admission.num_waiting == 1)
        assert (await ask(house, "DELETE", f"{PATH}/decode-0?force=true")).status == 200
        first.release()
        await asyncio.sleep(0.01)
        assert house.admission.num_waiting == 1
        second.release()
        answer = await call.answer()
        assert (answer.status, answer.headers["x-pdproxy-decoder"]) == (200, "decode-1")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ("{", None, "JSON"),
        (new(role="both"), "role", "prefill"),
        (new(port=3), "port", "there is no such field"),
        (new(url="d9"), None, "is not http://host:port"),
        ('{"name": "a", "role": "decode"}', "url", "required"),
        ("x" * 70_000, None, "larger than"),
    ],
)
async def test_bodies_that_name_no_instance(body: str, param: str | None, says: str) -> None:
    async with proxy_in_front_of(admin_key="operator") as house:
        error = (await ask(house, "POST", body=body)).error
        assert error["param"] == param
        assert says in error["message"]
        assert len(house.proxy.pool.instances) == 2


async def test_who_is_not_there_and_what_is_not_understood() -> None:
    async with proxy_in_front_of(admin_key="operator") as house:
        for method, path in (("DELETE", PATH + "/nobody"), ("POST", PATH + "/nobody/drain")):
            answer = await ask(house, method, path)
            assert (answer.status, answer.error["code"]) == (404, "no_such_instance")
        assert (await ask(house, "POST", body=new(name="decode-0"))).status == 409
        answer = await ask(house, "DELETE", PATH + "/decode-0?force=perhaps")
        assert (answer.status, answer.error["param"]) == (400, "force")
        assert (await ask(house, "PUT")).status == 405
