"""Limits and usage of keys, as clients and operators see them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pdproxy.assemble import make_keys
from pdproxy.config.settings import Settings
from pdproxy.errors import ConfigError
from pdproxy.openai.apis import COUNT_TOKENS
from pdproxy.openai.request import CHAT, MESSAGES, RESPONSES
from pdproxy.server.api_keys import LOOK_EVERY_S, ApiKeys
from pdproxy.telemetry.key_usage import UsageFacts
from pdproxy.telemetry.log import JsonFormatter
from tests.fakes.fake_apis import FakeApis
from tests.fakes.fake_engine import FakeEngine, error_reply
from tests.fakes.proxy_harness import Harness, proxy_in_front_of

pytestmark = pytest.mark.usefixtures("both_ways")
SECRET = "sk-very-secret"
SHOWN = {"authorization": f"Bearer {SECRET}"}


def keys_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    return file


async def figure(house: Harness, name: str, **labels: str) -> float:
    """One figure of the metrics page; 0 where it is not there."""
    page = (await house.get("/metrics")).body.decode()
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    for line in page.splitlines():
        if line.startswith(f"{name}{{") and wanted <= set(line[len(name) + 1 : line.rindex("}")].split(",")):
            return float(line.split()[-1])
    return 0.0


async def test_usage_by_name_is_in_the_metrics_and_the_key_is_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = keys_file(tmp_path, f"{SECRET} name=shop\nplain\n")
    async with proxy_in_front_of(api_keys_file=file, usage_log=True) as house:
        assert (await house.post(headers=SHOWN, prompt="a b c", stream=True)).status == 200
        assert (await house.post(headers={"x-api-key": "plain"})).status == 200
        assert (await house.post(headers={"x-api-key": "wrong-secret"})).status == 401
        assert await figure(house, "pdproxy_key_requests_total", key_name="shop", outcome="done") == 1
        assert await figure(house, "pdproxy_key_prompt_tokens_total", key_name="shop") == 3
        assert await figure(house, "pdproxy_key_output_tokens_total", key_name="shop") == 8
        pages = [(await house.get(path)).body.decode() for path in ("/metrics", "/status")]
    assert not any(word in said for said in [*pages, caplog.text] for word in (SECRET, "wrong-secret"))
    lines = [one for one in caplog.records if isinstance(one.msg, UsageFacts)]
    told = [json.loads(str(one.msg)) for one in lines]
    assert [(one["key_name"], one["outcome"]) for one in told] == [("shop", "done"), (None, "done"), (None, "refused")]
    assert (told[0]["model"], told[0]["num_prompt_tokens"], told[0]["num_output_tokens"]) == ("tiny", 3, 8)
    assert told[0]["total_ms"] > 0
    written = json.loads(JsonFormatter().format(lines[0]))
    assert (written["message"], written["key_name"], written["num_output_tokens"]) == ("usage", "shop", 8)


async def test_without_the_option_nothing_is_logged_for_accounting(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with proxy_in_front_of() as house:
        assert (await house.post()).status == 200
        assert house.proxy.recent.facts()[0]["outcome"] == "done"
    assert not [one for one in caplog.records if isinstance(one.msg, UsageFacts)]


async def test_too_many_requests(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"{SECRET} name=shop rpm=2\nother name=other\n")
    async with proxy_in_front_of(api_keys_file=file) as house:
        for left in ("1", "0"):
            answer = await house.post(headers=SHOWN)
            assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, left)
        answer = await house.post(headers=SHOWN)
        assert answer.status == 429
        assert answer.error["code"] == "rate_limit_exceeded"
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        assert SECRET not in answer.body.decode()
        other = await house.post(headers={"x-api-key": "other"})
        assert other.status == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]
        assert await figure(house, "pdproxy_key_limited_total", key_name="shop") == 1
        assert len(house.prefiller.generations()) == 3


async def test_too_many_messages_are_told_as_anthropic_tells_it(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"{SECRET} name=shop rpm=1\n")
    async with proxy_in_front_of([FakeApis("prefill")], [FakeApis("decode")], api_keys_file=file) as house:
        messages = [{"role": "user", "content": "a"}]
        answers = [await house.post(MESSAGES, {"x-api-key": SECRET}, messages=messages) for _ in range(2)]
        assert [one.status for one in answers] == [200, 429]
        told = answers[1].json()
        assert (told["type"], told["error"]["type"]) == ("error", "rate_limit_error")
        assert 1 <= int(answers[1].headers["retry-after"]) <= 60
        assert answers[1].headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_failure_before_the_first_byte_costs_no_tokens(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"{SECRET} name=shop rpm=100 tpm=1000\n")
    prefiller = FakeEngine("prefill")
    async with proxy_in_front_of([prefiller], api_keys_file=file, retries=0) as house:
        prefiller.fail_at["prefill"] = error_reply(500, "broken")
        answer = await house.post(headers=SHOWN)
        assert answer.status == 502
        prefiller.fail_at.clear()
        answer = await house.post(headers=SHOWN, model="nobody's")
        assert answer.status == 404
        assert (await house.call_raw("/v1/completions", b"{", SHOWN).answer()).status == 400
        answer = await house.post(headers=SHOWN)
        assert answer.headers["x-ratelimit-remaining-requests"] == "96"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= 997  # its own prompt is reserved
        answer = await house.post(headers=SHOWN)
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert 985 <= left <= 992  # the answer before it, of 3 + 8 tokens, and a little that has come back


async def test_a_client_that_leaves_pays_for_what_it_got(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"{SECRET} name=shop tpm=1000\n")
    decoder = FakeEngine("decode")
    decoder.hang_at.add("middle")
    async with proxy_in_front_of([FakeEngine("prefill")], [decoder], api_keys_file=file) as house:
        call = house.call(headers=SHOWN, stream=True)
        await decoder.reached("middle")
        call.leave()
        await call.ended()
        await house.settled()
        assert await figure(house, "pdproxy_key_prompt_tokens_total", key_name="shop") == 3
        assert 1 <= await figure(house, "pdproxy_key_output_tokens_total", key_name="shop") < 8


async def test_tokens_used_up(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"{SECRET} name=shop tpm=12\n")
    async with proxy_in_front_of(api_keys_file=file) as house:
        assert (await house.post(headers=SHOWN)).status == 200
        answer = await house.post(CHAT, headers=SHOWN, messages=[{"role": "user", "content": "a"}])
        assert answer.status in (200, 429)
        answer = await house.post(headers=SHOWN)
        assert answer.status == 429
        assert "tokens per minute" in answer.error["message"]
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-ratelimit-limit-tokens"] == "12"


async def test_several_prompts_are_one_request_and_are_paid_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = keys_file(tmp_path, f"{SECRET} name=shop rpm=10 tpm=1000\n")
    async with proxy_in_front_of(api_keys_file=file, usage_log=True) as house:
        answer = await house.post(headers=SHOWN, prompt=["a b", "c d e"])
        assert answer.status == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        assert await figure(house, "pdproxy_key_requests_total", key_name="shop", outcome="done") == 1
        assert await figure(house, "pdproxy_key_prompt_tokens_total", key_name="shop") == 5
        house.prefiller.fail_at["prefill"] = error_reply(400, "no")
        assert (await house.post(headers=SHOWN, prompt=["a b", "c d e"])).status == 400
        assert await figure(house, "pdproxy_key_prompt_tokens_total", key_name="shop") == 5
    told = [json.loads(str(one.msg)) for one in caplog.records if isinstance(one.msg, UsageFacts)]
    assert [(one["num_prompt_tokens"], one["outcome"]) for one in told] == [(5, "done"), (0, "refused")]


async def test_prompts_that_are_too_many_together_are_told_so(tmp_path: Path) -> None:
    """To come again would not help: the first ones would be served again, and the last refused again."""
    file = keys_file(tmp_path, f"{SECRET} name=shop tpm=12\n")
    async with proxy_in_front_of(api_keys_file=file) as house:
        answer = await house.post(headers=SHOWN, prompt=[[1, 2, 3, 4, number] for number in range(3)])
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
        assert "the prompts have 15 tokens" in answer.error["message"]
        assert "retry-after" not in answer.headers
        answer = await house.post(headers=SHOWN, prompt=[[1, 2, 3, 4, number] for number in range(2)])
        assert answer.status == 200


async def test_what_is_only_counted_costs_nothing(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"{SECRET} name=shop tpm=100\n")
    engines = [FakeApis("prefill")], [FakeApis("decode")]
    messages = [{"role": "user", "content": "a b c d e"}]
    async with proxy_in_front_of(*engines, api_keys_file=file) as house:
        for path in (COUNT_TOKENS, "/tokenize"):
            answer = await house.post(path, SHOWN, messages=messages, prompt="a b c")
            assert (answer.status, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "100")
        assert await figure(house, "pdproxy_key_prompt_tokens_total", key_name="shop") == 0
        answer = await house.post("/v1/embeddings", SHOWN, input="a b c" * 20)
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 70  # a likely part of it, until it is over
        assert await figure(house, "pdproxy_key_prompt_tokens_total", key_name="shop") == 3


async def test_a_client_that_leaves_one_instances_stream_pays_for_what_it_got(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"{SECRET} name=shop tpm=1000\n")
    decoder = FakeApis("decode")
    asked = {"model": "tiny", "input": "a b c", "stream": True}
    async with proxy_in_front_of([FakeApis("prefill")], [decoder], api_keys_file=file) as house:
        first = await house.post(RESPONSES, SHOWN, input="a b c")
        before = await figure(house, "pdproxy_key_output_tokens_total", key_name="shop")
        decoder.hang_at.add("middle")
        asked["previous_response_id"] = first.json()["id"]
        call = house.call_raw(RESPONSES, json.dumps(asked).encode(), SHOWN)
        await decoder.reached("middle")
        call.leave()
        await call.ended()
        assert 1 <= await figure(house, "pdproxy_key_output_tokens_total", key_name="shop") - before < 8


def test_a_front_enforces_its_part(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"{SECRET} name=shop rpm=80 tpm=2000\n")
    keys, _ = make_keys(Settings(api_keys_file=file), 4)
    owner = keys.owner(SHOWN)
    assert owner is not None
    told = dict(owner.headers())
    assert (told[b"x-ratelimit-limit-requests"], told[b"x-ratelimit-limit-tokens"]) == (b"20", b"500")


async def test_many_at_once_settle_to_the_limit(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"{SECRET} name=shop rpm=20 tpm=100000\n")
    async with proxy_in_front_of(api_keys_file=file) as house:
        answers = await asyncio.gather(*(house.post(headers=SHOWN) for _ in range(30)))
        statuses = [answer.status for answer in answers]
        assert (statuses.count(200), statuses.count(429)) == (20, 10)


@pytest.mark.parametrize("line", ["rpm=0", "rpm=-1", "rpm=x", "rpm=1 rpm=2", "speed=3", "tpm=1.5", "rpm="])
def test_limits_that_are_none(tmp_path: Path, line: str) -> None:
    file = keys_file(tmp_path, f"{SECRET} name=shop {line}\n")
    with pytest.raises(ConfigError, match=r"line 1: .*rpm=N") as caught:
        ApiKeys([], file)
    assert SECRET not in str(caught.value)


def test_lines_of_one_name_agree(tmp_path: Path) -> None:
    file = keys_file(tmp_path, "a name=shop rpm=5\nb name=shop tpm=7\nc name=shop\n")
    keys = ApiKeys([], file)
    owners: list[Any] = [keys.owner({"x-api-key": key}) for key in "abc"]
    assert owners[0] is owners[1] is owners[2]
    assert owners[0].rates == (5, 7)
    file.write_text("a name=shop rpm=5\nb name=shop rpm=6\n")
    with pytest.raises(ConfigError, match="unlike limits"):
        ApiKeys([], file)


def test_a_file_that_changes_keeps_what_is_left(tmp_path: Path) -> None:
    now = 0.0
    file = keys_file(tmp_path, "a name=shop rpm=5\n")
    keys = ApiKeys([], file, clock=lambda: now)
    owner = keys.owner({"x-api-key": "a"})
    assert owner is not None
    owner.begin()
    file.write_text("a name=shop rpm=5\nbbb name=new rpm=1\n")
    now += LOOK_EVERY_S
    assert keys.owner({"x-api-key": "a"}) is owner
    assert dict(owner.headers())[b"x-ratelimit-remaining-requests"] == b"4"
    assert keys.owner({"x-api-key": "bbb"}) is not None
