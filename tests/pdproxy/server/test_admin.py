"""The fleet changed over HTTP, by whoever has the key."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
    [
        ("GET", PATH),
        ("POST", PATH),
        ("POST", PATH + "/decode-0/drain"),
        ("POST", PATH + "/decode-0/resume"),
        ("POST", PATH + "/decode-0/role"),
        ("DELETE", PATH + "/decode-0"),
    ],
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


@pytest.mark.parametrize(
    "url",
    [
        "http://a b",
        "http://a\tb:1",
        "http://d0:1\n",
        "\u2028http://d0:1",
        "http://u ser@d0:1",
        "http://u:p\x00w@d0:1",
        "http://d0<>:1",
        "http://d0:1/" + "x" * 3000,
        "http://",
        "file:///etc/passwd",
        "http://d0:0",
        "http://[::1",
    ],
)
async def test_a_url_that_is_none(url: str) -> None:
    async with proxy_in_front_of(admin_key="operator") as house:
        answer = await ask(house, "POST", body=json.dumps({"name": "new", "role": "decode", "url": url}))
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert "is not http://host:port" in answer.error["message"]
        assert answer.error["message"].isprintable()
        assert len(answer.error["message"]) < 3000


LINK_LOCAL = [
    "169.254.169.254",
    "169.254.0.1:80",
    "[fe80::1]:80",
    "[fe80::1%25eth0]",
    "[fd00:ec2::254]",
    "[::ffff:169.254.169.254]",
    "[64:ff9b::a9fe:a9fe]",
    "[2002:a9fe:a9fe::1]",
    "metadata.google.internal",
    "Metadata.Google.Internal.",
    "2852039166",
    "0xa9.0xfe.1",
]


@pytest.mark.parametrize("host", LINK_LOCAL)
async def test_a_link_local_address_is_refused(host: str) -> None:
    async with proxy_in_front_of(admin_key="operator") as house:
        answer = await ask(house, "POST", body=new(url=f"http://{host}"))
        assert (answer.status, answer.error["param"]) == (400, "url")
        assert "--allow-link-local" in answer.error["message"]


@pytest.mark.parametrize(("is_allowed", "status"), [(False, 400), (True, 409)])
async def test_a_link_local_address_may_be_allowed(
    monkeypatch: pytest.MonkeyPatch, is_allowed: bool, status: int
) -> None:
    """It gets as far as the next check: there is such an instance."""

    async def resolve(host: str, port: None) -> list[Any]:
        return [(2, 1, 6, "", ("169.254.1.1", 0))]

    async with proxy_in_front_of(admin_key="operator", allow_link_local=is_allowed) as house:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        assert (await ask(house, "POST", body=new())).status == status


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("url", {"url": "http://harmless.example:1"}),
        ("receiver_host", {"url": "http://10.0.0.1:1", "engine": "lmcache", "receiver_host": "harmless.example"}),
        ("kv_events", {"url": "http://10.0.0.1:1", "kv_events": "tcp://harmless.example:1"}),
        (
            "kv_events_replay",
            {
                "url": "http://10.0.0.1:1",
                "kv_events": "tcp://10.0.0.1:1",
                "kv_events_replay": "tcp://harmless.example:1",
            },
        ),
    ],
)
async def test_a_name_that_is_resolved_to_such_an_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, field: str, fields: dict[str, str]
) -> None:
    async def resolve(host: str, port: None) -> list[Any]:
        await asyncio.sleep(0)
        found = ("10.0.0.2", "169.254.169.254") if host == "harmless.example" else (host,)
        return [(2, 1, 6, "", (address, 0)) for address in found]

    async with proxy_in_front_of(admin_key="operator") as house:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        answer = await ask(house, "POST", body=new(**fields))
        assert (answer.status, answer.error["param"]) == (400, field)


async def test_ranks_are_added_one_by_one() -> None:
    async with proxy_in_front_of(admin_key="operator") as house:
        ranks = {"engine": "vllm_nixl", "url": "http://10.0.0.1:1", "data_parallel_size": 2}
        answer = await ask(house, "POST", body=new(**ranks))
        assert (answer.status, answer.error["param"]) == (400, "data_parallel_size")
        assert (await ask(house, "POST", body=new(**ranks, data_parallel_rank=7))).status == 400
        assert len(house.proxy.pool.instances) == 2


async def test_the_operators_own_file_may_name_such_an_address_and_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    assemble(Settings(prefill=("http://169.254.1.1:1",), decode=("http://10.0.0.1:2",), proxy_port=0))
    [told] = [record.getMessage() for record in caplog.records if "link-local" in record.getMessage()]
    assert told.startswith("prefill-0 is at http://169.254.1.1:1")


@pytest.mark.parametrize("name", ["a\nb", "x" * 129, "\x1b[31m", ""])
async def test_a_name_that_cannot_be_shown(name: str) -> None:
    async with proxy_in_front_of(admin_key="operator") as house:
        for field in ("name", "model"):
            text = name if field == "name" else name * 9
            body = {"name": "new", "role": "decode", "url": "http://d0:1"} | {field: text}
            answer = await ask(house, "POST", body=json.dumps(body))
            assert (answer.status, answer.error["param"]) == (400, field)
        answer = await ask(house, "POST", f"{PATH}/{quote(name * 200)}/drain")
        assert answer.status in (404, 405)
        assert len(answer.error["message"]) < 9000


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
    async with proxy_in_front_of(admin_key="operator", when_no_decoder="refuse") as house:
        house.decoder.hang_at.add("middle")
        call = house.call(stream=True)
        await house.decoder.reached("middle")
        assert (await ask(house, "POST", PATH + "/decode-0/drain")).json()["draining"] is True
        assert (await house.post()).status == 503, "it gets nothing new"
        assert (await ask(house, "POST", PATH + "/decode-0/resume")).json()["draining"] is False
        assert house.proxy.pool.is_ready
        assert (await ask(house, "POST", PATH + "/decode-0/drain")).json()["draining"] is True
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
        for method, path in (
            ("DELETE", PATH + "/nobody"),
            ("POST", PATH + "/nobody/drain"),
            ("POST", PATH + "/nobody/resume"),
        ):
            answer = await ask(house, method, path)
            assert (answer.status, answer.error["code"]) == (404, "no_such_instance")
        assert (await ask(house, "POST", body=new(name="decode-0"))).status == 409
        answer = await ask(house, "DELETE", PATH + "/decode-0?force=perhaps")
        assert (answer.status, answer.error["param"]) == (400, "force")
        assert (await ask(house, "PUT")).status == 405
