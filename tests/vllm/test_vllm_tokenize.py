"""A real vLLM tells at ``/tokenize``, asked as the proxy asks, just what its chat endpoint reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.engines.tokenize import read_tokens, tokenize_call
from pdproxy.openai.request import CHAT, parse
from tests.vllm.chats import CHATS, REFUSED, body_of, post
from tests.vllm.engines import Fleet

ENGINES = ("single",)
ALL_ENGINES = ENGINES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS.keys())
async def test_tokenize_tells_what_the_chat_endpoint_reads(using: Fleet, fields: dict[str, Any]) -> None:
    url = using["single"].url
    call = tokenize_call(parse(CHAT, body_of(fields)))
    status, told = await post(url, call.path, call.body)
    assert status == 200, told
    status, answer = await post(url, CHAT, body_of(fields, return_token_ids=True))
    assert status == 200, answer
    assert read_tokens(json.dumps(told).encode(), with_ids=True)[1] == answer["prompt_token_ids"]


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED.keys())
async def test_it_refuses_there_what_the_chat_endpoint_refuses(using: Fleet, fields: dict[str, Any]) -> None:
    url = using["single"].url
    call = tokenize_call(parse(CHAT, body_of(fields)))
    told, answer = await post(url, call.path, call.body), await post(url, CHAT, body_of(fields))
    assert (told[0], answer[0]) == (400, 400), (told, answer)
