"""The module finds out how many tokens a target makes of our words. It asks the target, so that no tokenizer is
needed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pdproxy.engines.http.base import EngineBroken, EngineClient, EngineUnreachable
from pdproxy.loadtest.answer import Answer
from pdproxy.loadtest.corpus import Corpus, Piece, Scale
from pdproxy.loadtest.errors import TargetError
from pdproxy.loadtest.target import Target

FEW, MANY = 16, 96
KEYS = (1, 1 << 30, 1 << 50)


async def calibrate(client: EngineClient, target: Target, corpus: Corpus) -> Scale | None:
    """Returns the scale that follows from a few short prompts and the token counts reported for them, or None where the
    target does not tell them. Raises `TargetError` where the target does not answer."""
    few = [await _count(client, target, corpus, key, FEW) for key in KEYS]
    many = [await _count(client, target, corpus, key, MANY) for key in KEYS]
    return _scale(few, many)


def _scale(few: Sequence[int | None], many: Sequence[int | None]) -> Scale | None:
    """Returns the straight line through the two means, or None if there is none that rises."""
    known_few, known_many = ([count for count in counts if count is not None] for counts in (few, many))
    if not known_few or not known_many:
        return None
    low, high = sum(known_few) / len(known_few), sum(known_many) / len(known_many)
    per_word = (high - low) / (MANY - FEW)
    return Scale(per_word, max(0.0, low - per_word * FEW)) if per_word > 0 else None


async def _count(client: EngineClient, target: Target, corpus: Corpus, key: int, num_words: int) -> int | None:
    text = corpus.render([Piece(key, num_words)], Scale())
    body = target.body([text], num_tokens=1, is_stream=False)
    answer = Answer(lambda: 0.0, asyncio.get_running_loop().create_future())
    try:
        async with asyncio.timeout(target.timeout_s):
            leg = await client.post(target.path, body, target.headers)
            try:
                answer.take_whole(leg.status, await leg.read())
            finally:
                leg.close()
    except (EngineUnreachable, EngineBroken, TimeoutError) as error:
        raise TargetError(f"{target.url} does not answer: {error}") from None
    if answer.error:
        raise TargetError(f"{target.url} does not answer: {answer.error}: {answer.complaint}")
    return None if answer.usage is None else answer.usage.prompt_tokens
