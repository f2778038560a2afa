"""What a stand-in for an engine says: a language in which the answer to every prompt is known beforehand.

Id ``n`` is the text `` wn``, and 0 ends an answer. What comes next follows from the first id, the last one and their
number, so that nobody who has lost a part of the prompt says the right thing.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.helpers.standin_http import Reply

MODEL = "m"
EOS = 0
NUM_IDS = 200


def next_id(ids: list[int]) -> int:
    return (3 * ids[-1] + 5 * len(ids) + ids[0]) % NUM_IDS


def text_of(token: int) -> str:
    return "" if token == EOS else f" w{token}"


def ids_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"w(\d+)", text)] or [1]


def rendered(messages: list[dict[str, Any]]) -> list[int]:
    """Of a chat: every message and whose turn it is."""
    return [one for message in messages for one in (*ids_of(message["content"]), 198)]


def written(ids: list[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """The answer's ids, its end included."""
    answer: list[int] = []
    while len(answer) < max_tokens:
        answer.append(next_id(ids + answer))
        if answer[-1] == EOS and not ignore_eos:
            break
    return answer


def prompt_ids(path: str, fields: dict[str, Any]) -> list[int]:
    if path.endswith("/chat/completions"):
        told = (fields.get("kv_transfer_params") or {}).get("prompt_token_ids")
        return told or rendered(fields["messages"])
    prompt = fields["prompt"]
    return prompt if isinstance(prompt, list) else ids_of(prompt)


def budget(path: str, fields: dict[str, Any]) -> int:
    """Of a completion 16 where nothing is said, of a chat what the context holds."""
    if path.endswith("/chat/completions"):
        given = fields.get("max_completion_tokens") or fields.get("max_tokens")
        return 64 if given is None else int(given)
    given = fields.get("max_tokens", 16)
    return 64 if given is None else int(given)


def cut(fields: dict[str, Any], answer: list[int]) -> tuple[list[str], str]:
    """Pieces of text, one per token, and why they end."""
    stops = fields.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    pieces: list[str] = []
    for token in answer:
        text = "".join(pieces)
        whole_text = text + text_of(token)
        at = min((whole_text.index(stop) for stop in stops if stop in whole_text), default=None)
        if at is not None:
            return [*pieces, whole_text[len(text) : max(at, len(text))]], "stop"
        pieces.append(text_of(token))
    return pieces, "stop" if answer[-1] == EOS and not fields.get("ignore_eos") else "length"


def whole(path: str, fields: dict[str, Any], ids: list[int], answer: list[int], told: Any) -> Reply:
    pieces, finish = cut(fields, answer)
    text, is_chat = "".join(pieces), path.endswith("/chat/completions")
    choice: dict[str, Any] = {"index": 0}
    choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None}
    if fields.get("return_token_ids"):
        choice |= {"token_ids": answer[: len(pieces)], "prompt_token_ids": ids}
    body: dict[str, Any] = {
        "id": "w-1",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 7,
        "model": MODEL,
    }
    body |= {"choices": [choice], "usage": usage(ids, answer[: len(pieces)]), "kv_transfer_params": told}
    return Reply(json.dumps(body).encode())


def usage(ids: list[int], answer: list[int]) -> dict[str, int]:
    counts = {"prompt_tokens": len(ids), "completion_tokens": len(answer)}
    return counts | {"total_tokens": sum(counts.values())}
