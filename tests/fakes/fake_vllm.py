"""Scripted vLLM servers: what they say of themselves, their answers; and pairs of them under the NixlConnector.

A prefiller pins the blocks of a prompt that it hands over, until a decoder has told it that it needs them no more, or
their lease is over. Seen with vLLM 0.32, and so here: a leg closed before its reply frees them at once; a decoder tells
the prefiller when it has pulled, when its leg is closed, and when it refuses a leg; one that breaks tells nobody.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pdproxy.config.values import Engine, Role
from pdproxy.engines.recognise import LOOKS
from tests.fakes.fake_engine import FIRST_ID, WORDS, FakeReply, ScriptedEngine, Seen, error_reply, for_each, json_reply

PARAMS = "kv_transfer_params"
ALWAYS_IN_AN_ANSWER = ("service_tier", "system_fingerprint", PARAMS, "ec_transfer_params", "metrics")
ALWAYS_IN_A_CHAT = (*ALWAYS_IN_AN_ANSWER, "prompt_logprobs", "prompt_token_ids", "prompt_text")
ALWAYS_IN_A_CHAT_CHOICE = ("stop_reason", "token_ids", "routed_experts")
ALWAYS_IN_A_CHOICE = (*ALWAYS_IN_A_CHAT_CHOICE, "prompt_logprobs", "prompt_token_ids")
"""Null where there is nothing to say."""
MESSAGE = {"role": "assistant"} | dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))


def ids_of(body: dict[str, Any]) -> list[int]:
    """The prompt as this tokenizer reads it: one id per word, below those of answers."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return prompt
    given = (body.get(PARAMS) or {}).get("prompt_token_ids")
    if given is not None:
        return list(given)
    text = prompt if prompt is not None else " ".join(str(message["content"]) for message in body["messages"])
    return [1 + sum(word.encode()) % 90 for word in str(text).split()]


def _finish(numbers: range) -> str:
    return "stop" if numbers.stop == len(WORDS) else "length"


