"""LegRunner runs the two legs of an attempt, each from end to end: every path through the proxy is made of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from pdproxy.aio.deadline import Deadline
from pdproxy.engines.adapter import Call, DecodeLeg, MalformedReply, NobodyReached, NoHandoff, PrefillReply
from pdproxy.errors import NotAssembled
from pdproxy.fleet.instance import Instance
from pdproxy.openai.apis import marked
from pdproxy.openai.request import RESPONSES, GenerationRequest
from pdproxy.orchestrator.attempt import Attempt
from pdproxy.orchestrator.context import RequestContext
from pdproxy.orchestrator.leg import OpenLeg
from pdproxy.orchestrator.passing import mark_of
from pdproxy.orchestrator.relay import Relay
from pdproxy.telemetry.observer import LegObserver

log = logging.getLogger(__name__)


class LegRunner:
    """LegRunner opens legs. It returns what a prefill leg replies, and has a decode leg's answer relayed to the client.

    Its limits are seconds: for a prefill leg as a whole, for the first piece of a decoder's answer, for the time
    between two pieces, and for an answer that is asked for as a whole. And bytes, for one event of a stream.
    """

    def __init__(
        self,
        observer: LegObserver,
        *,
        prefill_timeout_s: float,
        first_byte_timeout_s: float,
        idle_timeout_s: float,
        whole_timeout_s: float,
        max_event_bytes: int,
    ) -> None:
        self._observer = observer
        self.prefill_timeout_s = prefill_timeout_s
        self.first_byte_timeout_s = first_byte_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.whole_timeout_s = whole_timeout_s
        self.max_event_bytes = max_event_bytes
        # State: the decoders of whose streams no whole answers can be made, each with its process (`epoch`) of which
        # that was found out, for chats and for completions.
        self._whole_only: dict[tuple[str, bool], str | None] = {}

    def asked(self, attempt: Attempt) -> GenerationRequest:
        """Returns the client's request in the form in which the decoder is asked. That is a stream, also where the
        client wants a whole answer, if the two are known to say the same."""
        context, decoder = attempt.context, attempt.decoder
        if context.request.endpoint == RESPONSES:
            fields = marked(context.request, mark_of(decoder.name, context.record.key_name))
            return replace(context.request, fields=fields)
        as_stream = context.as_stream
        if as_stream is None or decoder.adapter.traits.streams_whole is None:
            return context.request
        # No process has the epoch "": a decoder that is not in the table is asked for a stream.
        if self._whole_only and self._whole_only.get((decoder.name, as_stream.is_chat), "") == decoder.epoch:
            return context.request
        return as_stream

    async def prefill(
        self, attempt: Attempt, body: bytes, *, hands_over: bool = True, limit_s: float | None = None
    ) -> PrefillReply:
        """Runs the prefill leg and returns its reply. It may take `limit_s` seconds, by default the time for a prefill.
        `hands_over` False: no KV goes to the decoder. Raises as `OpenLeg` does, and `LegFailed` for a reply that is
        not what the kind of engine promises."""
        limit_s, prefiller = limit_s or self.prefill_timeout_s, attempt.prefiller
        leg = OpenLeg("prefill", attempt, _call(attempt, body), self._observer, hands_over=hands_over)
        body = b""  # the leg lets go of it when it is sent
        limit = Deadline(
            limit_s,
            lambda: leg.time_out(f"the prefill leg took longer than {limit_s:g} s"),
            attempt.context.limit,
        )
        with limit, prefiller.relied_on(limit, leg.go_down):
            await leg.open()
            try:
                reply = leg.read_now()
                if reply is None:
                    reply = await leg.read()
                return prefiller.adapter.read_prefill(attempt.context.request, reply)
            except NobodyReached as nobody:
                raise leg.reach_nobody(str(nobody)) from nobody
            except NoHandoff as nothing:
                raise leg.hand_nothing(str(nothing)) from nothing
            except MalformedReply as malformed:
                raise leg.fail(str(malformed)) from malformed
            finally:
                leg.close()

    def decode(
        self,
        attempt: Attempt,
        decode: DecodeLeg,
        *,
        asked: GenerationRequest,
        first_byte_s: float,
        needs_text: bool = False,
    ) -> Coroutine[Any, Any, None]:
        """Returns a coroutine that relays the decode leg to the client. `asked` is what its body was made of. Raises as
        `Relay.decode` does."""
        context, traits = attempt.context, attempt.decoder.adapter.traits
        if not traits.resumes:
            context.stream.keep_nothing()
        leg = OpenLeg("decode", attempt, _call(attempt, decode.body), self._observer)
        decode.body = b""  # the leg lets go of it when it is sent
        relay = self.relay(context, begun=attempt.begun, first_byte_s=first_byte_s)
        if asked is not context.as_stream:
            return relay.decode(leg, needs_text=needs_text, opening=decode.opening)
        context.shape = traits.streams_whole
        relayed = relay.assemble(leg, needs_text=needs_text, opening=decode.opening)
        return self._assemble(relayed, attempt.decoder, is_chat=asked.is_chat)

    async def _assemble(self, relayed: Coroutine[Any, Any, None], decoder: Instance, *, is_chat: bool) -> None:
        """Awaits `relayed`. Remembers a decoder of whose streams no whole answers can be made, because its next streams
        would be like this one."""
        epoch = decoder.epoch
        try:
            await relayed
        except NotAssembled as error:
            log.warning("whole answers are not put together from streams of %s: %s", decoder.name, error)
            self._whole_only[decoder.name, is_chat] = epoch
            raise

    def relay(
        self, context: RequestContext, *, begun: Callable[[], None] | None = None, first_byte_s: float = 0.0
    ) -> Relay:
        """Returns a relay to the client. Without `begun` it is for answers that no decoder gives. `first_byte_s` is in
        seconds; 0: nothing is waited for."""
        return Relay(
            context,
            begun=begun,
            first_byte_s=first_byte_s,
            idle_s=self.idle_timeout_s,
            whole_s=self.whole_timeout_s,
            max_event_bytes=self.max_event_bytes,
        )


def _call(attempt: Attempt, body: bytes) -> Call:
    return Call(attempt.context.request.endpoint, body)
