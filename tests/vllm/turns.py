"""Conversations that are asked turn by turn, and how much of each turn's prompt was cached."""

from __future__ import annotations

import random
from typing import Any

import httpx

from pdproxy.kv_events.index import KvIndex, PromptBlocks
from tests.vllm.engines import BLOCK_SIZE, MAX_MODEL_LEN, MODEL

NUM_CHATS = 12
ANSWER_TOKENS = 12
WORDS = ["the", "rain", "in", "Spain", "stays", "mainly", "where", "nobody", "goes", "tonight"]


class Chats:
    """Conversations that grow by a question and an answer, each of which begins as some others do."""

    def __init__(self, dice: random.Random, url: str) -> None:
        self.dice = dice
        self.client = httpx.AsyncClient(base_url=url, timeout=120)
        self.chats: list[list[dict[str, str]]] = []
        self.num_tokens: dict[int, int] = {}
        """Of each conversation's last prompt, which is the beginning of its next one."""
        self.num_given_up = 0
        """Turns for which the engine no longer had all of the prompt before."""
        for number in range(NUM_CHATS):
            self.chats.append([{"role": "system", "content": f"Rules {number % 3}: {self.words(60)}"}])

    def words(self, num: int) -> str:
        return " ".join(self.dice.choices(WORDS, k=num))

    async def ids(self, messages: list[dict[str, str]]) -> list[int]:
        told = (await self.client.post("/tokenize", json={"model": MODEL, "messages": messages})).raise_for_status()
        ids: list[int] = told.json()["tokens"]
        return ids

    async def ask(self, messages: list[dict[str, str]], **more: Any) -> tuple[httpx.Response, int]:
        """The answer, and how many of the prompt's tokens the engine had in its cache."""
        body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0} | more
        answer = (await self.client.post("/v1/chat/completions", json=body)).raise_for_status()
        return answer, ((answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")) or 0

    async def turn(self, index: KvIndex, chat: list[dict[str, str]]) -> tuple[int, int]:
        """One more turn: the cached tokens that were predicted, and those that there were."""
        chat.append({"role": "user", "content": self.words(self.dice.randrange(5, 40))})
        ids = await self.ids(chat)
        if len(ids) > MAX_MODEL_LEN - 200:
            del chat[1:-1]
            ids = await self.ids(chat)
            self.num_tokens.pop(id(chat), None)
        predicted = index.cached_tokens(PromptBlocks(ids, MODEL))
        answer, cached = await self.ask(chat)
        chat.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"] or "-"})
        self.num_given_up += cached + BLOCK_SIZE < self.num_tokens.get(id(chat), 0)
        self.num_tokens[id(chat)] = len(ids)
        return predicted, cached
