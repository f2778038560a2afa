"""The scripted engine of docs/adding-an-engine.md: a prefiller keeps KV under a ticket, a decoder fetches it."""

from __future__ import annotations

from typing import Any

from tests.fakes.fake_engine import FakeReply, Seen, error_reply, json_reply
from tests.fakes.fake_vllm import PARAMS, FakeVllm, ids_of


class FakeTicket(FakeVllm):
    """Answers as `FakeVllm` does. Mutable state besides: how many tickets it gave out."""

    kind: Any = "ticket"
    """The proxy's own sources do not know this kind."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gives_tickets = True
        self._num_tickets = 0

    async def tell(self, seen: Seen) -> FakeReply:
        if seen.path == "/kv":
            facts = {"process": self.epoch, "version": "1", "page_tokens": self.chunk_size}
            return json_reply(facts | {"pages": self.num_pages, "used": self.num_occupied})
        if seen.path == "/kv/drop":
            return self._drop(seen.body["ticket"])
        return await super().tell(seen)

    async def _prefill(self, path: str, body: dict[str, Any]) -> FakeReply:
        await self.pass_point("prefill_done")
        answer = self.one_token(path, body)
        if not (body.get(PARAMS) or {}).get("keep") or not self.gives_tickets:
            return json_reply(answer)
        self._num_tickets += 1
        ticket = f"ticket-{self._num_tickets}"
        self.pages[ticket] = self.pages_of(len(ids_of(body)))
        return json_reply(answer | {PARAMS: {"ticket": ticket}})

    async def _decode(self, path: str, body: dict[str, Any]) -> FakeReply:
        """Fetches the KV first, with which the prefiller's pages become free."""
        ticket = (body.get(PARAMS) or {}).get("ticket")
        if ticket is not None:
            keeper = next((one for one in self.prefillers if ticket in one.pages), None)
            if keeper is None:
                return error_reply(404, f"nobody knows {ticket}")
            del keeper.pages[ticket]
        return await self.answer(path, body, f"leg-{len(self.calls)}")

    def _drop(self, ticket: str) -> FakeReply:
        self.pages.pop(ticket, None)
        return json_reply({"dropped": True})
