"""The module says what a kind of engine is like: how KV gets from a prefiller to a decoder, and what frees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdproxy.config.values import Role
from pdproxy.openai.assembled import WholeShape
from pdproxy.openai.request import CHAT, COMPLETIONS, MESSAGES, RESPONSES

COMPLETIONS_ONLY = frozenset({COMPLETIONS, CHAT})
ALL_ENDPOINTS = frozenset({COMPLETIONS, CHAT, RESPONSES, MESSAGES})


class KvReady(enum.Enum):
    """`KvReady` says who tells that an attempt's KV can be used."""

    SIGNALS = "signals"
    """Messages on the proxy's signal socket tell that the KV can be used, one per rank of the decoder."""
    PREFILL_REPLY = "prefill_reply"
    """The prefill leg's reply tells that the KV can be used, and the decoder fetches the KV by what the reply says."""
    ENGINES = "engines"
    """The engines tell each other that the KV can be used: both legs are sent at once, and the answer's first event
    shows it.
    """


class ReleaseSignal(enum.Enum):
    """`ReleaseSignal` says what tells that an attempt's pages are free again, when all goes well."""

    SIGNALS = "signals"
    """Messages on the signal socket tell that the pages are free, one per rank."""
    FIRST_EVENT = "first_event"
    """The first event of the decoder's answer tells that the pages are free, because the KV was taken then. For an
    answer that is asked for as a whole, the answer's end tells it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """`EngineTraits` say how engines of one kind hand KV over. The orchestrator goes by this and knows no
    kind by name.
    """

    ready: KvReady
    page_owner: Role
    """The role of the instance whose memory the slots guard."""
    freed: ReleaseSignal
    lease_s: float
    """The seconds after which the page owner drops KV that no engine has asked for."""
    closing_s: float = 1.0
    """The seconds after a leg was closed in which the engine drops what it held for that leg alone."""
    is_lease_strict: bool = False
    """Tells that the decoder must have begun before the lease ends: what it fetches later may be another request's."""
    shows_first_token: bool = False
    """Tells that the decoder's answer starts with the prefiller's token. Otherwise it starts with one that the decoder
    finds by itself.
    """
    streams_whole: WholeShape | None = None
    """The shape of whole answers, where one that is put together from a stream is the same.

    With None, a client's whole answer is asked for as a whole, and has no first event.
    """
    resumes: bool = False
    """Tells that engines of this kind can continue an answer that another one began."""
    endpoints: frozenset[str] = COMPLETIONS_ONLY
    """The generation endpoints that engines of this kind serve."""
    divided: frozenset[str] = COMPLETIONS_ONLY
    """The endpoints that a pair can serve by two legs. At the others of `endpoints` a decoder serves alone."""
    serves_alone: bool = True
    """Tells that one instance can answer by itself: a decoder reads prompts too, and a prefiller gives its token to a
    client.

    Otherwise every request goes through both legs.
    """
    prefiller_answers: bool = True
    """Tells that a prefiller can write a whole answer, to a request whose KV goes nowhere."""
    changes_role: bool = False
    """Tells that an engine of this kind can take the other role while it runs: where it is told to (`RoleSwitcher`), or
    where it does not care which role the proxy gives it.
    """
    takes_several_prompts: bool = False
    """Tells that one attempt can hand over the KV of several prompts. Otherwise each prompt of a body gets an attempt
    of its own.
    """
    kv_lost_code: str | None = None
    """The code in a prefiller's error object, under HTTP 502, where its KV did not reach the decoder, whichever of them
    is at fault; None where the kind has no code for that.
    """
    receiver_lost_code: str | None = None
    """The code in a prefiller's error object, under HTTP 502, where the decoder did not answer it on the ports for KV;
    None where the kind has no code for that.
    """
    stale_term_code: str | None = None
    """The code in an engine's error object, under HTTP 409, where a leg is of a leader that has been replaced, as
    far as the engine has heard.

    Engines of such a kind are told the leader's term with each leg (``x-pdproxy-term``). None where the kind knows no
    terms.
    """
    term_path: str | None = None
    """The path among an engine's looks at which it is told the leader's term (``GET …?term=N``), before it says which
    pages are in use. None where the kind knows no terms.
    """
    peer_ended_path: str | None = None
    """The path at which a decoder is told that the process of a peer has ended (``POST {"epoch": …}``).

    The decoder then takes back the pages which that process was writing to. None where decoders find out by themselves.
    """
