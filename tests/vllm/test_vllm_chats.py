"""Through the proxy every chat is answered, or refused, as by a single vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pdproxy.openai.request import CHAT
from tests.vllm.chats import CHATS, REFUSED, body_of, post
from tests.vllm.engines import Fleet
from tests.vllm.proxy import Proxy, serving

ENGINES = ("single", "prefill-0", "decode-0")
ALL_ENGINES = ENGINES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(using: Fleet) -> AsyncIterator[Proxy]:
    async with serving(using, [using["prefill-0"].url], [using["decode-0"].url]) as proxy:
        yield proxy


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS.keys())
async def test_every_chat_is_answered_as_by_a_single_engine(using: Fleet, proxy: Proxy, fields: dict[str, Any]) -> None:
    expected, got = [await post(url, CHAT, body_of(fields)) for url in (using["single"].url, proxy.url)]
    assert (expected[0], got[0]) == (200, 200), got
    assert got[1]["choices"] == expected[1]["choices"]
    assert got[1]["usage"]["prompt_tokens"] == expected[1]["usage"]["prompt_tokens"]


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED.keys())
async def test_what_the_engine_refuses_is_refused_in_its_words(
    using: Fleet, proxy: Proxy, fields: dict[str, Any]
) -> None:
    expected, got = [await post(url, CHAT, body_of(fields)) for url in (using["single"].url, proxy.url)]
    assert (expected[0], got[0]) == (400, 400), (expected, got)
    assert got[1]["error"]["message"] == expected[1]["error"]["message"]


async def test_its_tokenizer_is_the_one_in_the_folder(proxy: Proxy) -> None:
    fleet = (await proxy.status())["fleet"]
    assert [one["tokenizer"] for one in fleet] == [{"agrees": True, "why": ""}] * 2
