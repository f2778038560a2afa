"""TokenizerCheck compares each engine's tokenizer with the proxy's, and measures what its chat template adds.

The proxy reads a model's tokenizer.json as it is. Engines build theirs through transformers, which for whole families
of models replaces parts of the file by its own. Then ids and counts of the one are worth nothing to the other. So every
new engine process is given a text on which tokenizers differ, before it gets requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from math import ceil
from typing import Any

import msgspec

from pdproxy.engines.adapter import Call, MalformedReply
from pdproxy.engines.http.base import EngineBroken, EngineUnreachable, LocalFault
from pdproxy.engines.one_token import read_one_token
from pdproxy.engines.tokenize import PATH, read_tokens
from pdproxy.errors import EngineReply
from pdproxy.fleet.instance import Health, Instance
from pdproxy.fleet.token_counts import TokenCounts, TokenizerReport, post
from pdproxy.ids import fresh_id
from pdproxy.openai.request import COMPLETIONS, parse
from pdproxy.tokens.bounds import UNSEEN, ChatFrame
from pdproxy.tokens.tokenizer import FastTokenizer

log = logging.getLogger(__name__)

SAMPLE = (
    "Numbers: 1 12 123 1234567890, 3.14, 1,000.  Runs   of     spaces\t\tand tabs,\n\n\nlines \r\n and  \n   ends.   "
    "d'accord, I'LL, it's, we've; CamelCase_snake-kebab/path\\to, <b>&amp;</b> {\"a\": [1, -2]} #!? ... -- == "
    "\u00e9t\u00e9 e\u0301te\u0301 \u212b \ufb01 \uff21\uff22 \u0130 stra\u00dfe \u00a0\u2009\u3000 "
    "\u4f60\u597d\u4e16\u754c \u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4 "
    "\u0420\u0443\u0441 \u0639\u0631\u0628\u064a "
    "\U0001f642\U0001f469\u200d\U0001f680 \u2581x  "
)
"""A text on which tokenizers differ. It has digits, runs of white space, contractions, accents composed and decomposed,
letters that normal forms change, several scripts, emoji, and white space at the end."""
MAX_TRIES = 3
"""Number of looks at one process that may fail before the comparison is given up."""
_MARGIN_TOKENS = 32
"""The number of tokens that a template may add to other chats beyond those that it added to the measured ones."""
_USER, _ASSISTANT = ({"role": role, "content": "a"} for role in ("user", "assistant"))
_SHORT_CHAT, _LONG_CHAT = [_USER], [_USER, _ASSISTANT, _USER]

TokenizerOf = Callable[[str | None], FastTokenizer | None]


class TokenizerCheck:
    """TokenizerCheck reports to `counts` what each instance's tokenizer is like; `tokenizer_of` has the proxy's own, by
    model.

    Mutable state: how many looks at each instance's process are left, and at how many of these numbers it is time to
    forget those of processes that have gone.
    """

    def __init__(self, counts: TokenCounts, tokenizer_of: TokenizerOf, *, timeout_s: float) -> None:
        self._counts = counts
        self._tokenizer_of = tokenizer_of
        self._timeout_s = timeout_s
        self._num_left: dict[Instance, int] = {}
        self._num_kept = 0

    async def look(self, instance: Instance) -> None:
        """Compares the process that runs at `instance` now, unless that was done. Never raises for what the instance
        does."""
        if instance.health not in (Health.ALIVE, Health.READY):
            return
        if self._counts.report_of(instance) is None:
            self._counts.report(instance, TokenizerReport(instance.epoch))
            if len(self._num_left) >= self._num_kept:  # rarely: while a large fleet comes up, everybody is new
                for gone in [one for one in self._num_left if self._counts.report_of(one) is None]:
                    del self._num_left[gone]
                self._num_kept = 2 * len(self._num_left) + 1
            self._num_left[instance] = MAX_TRIES
        if not self._num_left[instance]:
            return
        num_left = self._num_left[instance] - 1
        try:
            async with asyncio.timeout(self._timeout_s):
                report, num_left = await self._look(instance), 0
        except LocalFault:
            return  # it was not asked, and is asked another time
        except (EngineUnreachable, EngineBroken, MalformedReply, EngineReply, TimeoutError) as error:
            why = f"its tokenizer could not be compared: {str(error) or 'it took too long'}"
            report = TokenizerReport(instance.epoch, None, why)
        self._num_left[instance] = num_left
        self._counts.report(instance, report)
        if report.agrees is False or (num_left == 0 and report.agrees is None and self._tokenizers(instance)):
            log.warning("%s: %s; its prompts are not counted here, and it is sent no ids", instance.name, report.why)

    async def _look(self, instance: Instance) -> TokenizerReport:
        frame = await self._frame(instance)
        tokenizers = self._tokenizers(instance)
        if not tokenizers:
            return TokenizerReport(instance.epoch, None, "the proxy has no tokenizer of its model", frame)
        for tokenizer in tokenizers:
            if (difference := await _difference(instance, tokenizer)) is not None:
                return TokenizerReport(instance.epoch, False, difference, frame)
        return TokenizerReport(instance.epoch, True, "", frame)

    def _tokenizers(self, instance: Instance) -> set[FastTokenizer]:
        """Returns the proxy's own tokenizers for the models that are served there."""
        found = {self._tokenizer_of(model) for model in instance.models or (None,)}
        return {tokenizer for tokenizer in found if tokenizer is not None}

    async def _frame(self, instance: Instance) -> ChatFrame | None:
        """Returns what the instance's template adds to short chats; None where it does not take them."""
        try:
            short, long = [await _count(instance, messages=chat) for chat in (_SHORT_CHAT, _LONG_CHAT)]
        except (EngineReply, MalformedReply):
            return None
        return ChatFrame(short + _MARGIN_TOKENS, max(UNSEEN.message_tokens, ceil((long - short) / 2)))