class FakeVllm(ScriptedEngine):
    """A server without a connector. Points: prefill, prefill_done, decode, first, middle.

    It writes `WORDS`, from where its prompt's last ids leave off, as many as it is asked for.
    """

    kind: Engine = "vllm_nixl"

    def __init__(self, role: Role, *, num_pages: int = 64, chunk_size: int = 16, model: str = "tiny") -> None:
        super().__init__(role, num_pages=num_pages, chunk_size=chunk_size)
        self.model = model
        self.version = "0.32.0"
        self.tells_start = True
        """Of its process; with several API servers vLLM does not."""
        self.tells_cache = True
        """Of its KV cache; with --disable-log-stats vLLM does not."""
        self.num_cached_tokens = 0
        self.num_ranks = 1
        """Data-parallel ranks; each has `num_pages`."""
        self.counts = [0, 0]
        """Tokens that its process has read and written."""

    # ── what it says of itself ──────────────────────────────────────────────────────────────────────────────────────

    def read_ids(self, body: dict[str, Any]) -> list[int]:
        return ids_of(body)

    async def tell(self, seen: Seen) -> FakeReply:
        if seen.path == "/health":
            return FakeReply(200, [])
        if seen.path == "/version":
            return json_reply({"version": self.version})
        if seen.path == "/metrics":
            return FakeReply(200, [self._metrics().encode()])
        if seen.path in LOOKS:  # those of other kinds
            return error_reply(404, "there is no such path")
        assert seen.path == "/v1/models"
        card = {"id": self.model, "object": "model", "root": f"/{self.model}", "parent": None, "owned_by": "vllm"}
        return json_reply({"object": "list", "data": [card | {"max_model_len": self.max_model_len}]})

    def _metrics(self) -> str:
        started = [f"process_start_time_seconds {self.epoch}"] if self.tells_start else []
        if not self.tells_cache:
            return "\n".join([*started, ""])
        ranks, num_blocks = range(self.num_ranks), self.num_ranks * (self.num_pages + 1)
        config = f'block_size="{self.chunk_size}",cache_dtype="auto",engine="%s",num_gpu_blocks="{num_blocks}"'
        lines = [f"vllm:cache_config_info{{{config % rank}}} 1.0" for rank in ranks]
        lines += [
            f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {self.occupied_at(rank) / self.num_pages}' for rank in ranks
        ]
        for name, count in zip(("prompt", "generation"), self.counts, strict=True):
            lines += [f'vllm:{name}_tokens_total{{engine="{rank}"}} {count / self.num_ranks}' for rank in ranks]
        return "\n".join([*lines, *started, ""])

    def occupied_at(self, rank: int) -> int:
        """Pages of the rank's memory that are in use."""
        return self.num_occupied

    def _lose_all(self) -> None:
        self.counts = [0, 0]
        super()._lose_all()

    # ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.chunk_size)

    def one_token(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A prefill leg's answer."""
        whole = self.whole(path, body, 1)
        whole["choices"][0]["finish_reason"] = self.finish_at_first or "length"
        return whole

    def whole(self, path: str, body: dict[str, Any], num_words: int | None = None) -> dict[str, Any]:
        is_chat, numbers = path.endswith("chat/completions"), self._numbers(body, num_words)
        texts = "".join(WORDS[number] for number in numbers)
        part = {"message": MESSAGE | {"content": texts}} if is_chat else {"text": texts}
        choice = dict.fromkeys(ALWAYS_IN_A_CHAT_CHOICE if is_chat else ALWAYS_IN_A_CHOICE)
        choice |= self._choice(body, numbers, part, offset=0) | {"finish_reason": _finish(numbers)}
        if body.get("return_token_ids") and not is_chat:
            choice["prompt_token_ids"] = ids_of(body)
        answer: dict[str, Any] = dict.fromkeys(ALWAYS_IN_A_CHAT if is_chat else ALWAYS_IN_AN_ANSWER) | {
            "id": self.answer_id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 1,
            "model": body.get("model"),
            "choices": [choice | {"index": i} for i in range(body.get("n") or 1)],
            "usage": self._usage(body, len(numbers)) | {"completion_tokens_details": None},
        }
        return answer | ({"prompt_token_ids": ids_of(body)} if body.get("return_token_ids") and is_chat else {})

    def stream(self, path: str, body: dict[str, Any]) -> list[bytes]:
        """The finish comes with the last word."""
        is_chat, numbers, offset = path.endswith("chat/completions"), self._numbers(body), 0
        chunks: list[dict[str, Any]] = []
        if is_chat:
            chunks.append({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number in numbers:
            part = {"delta": {"content": WORDS[number]}} if is_chat else {"text": WORDS[number]}
            finish = _finish(numbers) if number == numbers[-1] else None
            choice = self._choice(body, range(number, number + 1), part, offset=offset)
            chunks.append({"choices": [choice | {"finish_reason": finish}]})
            offset += len(WORDS[number])
        chunks = for_each(chunks, body)
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"choices": [], "usage": self._usage(body, len(numbers))})
        head = {"id": self.answer_id, "object": "text_completion", "created": 1, "model": body.get("model")}
        return [*(b"data: " + json.dumps(head | chunk).encode() + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]

    def _numbers(self, body: dict[str, Any], num_words: int | None = None) -> range:
        """Which of `WORDS`: after those that its prompt ends with."""
        start = sum(id_ >= FIRST_ID for id_ in ids_of(body))
        wanted = body.get("max_tokens") or body.get("max_completion_tokens") or len(WORDS)
        return range(start, min(len(WORDS), start + (wanted if num_words is None else num_words)))

    def _choice(self, body: dict[str, Any], numbers: range, part: dict[str, Any], *, offset: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, **part, "logprobs": None, "finish_reason": None}
        if body.get("return_token_ids"):
            choice["token_ids"] = [FIRST_ID + number for number in numbers]
        if body.get("logprobs") and "text" in part:
            texts = [WORDS[number] for number in numbers]
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": [-0.5 - number for number in numbers],
                "top_logprobs": [{WORDS[number]: -0.5 - number} for number in numbers],
                "text_offset": [offset + sum(map(len, texts[:i])) for i in range(len(texts))],
            }
        return choice

    def _usage(self, body: dict[str, Any], num_words: int) -> dict[str, Any]:
        num_tokens = len(ids_of(body))
        return {
            "prompt_tokens": num_tokens,
            "completion_tokens": num_words,
            "total_tokens": num_tokens + num_words,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    async def answer(self, path: str, body: dict[str, Any], key: str) -> FakeReply:
        """As a decoder gives it. Its pages are the request's that `key` names, until the leg is over."""
        over = self._hold(key, body)
        try:
            if not body.get("stream"):
                await self.pass_point("first")
                return FakeReply(200, [json.dumps(self.whole(path, body)).encode()], over=over)
        except BaseException:
            over()
            raise
        chunks: list[bytes | Exception | str] = ["first", *(self.events or self.stream(path, body))]
        chunks.insert(len(chunks) // 2 + 1, "middle")
        return FakeReply(200, chunks, {"content-type": "text/event-stream; charset=utf-8"}, over)

    def _hold(self, key: str, body: dict[str, Any]) -> Any:
        assert key not in self.running, "two requests under one id"
        self.running[key] = self.pages_of(len(ids_of(body)))
        return lambda: self.running.pop(key, None)


class FakeNixl(FakeVllm):
    """One half of a pair under the NixlConnector. More points: handed (blocks are pinned, and the reply is on its way),
    refuse (a leg for a model that it does not serve)."""

    def __init__(self, role: Role, *, lease_s: float = 30.0, rank: int | None = None, **options: Any) -> None:
        super().__init__(role, **options)
        self.lease_s = lease_s
        self.rank = rank
        self.rank_of: dict[str, int] = {}
        """Where the requests are, by their ids."""
        self.keeps_kv = True
        self.handoff = '{ "do_remote_prefill":true,"x": 1.50, "remote_request_id":"%s"}'
        """As it writes it, with the id under which its blocks are pinned."""
        self.refusals_free = True
        """A decoder tells the prefiller of a leg that it refuses."""
        self.expired: list[str] = []
        """What was pinned and nobody asked for."""
        self.most_pages = 0
        """Those that one rank had at once."""
        self.wrong_pulls: list[str] = []
        """Blocks that a decoder read though they were another request's by then."""
        self._leases: dict[str, asyncio.TimerHandle] = {}

    @property
    def settings(self) -> dict[str, Any]:
        ranks = {"data_parallel_rank": self.rank, "data_parallel_size": self.num_ranks if self.num_ranks > 1 else None}
        return super().settings | {name: number for name, number in ranks.items() if number is not None}

    def occupied_at(self, rank: int) -> int:
        return sum(
            num for all_ in (self.pages, self.running) for key, num in all_.items() if self.rank_of.get(key, 0) == rank
        )

    async def generate(self, seen: Seen) -> FakeReply:
        path, body, key = seen.path, seen.body, seen.headers["x-request-id"]
        handed = (body.get(PARAMS) or {}).get("remote_request_id")
        if body.get("model") != self.model:
            return await self._refuse(handed)
        # Where none is named, it takes them in turn.
        rank = int(seen.headers.get("x-data-parallel-rank", len(self.rank_of) % self.num_ranks))
        if rank >= self.num_ranks:
            return error_reply(400, f"data_parallel_rank {rank} is out of range [0, {self.num_ranks}).")
        self.rank_of[key] = rank
        self.counts = [self.counts[0] + len(ids_of(body)), self.counts[1] + 1]
        try:
            await self.pass_point(self.role)
            if isinstance(failure := self.fail_at.get(self.role), FakeReply):
                if 400 <= failure.status < 500:
                    self._tell_prefiller(handed)
                return failure
            is_alone = handed is None and body.get("max_tokens") != 1
            if self.role == "prefill" and not is_alone:
                return await self._hand_over(path, body, key)
            self._pull(handed)
            reply = await self.answer(path, body, key)
        except asyncio.CancelledError:
            self._tell_prefiller(handed)
            raise
        return reply

    # ── a prefiller ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _hand_over(self, path: str, body: dict[str, Any], key: str) -> FakeReply:
        """Cancelled before its reply, nothing is kept."""
        assert key not in self.pages, "two requests under one id"
        self.pages[key] = self.pages_of(len(ids_of(body)))
        self.most_pages = max(self.most_pages, *map(self.occupied_at, range(self.num_ranks)), 0)
        try:
            await self.pass_point("prefill_done")
        except BaseException:
            self.free(key)
            raise
        answer = self.one_token(path, body)
        if not (body.get(PARAMS) or {}).get("do_remote_decode") or not self.keeps_kv:
            self.free(key)
            return json_reply(answer | {PARAMS: None})
        self._leases[key] = asyncio.get_running_loop().call_later(
            self.lease_s, self.when_awake, lambda: self._expire(key)
        )
        await self.pass_point("handed")
        raw = json.dumps(answer)[:-1] + f', "{PARAMS}": {self.handoff % key}}}'
        return FakeReply(200, [raw.encode()])

    def free(self, key: str) -> None:
        self.pages.pop(key, None)
        if (lease := self._leases.pop(key, None)) is not None:
            lease.cancel()

    def _expire(self, key: str) -> None:
        """Unless somebody was quicker while it was frozen."""
        if key in self.pages:
            self.expired.append(key)
            self.free(key)

    def _lose_all(self) -> None:
        for key in list(self.pages):
            self.free(key)
        super()._lose_all()

    # ── a decoder ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _pull(self, handed: str | None) -> None:
        if handed is not None and self._keeper(handed) is None:
            self.wrong_pulls.append(handed)
        self._tell_prefiller(handed)

    async def _refuse(self, handed: str | None) -> FakeReply:
        await self.pass_point("refuse")
        if isinstance(failure := self.fail_at.get("refuse"), FakeReply):
            return failure
        if self.refusals_free:
            self._tell_prefiller(handed)
        return error_reply(404, "The model does not exist.")

    def _tell_prefiller(self, handed: str | None) -> None:
        """It needs these blocks no more."""
        if handed is not None and (keeper := self._keeper(handed)) is not None:
            keeper.when_awake(lambda: keeper.free(handed))

    def _keeper(self, handed: str) -> FakeNixl | None:
        return next((prefiller for prefiller in self.prefillers if handed in prefiller.pages), None)
