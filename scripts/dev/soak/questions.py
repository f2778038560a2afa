"""The module knows what clients ask, and the answers, which are learnt from one engine alone before anything goes
wrong."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from scripts.dev.soak.plan import BUFFER_PAGES, CHUNK_SIZE, MAX_MODEL_LEN, MODEL, SMALL_BUFFER_PAGES
from scripts.dev.soak.reply import Reply, Said

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_ANSWER = 24
LENGTHS = (
    *(1, 2, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 7),
    *(SMALL_BUFFER_PAGES * CHUNK_SIZE, SMALL_BUFFER_PAGES * CHUNK_SIZE + 1, 150, 200, 300),
    *(BUFFER_PAGES * CHUNK_SIZE, BUFFER_PAGES * CHUNK_SIZE + 30),
)
"""The lengths of prompts, in tokens. The last one fits no decoder's buffer."""
WORDS = ("every", "morning", "she", "opened", "a", "window", "and", "listened", "to", "rain", "on", "the", "roof")


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer is the right answer to a question; it is greedy, so that there is only one."""

    said: Said
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Question:
    """Question is a request's body but for ``stream``, ``n`` and the like. Without an `answer` it must be refused as
    too long."""

    path: str
    body: dict[str, Any]
    answer: Answer | None = None

    def ask(self, *, stream: bool, n: int = 1, with_logprobs: bool = True) -> dict[str, Any]:
        """Returns the whole body."""
        body = {"model": MODEL, "temperature": 0, "stream": stream, **self.body}
        if n > 1:
            body["n"] = n
        if stream:
            body["stream_options"] = {"include_usage": True}
        if with_logprobs:
            body |= {"logprobs": True} if self.path == CHAT else {"logprobs": 0}
        return body


def make_questions(dice: random.Random) -> list[Question]:
    """Returns questions without answers yet; the last one never gets one."""
    by_ids = [_completion(_ids(dice, length), dice) for length in LENGTHS for _ in range(2)]
    by_text = [_completion(_sentence(dice), dice) for _ in range(6)]
    chats = [_chat(dice) for _ in range(6)]
    return [*by_ids, *by_text, *chats, _completion(_ids(dice, MAX_MODEL_LEN + 50), dice)]


async def learn(url: str, questions: list[Question]) -> AsyncIterator[Question]:
    """Yields each question with the answer of the engine at `url`, and some again with a stop string out of that
    answer."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        for index, question in enumerate(questions[:-1]):
            known = replace(question, answer=await _answer(client, question))
            yield known
            if index % 3 == 0 and (stopped := _with_stop(known)) is not None:
                yield replace(stopped, answer=await _answer(client, stopped))
    yield questions[-1]


async def _answer(client: httpx.AsyncClient, question: Question) -> Answer:
    response = await client.post(question.path, json=question.ask(stream=False))
    response.raise_for_status()
    reply = Reply(response.status_code)
    reply.feed_body(response.content)
    usage = reply.usage
    assert usage is not None
    assert usage.prompt_tokens is not None
    assert usage.completion_tokens is not None
    return Answer(reply.choices[0], usage.prompt_tokens, usage.completion_tokens)


def _with_stop(question: Question) -> Question | None:
    """Returns the question with the first two tokens' seam as a stop string, or None for an answer that is too
    short."""
    assert question.answer is not None
    tokens = question.answer.said.tokens
    if len(tokens) < 3:
        return None
    return replace(question, body={**question.body, "stop": [tokens[0][-1:] + tokens[1][:1]]}, answer=None)


def _completion(prompt: list[int] | str, dice: random.Random) -> Question:
    return Question(COMPLETIONS, {"prompt": prompt, "max_tokens": dice.randint(1, MAX_ANSWER)})


def _chat(dice: random.Random) -> Question:
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": _sentence(dice)}]
    return Question(CHAT, {"messages": messages, "max_tokens": dice.randint(1, MAX_ANSWER)})


def _ids(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(10, 500) for _ in range(length)]


def _sentence(dice: random.Random) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randint(1, 30)))
