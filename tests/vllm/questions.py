"""What is asked, once of a vLLM that does both halves and once of the proxy, and what has to be the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from tests.vllm.engines import MODEL

FIRST_ID, LAST_ID = 10, 500
WORDS = (
    "the",
    "keeper",
    "counted",
    "ships",
    "while",
    "bread",
    "and",
    "salt",
    "went",
    "over",
    "an",
    "old",
    "stone",
    "bridge",
    "under",
    "stars",
    "nobody",
    "knows",
)


@dataclass(frozen=True)
class Question:
    """`prompt`: ids or text of a completion; messages of a chat."""

    prompt: Any
    is_chat: bool = False
    max_tokens: int = 10
    stream: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        prompt = {"messages" if self.is_chat else "prompt": self.prompt}
        stream = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        return {"model": MODEL, "max_tokens": self.max_tokens, "temperature": 0} | prompt | stream | self.extra


@dataclass(frozen=True)
class Said:
    text: str
    finish_reason: str | None
    usage: tuple[int, int]
    """Tokens of the prompt and of the answer."""


async def ask(client: AsyncOpenAI, question: Question) -> Said:
    endpoint: Any = client.chat.completions if question.is_chat else client.completions
    answer = await endpoint.create(**question.arguments)
    chunks = [chunk async for chunk in answer] if question.stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    usage = next(chunk.usage for chunk in chunks if chunk.usage is not None)
    finish = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
    return Said(
        text="".join(_text(choice) for choice in choices),
        finish_reason=finish[0] if len(finish) == 1 else None,
        usage=(usage.prompt_tokens, usage.completion_tokens),
    )


async def ask_all(client: AsyncOpenAI, questions: Sequence[Question], at_once: int) -> list[Said]:
    limit = asyncio.Semaphore(at_once)

    async def one(question: Question) -> Said:
        async with limit:
            return await ask(client, question)

    return list(await asyncio.gather(*(one(question) for question in questions)))


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)


def ids(dice: random.Random, length: int) -> list[int]:
    return [dice.randint(FIRST_ID, LAST_ID) for _ in range(length)]


def words(dice: random.Random, count: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(count))


def chat(dice: random.Random, count: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": words(dice, 3)}, {"role": "user", "content": words(dice, count)}]


def _text(choice: Any) -> str:
    if hasattr(choice, "text"):
        return choice.text or ""
    part = choice.delta if hasattr(choice, "delta") else choice.message
    return part.content or ""