async def _difference(instance: Instance, tokenizer: FastTokenizer) -> str | None:
    """Returns in words how `instance` tokenizes a text differently from `tokenizer`; None where it does not."""
    text = SAMPLE + "".join(tokenizer.added_tokens)
    ours = tokenizer.ids(text, add_special_tokens=True)
    try:
        theirs = await _ids(instance, prompt=text)
    except EngineReply as reply:
        if not instance.adapter.traits.serves_alone or reply.status not in (403, 404, 405, 501):
            raise
        theirs = None
    count = len(theirs) if theirs is not None else await _count_by_answer(instance, text)
    if count != len(ours):
        return f"of a sample text its tokenizer makes {count} tokens, the proxy's {len(ours)}"
    if theirs is None or theirs == ours:
        return None
    place = next(place for place, (one, other) in enumerate(zip(theirs, ours, strict=True)) if one != other)
    return f"its tokenizer makes another token {place} of a sample text than the proxy's"


async def sample_ids(instance: Instance) -> list[int]:
    """Returns the ids that the instance's tokenizer makes of `SAMPLE`.

    Raises `EngineReply` where it does not tell, `MalformedReply`, `EngineUnreachable`, `EngineBroken`, `TimeoutError`.
    """
    return await _ids(instance, prompt=SAMPLE)


async def _ids(instance: Instance, **fields: Any) -> list[int]:
    _, ids = read_tokens(await _tokenize(instance, fields), with_ids=True)
    assert ids is not None
    return ids


async def _count(instance: Instance, **fields: Any) -> int:
    return read_tokens(await _tokenize(instance, fields), with_ids=False)[0]


async def _tokenize(instance: Instance, fields: dict[str, Any]) -> bytes:
    return await post(instance, Call(PATH, msgspec.json.encode(_model(instance) | fields)), {})


async def _count_by_answer(instance: Instance, text: str) -> int:
    """Returns the number of the prompt's tokens, as the usage of a one-token answer tells it. Raises `MalformedReply`
    where the answer does not tell."""
    body = json.dumps(_model(instance) | {"prompt": text, "max_tokens": 1, "temperature": 0}).encode()
    request_id = f"canary-{fresh_id()}"
    headers = {"x-request-id": request_id, **instance.adapter.leg_headers(request_id, fresh_id())}
    call = Call(COMPLETIONS, instance.adapter.one_token_body(parse(COMPLETIONS, body)))
    usage = read_one_token(await post(instance, call, headers)).usage
    if usage is None:
        raise MalformedReply("its answer does not tell how long the prompt was")
    return usage.tokens


def _model(instance: Instance) -> dict[str, str]:
    return {"model": min(instance.models)} if instance.models else {}
