"""The module holds the adapter of SGLang with ``--disaggregation-mode``.

Both legs are sent at once and meet in a room of the prefiller's bootstrap server. The engines move the KV by
themselves. Facts are from SGLang 0.5.23. A room may be used once: a second request in it can crash both schedulers, or
get another one's KV. With ``n``, SGLang sends all the answers of one prompt into one room, so that this adapter refuses
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from pdproxy.admission.room import UNKNOWN_CACHE, KvCache
from pdproxy.config.values import Role
from pdproxy.engines import model_cards
from pdproxy.engines.adapter import (
    AttemptInfo,
    Call,
    DecodeLeg,
    MalformedReply,
    PrefillReply,
    ReleaseCall,
    ReleaseMode,
    Resumption,
    RoleRefused,
)
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.model_cards import read_model_cards
from pdproxy.engines.traits import EngineTraits, KvReady, ReleaseSignal
from pdproxy.errors import InvalidRequest
from pdproxy.openai.answer import CountedChunk
from pdproxy.openai.body import Fields
from pdproxy.openai.request import FALSE, GenerationRequest, PromptKind, encode, whole_body, with_token_ids
from pdproxy.openai.response import BROKEN_FINISHES
from pdproxy.openai.usage import PromptUsage

BOOTSTRAP_PORT = 8998
NUM_ROOMS = 2**63
_HEALTH, _INFO = "/health", "/server_info"
_OURS = frozenset({"rid", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"})
"""The fields of a client's request that are left out: with them a client could end another's request, or send its own
to ranks that never meet.
"""
_STREAMING = frozenset({"stream", "stream_options"})
_AGREED = {
    "page_size": "page_size",
    "kv_cache_dtype": "kv_cache_dtype",
    "dtype": "dtype",
    "transfer_backend": "disaggregation_transfer_backend",
    "allocation_policy": "disaggregation_decode_allocation_policy",
}
_NULL = msgspec.Raw(b"null")
_UNTOLD = (b"null", b'"auto"')


class _State(msgspec.Struct):
    """A `_State` is one data-parallel rank, as it is now. (Where the ranks share their attention, one may speak for
    all.)
    """

    disaggregation_mode: str | None = None
    effective_max_running_requests_per_dp: int | None = None


class _Info(msgspec.Struct):
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int = BOOTSTRAP_PORT
    dp_size: int = 1
    max_running_requests: int | None = None
    max_total_num_tokens: int | None = None
    """The number of tokens that the KV cache of one rank has room for."""
    page_size: int | None = None
    internal_states: list[_State] = []


class _RoleSwitch(msgspec.Struct):
    """A `_RoleSwitch` is the answer to a call that changes the role. Not `safe_to_restore` means that the engine may
    not serve in its old role either."""

    success: bool
    message: str = ""
    safe_to_restore: bool = False


_info = msgspec.json.Decoder(_Info)
_role_switch = msgspec.json.Decoder(_RoleSwitch)
_reply = msgspec.json.Decoder(CountedChunk)
_fields = msgspec.json.Decoder(Fields)


class SglangAdapter:
    """Implements `engines.adapter.Adapter`."""

    name = "sglang"
    looks = (_HEALTH, _INFO, model_cards.PATH)
    """The paths that are asked at each look. ``/health`` has an idle engine make a token, and takes at least a second.
    """

    def __init__(
        self,
        role: Role,
        *,
        bootstrap: str | None,
        max_rooms: int | None = None,
        data_parallel_rank: int | None = None,
        data_parallel_size: int | None = None,
        lease_s: float = 60.0,
    ) -> None:
        """Makes the adapter. `bootstrap` is where decoders reach a prefiller's bootstrap server; None for a decoder.

        It is ``host:port``, or ``host``: then the prefiller tells the port. `data_parallel_rank` is the only rank that
        this instance stands for, of `data_parallel_size` where that is known.
        """
        self._role: Role = role
        self._bootstrap = bootstrap
        self._max_rooms = max_rooms
        self._rank = data_parallel_rank
        self._size = data_parallel_size
        self.traits = EngineTraits(
            ready=KvReady.ENGINES,
            page_owner="prefill",
            freed=ReleaseSignal.FIRST_EVENT,
            lease_s=lease_s,
            closing_s=5.0,
            # Its streams have shown the beginning of a stop string by the time at which its whole answers cut it off.
            streams_whole=None,
            serves_alone=False,
            takes_several_prompts=True,
            changes_role=True,
        )

    # ── looking at it ──

    def read_facts(self, answers: Mapping[str, bytes]) -> EngineInfo:
        """Reads the facts. Slots are rooms. A prefiller holds the KV of at most ``max_running_requests`` requests at a
        time, and more rooms would only wait in a queue of its own.

        The agreement is what the engines compare as well (two that differ there end with an error, not a refusal), and
        the data type, which they do not compare. The model's path is not in it: the same weights lie elsewhere on
        another machine.
        """
        cards = read_model_cards(answers[model_cards.PATH])
        try:
            info, told = _info.decode(answers[_INFO]), _fields.decode(answers[_INFO])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedReply(f"its {_INFO} is not understood: {error}") from None
        if self._rank is not None and self._size not in (None, info.dp_size):
            raise MalformedReply(f"its dp_size is {info.dp_size}, and data_parallel_size is {self._size}")
        is_prefiller = self._role == "prefill"
        return EngineInfo(
            epoch=_epoch(told),
            role=_role(info),
            models=cards.names,
            cards=cards.cards,
            agreement=_agreement(told),
            num_pages=self._num_rooms(info) if is_prefiller else 0,
            cache=UNKNOWN_CACHE if is_prefiller else self._kv_cache(info),
            chunk_size=None,
            max_model_len=cards.max_model_len,
            bootstrap=self._address(info) if is_prefiller else None,
            num_ranks=info.dp_size,
            data_parallel_rank=self._rank,
        )

    def _kv_cache(self, info: _Info) -> KvCache:
        """Returns what is known of the KV cache: of all ranks together, or of the only rank that is meant."""
        if not info.max_total_num_tokens:
            return UNKNOWN_CACHE
        num_ranks = max(len(info.internal_states), info.dp_size) if self._rank is None else 1
        return KvCache(info.max_total_num_tokens * num_ranks, max(1, info.page_size or 1))

    def _num_rooms(self, info: _Info) -> int:
        """Returns the number of rooms of all ranks together, or of the only rank that is meant. Raises
        `MalformedReply`.
        """
        told = [state.effective_max_running_requests_per_dp for state in info.internal_states]
        each = [number for number in told if number is not None]
        num_ranks = max(len(told), info.dp_size) if self._rank is None else 1
        rooms = each[0] * num_ranks if each else info.max_running_requests
        limits = [number for number in (rooms, self._max_rooms) if number is not None]
        if not limits:
            raise MalformedReply(f"its {_INFO} does not say how many requests it runs; set max_rooms")
        return min(limits)

    def _address(self, info: _Info) -> str | None:
        if self._bootstrap is None:
            return None
        host, port = _split(self._bootstrap)
        return f"{host}:{info.disaggregation_bootstrap_port if port is None else port}"

    # ── the legs ──

    def hands_over(self, request: GenerationRequest, prompt_ids: list[int] | None) -> bool:
        if request.n > 1:
            several = "n" if (request.value("n") or 1) > 1 else "best_of"
            message = f"{several} must be 1: disaggregated SGLang engines give one answer to a prompt"
            raise InvalidRequest(message, param=several)
        return True

    def ranks(self, decoder: EngineInfo) -> frozenset[int]:
        return frozenset()

    def leg_headers(self, request_id: str, attempt: str) -> Mapping[str, str]:
        return {} if self._rank is None else {"x-data-parallel-rank": str(self._rank)}

    def prefill_body(self, request: GenerationRequest, info: AttemptInfo) -> bytes:
        """Returns the same body as the decoder's but not streamed, so that a failure has a status.

        The number of tokens stays too: both engines then come to the same verdict on it, and a prefiller stops after
        one token by itself.
        """
        fields = self._fields(request, info)
        fields = {name: raw for name, raw in fields.items() if name not in _STREAMING}
        return encode(fields | {"stream": FALSE})

    def one_token_body(self, request: GenerationRequest) -> bytes:
        """Returns the body for an engine that is not disaggregated."""
        return encode(request.fields)

    def read_prefill(self, request: GenerationRequest, body: bytes) -> PrefillReply:
        """Reads the reply, which comes when the decoder has the KV. Raises `MalformedReply` where the engine gave up.

        The decoder makes the whole answer, its first token included, and knows what the prefiller had cached. So
        nothing but success is read here.
        """
        try:
            reply, fields = _reply.decode(body), _fields.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedReply(f"its reply is not an answer: {error}") from None
        broken = [choice.finish_reason for choice in reply.choices if choice.finish_reason in BROKEN_FINISHES]
        if broken or not reply.choices:
            raise MalformedReply(f"it gave the prompt up (finish_reason {broken[0] if broken else None!r})")
        told = None if reply.usage is None else reply.usage.prompt_tokens
        usage = None if told is None else PromptUsage(told)
        return PrefillReply(fields=fields, handoff=None, is_whole=False, usage=usage, has_text=False)

    def decode_leg(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, with_ids: bool = False
    ) -> DecodeLeg:
        fields = self._fields(request, info)
        return DecodeLeg(encode(with_token_ids(fields) if with_ids else fields))

    def local_body(
        self, request: GenerationRequest, resumption: Resumption | None = None, *, with_ids: bool = False
    ) -> bytes:
        """Returns the body for an engine that is not disaggregated."""
        return whole_body(request, with_ids=with_ids)

    def prompt_ids(self, reply: PrefillReply) -> list[int] | None:
        return None

    def _fields(self, request: GenerationRequest, info: AttemptInfo) -> Fields:
        fields = {name: raw for name, raw in request.fields.items() if name not in _OURS}
        return fields | _meeting(request, info) | self._ranks(info)

    def _ranks(self, info: AttemptInfo) -> Fields:
        """Returns the fields that name the ranks: this engine's own and, for the decoder, the prefiller's."""
        ranks = {"routed_dp_rank": self._rank, "disagg_prefill_dp_rank": info.prefiller.data_parallel_rank}
        return {name: _raw(rank) for name, rank in ranks.items() if rank is not None}

    # ── an early end ──

    def abandon(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, is_decode_sent: bool
    ) -> ReleaseCall | ReleaseMode:
        """Says how the attempt's room becomes free.

        A reply comes when the room is closed. Before that both engines notice a closed leg, every 4 s, and end what it
        asked for. A request with one prompt can also be ended at once, by its id. (Each of several prompts gets an id
        of its own there.)
        """
        if reply is not None or request.prompt_kind is PromptKind.BATCH:
            return ReleaseMode.FREE
        return ReleaseCall("prefill", Call("/abort_request", msgspec.json.encode({"rid": info.attempt})))

    def read_errand(self, status: int, body: bytes) -> bool:
        """Tells whether the room becomes free. The engine answers 200 with nothing, whether it knew the request or not.

        Where the engine wants a key for this (401), the closed leg is enough.
        """
        return 200 <= status < 500

    # ── its role ──

    def role_switch(self, role: Role) -> Call:
        """Returns the call that changes the role. The engine must be idle and started with ``--enable-pd-role-switch``.

        The wire is that of ``srt/disaggregation/role_switch.py`` in SGLang's main branch of autumn 2026. It was not
        tried with a real engine.
        """
        return Call("/pd_role_switch", msgspec.json.encode({"new_role": role}))

    def read_role_switch(self, status: int, body: bytes) -> None:
        """Raises `RoleRefused` where the engine has not changed, and `MalformedReply` for what is no such reply."""
        if status == 404:
            raise RoleRefused("it has no /pd_role_switch; that needs a newer SGLang", is_unharmed=True)
        try:
            told = _role_switch.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedReply(f"its answer to /pd_role_switch, HTTP {status}, is not understood: {error}") from None
        if not told.success:
            raise RoleRefused(told.message, is_unharmed=told.safe_to_restore)


# ── where the legs meet ─────────────────────────────────────────────────────────────────────────────────────────────


def _meeting(request: GenerationRequest, info: AttemptInfo) -> Fields:
    """Returns the room's fields, which are lists where there are several prompts, and the id by which an engine can be
    told to stop.

    Raises `ValueError` where the prefiller has no bootstrap server.
    """
    if info.prefiller.bootstrap is None:
        raise ValueError("the prefiller has no bootstrap server")
    host, port = _split(info.prefiller.bootstrap)
    rooms = _rooms(info.attempt, len(request.value("prompt")) if request.prompt_kind is PromptKind.BATCH else 1)
    one = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": rooms[0]}
    if request.prompt_kind is not PromptKind.BATCH:
        return {name: _raw(value) for name, value in (one | {"rid": info.attempt}).items()}
    several = {"bootstrap_host": [host] * len(rooms), "bootstrap_port": [port] * len(rooms), "bootstrap_room": rooms}
    return {name: _raw(value) for name, value in several.items()}


def _rooms(attempt: str, number: int) -> list[int]:
    """Returns `number` rooms of 63 bits, as random as the attempt's name.

    They are consecutive, and a prefiller with several data-parallel ranks spreads them over its ranks.
    """
    first = int(attempt, 16) % NUM_ROOMS
    return [(first + i) % NUM_ROOMS for i in range(number)]


def _split(address: str) -> tuple[str, int | None]:
    """Splits ``host:port``, ``[::1]:port``, or a host without port. Returns the host, and the port or None."""
    host, colon, port = address.rpartition(":")
    if not colon or port.endswith("]"):
        return address, None
    return host, int(port)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


# ── facts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _role(info: _Info) -> Role:
    """Returns the role as it is now: a prefiller may become a decoder, and a decoder a prefiller.

    Raises `MalformedReply` for an engine that is neither.
    """
    now = [state.disaggregation_mode for state in info.internal_states if state.disaggregation_mode is not None]
    mode = now[0] if now else info.disaggregation_mode
    if mode == "prefill":
        return "prefill"
    if mode == "decode":
        return "decode"
    raise MalformedReply(f"it runs with --disaggregation-mode {mode}, not prefill or decode")


def _agreement(told: Fields) -> dict[str, str]:
    """Returns the values that must be equal in a pair. A value that is ``auto`` is left out."""
    known = {name: bytes(told.get(field, _NULL)) for name, field in _AGREED.items()}
    return {name: raw.decode().strip('"') for name, raw in known.items() if raw not in _UNTOLD}


def _epoch(told: Fields) -> str | None:
    """Returns a digest of a seed drawn at the start and of how many seconds each part of the start took; None without
    both.

    Another process has another value.
    """
    known = [bytes(told.get(name, _NULL)) for name in ("random_seed", "startup_time")]
    if all(raw == b"null" for raw in known):
        return None
    return hashlib.blake2b(b" ".join(known), digest_size=8).hexdigest()
