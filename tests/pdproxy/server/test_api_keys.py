"""API keys: who may ask, where keys come from, and whose key the engines see."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

from pdproxy.assemble import http_client
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.errors import ConfigError, Unauthorized
from pdproxy.server import api_keys
from pdproxy.server.api_keys import LOOK_EVERY_S, ApiKeys
from tests.fakes.proxy_harness import proxy_in_front_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def may(keys: ApiKeys, key: str) -> bool:
    try:
        keys.check({"authorization": f"Bearer {key}"})
    except Unauthorized:
        return False
    return True


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# for the shop\n\n  first  \nsecond\n")
    return path


def replace(file: Path, text: str) -> None:
    """As careful editors and Kubernetes do it: another file under the same name."""
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


@pytest.mark.parametrize(
    ("headers", "is_in"),
    [
        ({"authorization": "Bearer one"}, True),
        ({"authorization": "bearer  two "}, True),
        ({"x-api-key": "two"}, True),
        ({"x-api-key": "wrong", "authorization": "Bearer one"}, True),
        ({}, False),
        ({"authorization": "one"}, False),
        ({"authorization": "Basic one"}, False),
        ({"authorization": "Bearer"}, False),
        ({"authorization": "Bearer on"}, False),
        ({"authorization": "Bearer one two"}, False),
        ({"x-api-key": ""}, False),
        ({"authorization": "Bearer caf\xe9"}, False),
    ],
)
def test_what_counts_as_showing_a_key(headers: dict[str, str], is_in: bool) -> None:
    keys = ApiKeys(["one", "two"])
    if is_in:
        keys.check(headers)
    else:
        with pytest.raises(Unauthorized):
            keys.check(headers)


def test_no_keys_and_no_file_is_open() -> None:
    assert ApiKeys([]).is_open
    ApiKeys([]).check({})


def test_a_key_that_is_not_ascii() -> None:
    """Headers reach us decoded as latin-1; clients send UTF-8."""
    ApiKeys(["schlüssel"]).check({"x-api-key": "schlüssel".encode().decode("latin-1")})


def test_a_key_is_found_as_fast_among_thousands() -> None:
    """To compare with each of them would take 10 ms, in which nobody else is served."""
    keys = ApiKeys([str(number) for number in range(20_000)])
    started = time.perf_counter()
    assert all(may(keys, key) for key in ["19999", "0"] * 100)
    assert not may(keys, "20000")
    assert time.perf_counter() - started < 0.5


def test_of_a_key_in_several_lines_the_first_counts(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a name=shop\na name=other rpm=1\na name=shop tpm=7\n")
    file.chmod(0o600)
    owner = ApiKeys([], file).owner({"x-api-key": "a"})
    assert owner is not None
    assert (owner.name, owner.rates) == ("shop", (None, 7))


def test_keys_from_options_and_file_together(file: Path) -> None:
    keys = ApiKeys(["zeroth"], file)
    assert [may(keys, key) for key in ("zeroth", "first", "second", "# for the shop", "")] == [True] * 3 + [False] * 2
    assert repr(keys) == "<ApiKeys 3 keys>"


def test_the_file_is_read_again_when_it_changes(file: Path) -> None:
    clock = Clock()
    keys = ApiKeys([], file, clock=clock)
    replace(file, "second\nthird\n")
    assert may(keys, "first")
    clock.now += LOOK_EVERY_S
    assert [may(keys, key) for key in ("first", "second", "third")] == [False, True, True]


def test_a_file_that_did_not_change_is_not_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    keys = ApiKeys([], file, clock=clock)
    monkeypatch.setattr(api_keys, "read_secrets", lambda file: pytest.fail("it was read"))
    clock.now += LOOK_EVERY_S
    assert may(keys, "first")


def test_a_file_that_vanishes_keeps_its_keys_and_is_told_of_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    keys = ApiKeys([], file, clock=clock)
    file.unlink()
    for _ in range(3):
        clock.now += LOOK_EVERY_S
        assert may(keys, "first")
    assert caplog.text.count("cannot be used, its last keys go on counting") == 1
    file.write_text("back")
    clock.now += LOOK_EVERY_S
    assert [may(keys, key) for key in ("first", "back")] == [False, True]


def test_an_emptied_file_lets_nobody_in(file: Path) -> None:
    clock = Clock()
    keys = ApiKeys([], file, clock=clock)
    replace(file, "")
    clock.now += LOOK_EVERY_S
    assert not keys.is_open
    assert not may(keys, "first")
    with pytest.raises(Unauthorized):
        keys.check({})


@pytest.mark.parametrize(
    ("content", "why"), [(None, "cannot be read"), (b"# nobody\n", "has no keys"), (b"\xff", "is not UTF-8")]
)
def test_a_file_that_cannot_work_is_refused_at_the_start(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"api_keys_file: .*{why}"):
        ApiKeys(["zeroth"], file)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused_at_the_start(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"api_keys_file: {file} can be written by others .*; chmod go-w {file}"):
        ApiKeys([], file)


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_is_a_warning(
    file: Path, mode: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file.chmod(mode)
    assert may(ApiKeys([], file), "first")
    assert (f"chmod go-r {file}" in caplog.text) == is_told


def test_a_changed_file_that_others_can_write_changes_nothing_until_that_is_mended(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    keys = ApiKeys([], file, clock=clock)
    file.write_text("third\n")
    file.chmod(0o666)
    for _ in range(3):
        clock.now += LOOK_EVERY_S
        assert [may(keys, key) for key in ("first", "third")] == [True, False]
    assert caplog.text.count(f"chmod go-w {file}") == 1
    file.chmod(0o600)
    clock.now += LOOK_EVERY_S
    assert [may(keys, key) for key in ("first", "third")] == [False, True]


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("sk-1 shop", True),
        ("sk-1,sk-2", True),
        ("sk-1#shop", True),
        ("sk-1 rpm=3", True),
        ("sk-1", False),
        ("sk=1:b", False),
        ("sk-1 name=shop rpm=3", False),
        ("# a comment, of three words", False),
    ],
)
def test_a_line_that_looks_like_more_than_a_key_is_told_of(
    file: Path, line: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(f"first\n{line}\n")
    keys = ApiKeys([], file, option="admin_key_file")
    said = f"admin_key_file: {file}, line 2: a blank, a comma or # is in it, and the whole line counts as one key"
    assert (said in caplog.text) == is_told
    assert "sk-1" not in caplog.text
    assert may(keys, line) == (is_told or line in ("sk-1", "sk=1:b"))


def test_a_byte_order_mark_is_no_part_of_the_first_key(file: Path) -> None:
    file.write_text("first\nsecond\n", encoding="utf-8-sig")
    assert [may(ApiKeys([], file), key) for key in ("first", "second")] == [True, True]


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "key", "name"),
    [
        ("sk-1 name=shop", "sk-1", "shop"),
        ("  sk-1\t name=a.b_c@d:e/f+g-7  ", "sk-1", "a.b_c@d:e/f+g-7"),
        ("name=shop", "name=shop", None),
        ("sk-1name=shop", "sk-1name=shop", None),
        ("sk=1==", "sk=1==", None),
        ("shop:sk-1", "shop:sk-1", None),
        ("sk-1 # shop", "sk-1 # shop", None),
        ("sk 1 name=shop", "sk 1 name=shop", None),
    ],
)
def test_a_line_is_a_key_as_a_whole_unless_a_name_is_behind_it(file: Path, line: str, key: str, name: str) -> None:
    file.write_text(f"other name=other\n{line}\n")
    keys = ApiKeys([], file)
    assert keys.check({"authorization": f"Bearer {key}"}) == name
    assert keys.check({"x-api-key": key}) == name
    assert keys.check({"x-api-key": "wrong", "authorization": "Bearer other"}) == "other"
    assert may(keys, line.strip()) == (line.strip() == key), "the name is no part of the key"


@pytest.mark.parametrize("name", ["", "two words", 'x"y', "x" * 65, "x\x7f", "über"])
def test_a_name_that_does_not_fit_into_a_log_line_is_refused_and_no_key_is_told(file: Path, name: str) -> None:
    file.write_text(f"# keys\nsk-secret name={name}\n")
    with pytest.raises(ConfigError, match=f"api_keys_file: {file}, line 2: a key's name has 1 to 64") as raised:
        ApiKeys([], file)
    assert "sk-secret" not in str(raised.value)


def test_a_name_that_is_changed_counts_after_the_next_look_and_a_bad_one_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    keys = ApiKeys(["zeroth"], file, clock=clock)
    for text, name in (("first name=a", "a"), ("first name=b", "b"), ("first name=", "b"), ("first", None)):
        replace(file, text)
        clock.now += LOOK_EVERY_S
        assert keys.check({"x-api-key": "first"}) == name
    assert keys.check({"x-api-key": "zeroth"}) is None
    assert caplog.text.count("line 1: a key's name") == 1
    assert "first" not in caplog.text


# ── the proxy ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models"])
async def test_everything_below_v1_asks_for_a_key(path: str) -> None:
    async with proxy_in_front_of(api_keys=("secret",)) as house:

        async def status(headers: dict[str, str]) -> int:
            method = "GET" if path.endswith("models") else "POST"
            call = house.call_raw(path, b"{}", headers, method)
            answer = await call.answer()
            if answer.status == 401:
                error = answer.error
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.headers["x-request-id"]
            return answer.status

        assert [await status(headers) for headers in ({}, {"x-api-key": "no"})] == [401, 401]
        assert await status({"x-api-key": "secret"}) != 401
        assert not house.prefiller.generations()


async def test_probes_and_scrapers_need_no_key() -> None:
    async with proxy_in_front_of(api_keys=("secret",)) as house:
        for path in ("/health", "/ping", "/ready", "/metrics", "/status"):
            assert (await house.get(path)).status == 200


async def test_an_engines_version_needs_a_key() -> None:
    async with proxy_in_front_of(api_keys=("secret",)) as house:
        for headers, status in (({}, 401), ({"x-api-key": "no"}, 401), ({"x-api-key": "secret"}, 404)):
            answer = await house.call_raw("/version", b"", method="GET", headers=headers).answer()
            assert answer.status == status  # this kind of engine tells no version


async def test_a_body_is_not_read_without_a_key() -> None:
    async with proxy_in_front_of(api_keys=("secret",), max_body_bytes=10) as house:
        assert (await house.call_raw("/v1/completions", b"x" * 100).answer()).status == 401


async def test_keys_from_a_file(file: Path) -> None:
    async with proxy_in_front_of(api_keys_file=file) as house:
        assert (await house.post()).status == 401
        assert (await house.post(headers={"x-api-key": "second"})).status == 200


@pytest.mark.parametrize(
    ("options", "shown", "reaches_engines"),
    [
        ({}, "Bearer mine", True),
        ({"api_keys": ("secret",)}, "Bearer secret", False),
        ({"engine_api_key": "theirs"}, "Bearer mine", False),
        ({"engine_api_key": "theirs", "api_keys": ("secret",)}, "Bearer secret", False),
    ],
)
async def test_whose_authorization_the_engines_see(
    options: dict[str, object], shown: str, reaches_engines: bool
) -> None:
    async with proxy_in_front_of(**options) as house:
        assert (await house.post(headers={"authorization": shown, "x-api-key": "x"})).status == 200
        for engine in (house.prefiller, house.decoder):
            headers = engine.generations()[0].headers
            assert headers.get("authorization") == (shown if reaches_engines else None)
            assert "x-api-key" not in headers


@pytest.mark.parametrize("kind", ["relay", "httpx"])
async def test_the_engines_key_goes_with_every_call(kind: Literal["relay", "httpx"]) -> None:
    seen: list[str | None] = []
    answering: set[asyncio.Task[None] | None] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = dict(line.split(": ", 1) for line in head.decode().lower().splitlines()[1:] if line)
                await reader.readexactly(int(lines.get("content-length", 0)))
                seen.append(lines.get("authorization"))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for key in ("theirs", None):
            settings = Settings(engine_api_key=key, engine_client=kind)
            client = http_client(settings)(InstanceSettings(name="p", role="prefill", url=url))
            await client.get("/health", timeout_s=1)
            leg = await client.post("/v1/completions", b"{}", {"x-request-id": "r"})
            await leg.read()
            leg.close()
            await client.aclose()
        await asyncio.gather(*filter(None, answering))
    assert seen == ["bearer theirs"] * 2 + [None] * 2
