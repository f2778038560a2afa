"""LegRunner runs the two legs of an attempt, each from end to end: every path through the proxy is made of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from pdproxy.aio.deadline import Deadline
from pdproxy.config.settings import Settings
from pdproxy.engines.base import Call, DecodeLeg, MalformedReply, NoHandoff, PrefillReply
from pdproxy.fleet.instance import Instance
from pdproxy.openai.request import GenerationRequest
from pdproxy.orchestrator.context import RequestContext
from pdproxy.orchestrator.leg import NotAssembled, OpenLeg
from pdproxy.orchestrator.relay import Relay
from pdproxy.telemetry.flight import Flight
from pdproxy.telemetry.record import Observer

log = logging.getLogger(__name__)


class LegRunner:
    """LegRunner opens legs and takes their answers where they belong."""

    def __init__(self, settings: Settings, observer: Observer) -> None:
        self._observer = observer
        # State: the decoders of whose streams no whole answers can be made, each with its process (`epoch`) of which
        # that was found out, for chats and for completions.
        self._whole_only: dict[tuple[str, bool], str | None] = {}
        self.go_by(settings)

    def go_by(self, settings: Settings) -> None:
        """Takes over the options; requests that come later are served by them."""
        self._prefill_timeout_s = settings.prefill_timeout_s
        self._idle_timeout_s = settings.idle_timeout_s
        self._whole_timeout_s = settings.whole_timeout_s

    def asked(self, context: RequestContext, decoder: Instance) -> GenerationRequest:
        """Returns the client's request in the form in which `decoder` is asked. That is a stream, also where the client
        wants a whole answer, if the two are known to say the same."""
        as_stream = context.as_stream
        if as_stream is None or decoder.adapter.manner.streams_whole is None:
            return context.request
        if self._whole_only and self._whole_only.get((decoder.name, as_stream.is_chat), "") == decoder.epoch:
            return context.request
        return as_stream

    async def prefill(
        self,
        context: RequestContext,
        flight: Flight,
        prefiller: Instance,
        body: bytes,
        *,
        decoder: Instance | None = None,
        limit_s: float | None = None,
    ) -> PrefillReply:
        """Runs the prefill leg, whose KV is for `decoder`, and returns its reply. It may take `limit_s` seconds, by
        default the time for a prefill. Raises as `OpenLeg` does, and `LegFailed` for a reply that is none."""
        limit_s = limit_s or self._prefill_timeout_s
        leg = self._leg("prefill", context, flight, prefiller, body, peer=decoder)
        limit = Deadline(limit_s, lambda: leg.too_slow(f"the prefill leg took longer than {limit_s:g} s"))
        with limit, prefiller.relied_on(limit, leg.went_down):
            await leg.open()
            try:
                return prefiller.adapter.read_prefill(context.request, await leg.read())
            except NoHandoff as error:
                raise leg.handed_nothing(str(error)) from error
            except MalformedReply as error:
                raise leg.failed(str(error)) from error
            finally:
                leg.close()

    def decode(
        self,
        context: RequestContext,
        flight: Flight,
        decoder: Instance,
        decode: DecodeLeg,
        *,
        asked: GenerationRequest,
        needs_text: bool,
        first_byte_s: float,
        answered: Callable[[], None] | None = None,
        begun: Callable[[], None] | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Returns a coroutine that relays the decode leg to the client. `asked` is what its body was made of.
        `answered` is called when the decoder has seen it, `begun` at the first event that says something.

        Raises as `Relay.decode` does.
        """
        if not decoder.adapter.manner.resumes:
            context.stream.keep_nothing()
        leg = self._leg("decode", context, flight, decoder, decode.body, answered=answered)
        relay = self.relay(context, flight, first_byte_s=first_byte_s, begun=begun)
        if asked is context.request:
            return relay.decode(leg, needs_text=needs_text, opening=decode.opening)
        context.shape = decoder.adapter.manner.streams_whole
        relayed = relay.assemble(leg, needs_text=needs_text, opening=decode.opening)
        return self._assemble(relayed, decoder, is_chat=asked.is_chat)

    async def _assemble(self, relayed: Coroutine[Any, Any, None], decoder: Instance, *, is_chat: bool) -> None:
        """Awaits `relayed`, and remembers a decoder of whose streams no whole answers can be made: its next ones would
        be alike."""
        epoch = decoder.epoch
        try:
            await relayed
        except NotAssembled as error:
            log.warning("whole answers are not put together from streams of %s: %s", decoder.name, error)
            self._whole_only[decoder.name, is_chat] = epoch
            raise

    def relay(
        self,
        context: RequestContext,
        flight: Flight,
        *,
        first_byte_s: float = 0.0,
        begun: Callable[[], None] | None = None,
    ) -> Relay:
        """Returns a relay for this attempt. `first_byte_s` is in seconds; 0: nothing is waited for."""
        return Relay(
            context,
            begun=begun or flight.mark_first_byte,
            first_byte_s=first_byte_s,
            idle_s=self._idle_timeout_s,
            whole_s=self._whole_timeout_s,
        )

    def _leg(
        self,
        name: str,
        context: RequestContext,
        flight: Flight,
        instance: Instance,
        body: bytes,
        *,
        answered: Callable[[], None] | None = None,
        peer: Instance | None = None,
    ) -> OpenLeg:
        call = Call(context.request.endpoint, body)
        headers = {
            **context.client.forwarded,
            **instance.adapter.leg_headers(context.record.request_id, flight.attempt),
        }
        return OpenLeg(
            name, instance, call, headers, self._observer, attempt=flight.attempt, answered=answered, peer=peer
        )
