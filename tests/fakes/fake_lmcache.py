"""Scripted vLLM servers under LMCache's PD connector: a prefiller pushes pages that have their names from the tokens.

A page is one chunk of a prompt, the last one as short as it is, named by all tokens up to its end. A decoder looks for
the pages of its prompt less its last `skip_last` tokens and takes out those that it finds; nothing else ever frees one.
(LMCache 0.5.6.)
"""

from __future__ import annotations

from typing import Any

from pdproxy.config.values import Engine, Role
from tests.fakes.fake_engine import FIRST_ID, FakeReply, Seen, json_reply
from tests.fakes.fake_vllm import PARAMS, FakeVllm, ids_of
from transfer.wire import ProxyNotif

ALLOC_PORTS_FROM = 100
"""Above the receivers' own."""
BYTES_PER_TOKEN = 64
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "torch_dtype": "float32",
}
"""Of a model of so many bytes per token, on each rank."""


class FakeLMCache(FakeVllm):
    """One half of a pair."""

    kind: Engine = "lmcache"

    def __init__(self, role: Role, *, num_ranks: int = 1, skip_last: int = 1, **options: Any) -> None:
        super().__init__(role, **options)
        self.num_ranks = num_ranks
        self.skip_last = skip_last
        self.notifies = "ready"
        """What a prefiller says of its pushes: ready, twice (each rank), lost (nothing), one (rank only), failed, held
        (nothing until `notify`)."""
        self.names_ranks = False
        """Its notifications say more than LMCache's own do."""
        self.most_pages = 0
        self.held: list[tuple[FakeLMCache, str]] = []

    @property
    def settings(self) -> dict[str, Any]:
        if self.role == "prefill":
            return super().settings
        ports = [self.port + rank for rank in range(self.num_ranks)]
        return super().settings | {
            "receiver_ports": ports,
            "alloc_ports": [port + ALLOC_PORTS_FROM for port in ports],
            "pd_buffer_size": self.num_pages * self.chunk_size * BYTES_PER_TOKEN,
            "chunk_size": self.chunk_size,
        }

    async def generate(self, seen: Seen) -> FakeReply:
        await self.pass_point(self.role)
        if isinstance(failure := self.fail_at.get(self.role), FakeReply):
            return failure
        if self.role == "prefill":
            return await self._read_and_push(seen.path, seen.body)
        self._take(ids_of(seen.body))
        return await self.answer(seen.path, seen.body, seen.headers["x-request-id"])

    # ── a prefiller ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _read_and_push(self, path: str, body: dict[str, Any]) -> FakeReply:
        params = body[PARAMS]
        if (spec := params.get("disagg_spec")) is None:
            assert params == {"lmcache.skip_save": True}, "it would die of this"
            return json_reply(self.one_token(path, body))
        decoder = next(one for one in self.decoders if one.port in spec["receiver_init_port"])
        assert spec["receiver_alloc_port"] == decoder.settings["alloc_ports"]
        await decoder.until_thawed()
        decoder.take_in(ids_of(body))
        await self.pass_point("prefill_done")
        self._notify(decoder, spec["req_id"], self.notifies)
        told = {"first_tok": FIRST_ID + self._numbers(body).start} if params.get("ret_first_tok") else None
        return json_reply(self.one_token(path, body) | {PARAMS: told})

    def notify(self) -> None:
        """What was held back."""
        while self.held:
            self._notify(*self.held.pop(), "ready")

    def _notify(self, decoder: FakeLMCache, attempt: str, how: str) -> None:
        if how == "held":
            self.held.append((decoder, attempt))
        ranks = {"lost": 0, "held": 0, "one": 1}.get(how, decoder.num_ranks)
        for rank in range(ranks):
            notification = ProxyNotif(req_id=attempt)
            if self.names_ranks or how in ("twice", "failed"):
                status = "failed" if how == "failed" else "ready"
                notification = ProxyNotif(req_id=attempt, attempt=attempt, rank=rank, status=status)
            for _ in range(2 if how == "twice" else 1):
                decoder.sink(notification)

    # ── a decoder ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_occupied(self) -> int:
        """Pages of its PD buffer that are in use. It does not say so itself."""
        return sum(self.pages.values())

    def _names(self, ids: list[int]) -> list[tuple[int, ...]]:
        ends = [*range(self.chunk_size, len(ids), self.chunk_size), len(ids)]
        return [tuple(ids[:end]) for end in ends] if ids else []

    def take_in(self, ids: list[int]) -> None:
        """What is there already is not sent again."""
        for name in self._names(ids):
            self.pages[name] = 1
        self.most_pages = max(self.most_pages, len(self.pages))
        assert len(self.pages) <= self.num_pages, "more pages than there are"

    def _take(self, ids: list[int]) -> None:
        for name in self._names(ids[: len(ids) - self.skip_last]):
            self.pages.pop(name, None)
