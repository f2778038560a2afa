"""Every message that crosses a process border, one struct each. It is the contract between prefiller, decoder and
proxy.

There are three channels. They carry msgpack or JSON, read by msgspec; nothing is ever unpickled:

* **control** (ZMQ, every prefiller rank's DEALER to the ROUTER of the decoder's rank 0): `Hello … HeartbeatAck`. It
  only moves integers and NIXL's own metadata blobs; the KV bytes travel by NIXL WRITE.
* **signals** (ZMQ, decoder's PUSH to the proxy's PULL): `KvGranted`, `KvReady`, `KvFailed`, `KvReleased`. They are
  msgpack maps with a ``type`` key, as LMCache's ``ProxyNotif`` is, so that one socket can take both.
* **HTTP** (the ``kv_transfer_params`` object of a request or reply, and ``GET /kv_buffer``): `PushParams`, `Handoff`,
  `ResumeParams`, `BufferFacts`.

`Slab` and `WrittenPages` also travel between the ranks of one decoder, over a channel of the engine's own.

An *epoch* is a fresh id per process start. Every side states its own and the one it believes the other has; a mismatch
means one of them was restarted, and what the old one promised is void.

Every message that is decoded here is of a size that can be kept and counted: names are short, counts and times are not
negative, and there is no NaN. A message that breaks this is no message. The receiver checks what a `Reserve` asks for,
because it owes an answer that says what is wrong.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

PROTOCOL_VERSION = 5
TERM_HEADER = "x-pdproxy-term"
"""The HTTP header of a leg that tells the term of the leader for whom it is sent: see `PushParams.term`."""
MAX_TERM = 2**63 - 1
MAX_RANKS = 256
"""The most tensor-parallel ranks of one instance."""

Name = Annotated[str, msgspec.Meta(max_length=256)]
"""An id, an address or a word: short enough to be remembered for many attempts, and to be logged."""
Text = Annotated[str, msgspec.Meta(max_length=8192)]
Key = Annotated[bytes, msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Term = Annotated[int, msgspec.Meta(ge=1, le=MAX_TERM)]
"""Counts the leaders of a fleet, of which there is one at a time. A later leader has a higher term."""
Ranks = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Message(msgspec.Struct, tag_field="type", tag=True, frozen=True, kw_only=True):
    """The base of everything on a ZMQ socket. It is encoded as a msgpack map whose ``type`` is the class name, unless
    the class names another."""


# ── control: prefiller ↔ decoder ────────────────────────────────────────────────────────────────────────────────────


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A `Layout` holds what both sides must agree on before a page written by one can be read by the other."""

    model: Text
    """A fingerprint of the model's KV-relevant config (not its path)."""
    dtype: Name
    chunk_size: Count
    """The tokens per chunk: a page is one chunk of one page group."""
    cache: Text
    """Tells how a page is filled, layer by layer, as text. Equal text means that both sides cut pages in the same
    way."""
    heads: Text
    """Tells the KV heads of the whole model, layer by layer: ``32×8``."""
    tp_size: Ranks = 1
    """Counts the tensor-parallel ranks on this side; `tp_rank` tells which of them this side is. The two sides may
    differ in both."""
    tp_rank: Ranks = 0
    page_bytes: Count = 0
    """The bytes of one page on this rank. The peer works them out from the rest and refuses where the sums differ."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A `Process` is a sender's process. It is told so that a receiver on the same machine can see when it ends. Only
    where `boot_id` and `pid_namespace` are equal are both on one machine, and mean the same process by one number."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    started: Count
    """The time when it was started, in the kernel's clock ticks since boot. A later process with the same number
    differs in it."""
    boot_id: Name
    pid_namespace: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Hello(Message, frozen=True, kw_only=True):
    """`Hello`, sender → receiver, is said once per connection: who I am and what my pages look like.

    A `Heartbeat` follows, which says which attempts of this epoch are still open. All other attempts that the receiver
    has of it have ended.
    """

    version: int
    epoch: Name
    layout: Layout
    serial: Count = 0
    """Counts this sender's connections. A later one speaks for attempts of the earlier ones, never the other way round:
    the words of an earlier one may have been on their way while the attempt was begun anew."""
    process: Process | None = None
    """The sender's process, or None where the system does not tell."""


class Slab(msgspec.Struct, frozen=True, kw_only=True):
    """A `Slab` is the memory of one rank of a decoder, and the agent that owns it: everything that is needed to write
    there."""

    epoch: Name
    """The epoch of the rank's agent."""
    layout: Layout
    metadata: bytes
    """The bytes that NIXL needs to know the agent."""
    base_address: int
    num_pages: Count
    """Counts the pages of this slab, which tells where its tags lie. It may be more than are granted."""
    device_id: Count
    memory: Name
    """The kind of memory, ``DRAM`` or ``VRAM``, in NIXL's words."""


class Welcome(Message, frozen=True, kw_only=True):
    """`Welcome`, receiver → sender, tells where to write. The receiver is rank 0's and grants pages for all ranks of
    its decoder."""

    epoch: Name
    layout: Layout
    """The layout of rank 0."""
    slabs: Annotated[list[Slab], msgspec.Meta(max_length=MAX_RANKS)]
    """The slabs of the ranks that this sender's heads go to, in ascending order; none where it writes nothing."""
    num_pages: Count
    """Counts the pages that can be granted: as many as the smallest rank has. A page has the same number on every
    rank."""
    whole_requests: bool
    """False where pages are granted as they are asked for, not all or nothing (only to show what that leads to)."""
    heartbeat_s: Seconds
    """The interval, in seconds, at which a sender with attempts here says that it lives."""
    writer_timeout_s: Seconds
    """The seconds of silence after which a sender's attempts fail. Their pages are used again only when the sender says
    that its writes have ended, or is known to be dead."""


class HelloRefused(Message, frozen=True, kw_only=True):
    """`HelloRefused`, receiver → sender, says that `field` differs. No KV can be exchanged until an operator changes
    it. `ours` is the receiver's value, `theirs` is the sender's."""

    field: Name
    ours: Text
    theirs: Text


class Reserve(Message, frozen=True, kw_only=True):
    """`Reserve`, sender → receiver, says: I want to write this attempt's KV.

    `num_pages` is the whole request; `num_now` is what must be granted by this message: equal to `num_pages` where the
    receiver reserves whole requests, less where it does not. Every rank of the prefiller that writes anything asks for
    itself; an attempt is granted once, for all ranks of the decoder, and told to each of them.
    """

    attempt: Name
    epoch: Name
    """The epoch of the receiver that is to grant the pages: `PushParams.decoder_epoch`, or else the one that the sender
    has shaken hands with. No other receiver grants them."""
    num_pages: int
    num_now: int
    num_tokens: int
    timeout_s: float
    """The seconds from now until this attempt's pages may be swept."""
    notify: Name | None
    """The ZMQ address of the proxy that waits for this attempt, or None."""
    keys: list[Key] = []
    """Holds, per page, the name of the chunk that will be in it (`transfer.plan.keys`), or an empty one where it is not
    to be shared. Pages behind the last key are not shared either."""
    capability: Name | None = None
    """The same as in `PushParams`."""
    term: int | None = None
    """The same as in `PushParams`. A receiver of an earlier release does not know it, and checks no terms."""


class Reserved(Message, frozen=True, kw_only=True):
    """`Reserved`, receiver → sender, says: write here, in this order, on each rank that your heads go to."""

    attempt: Name
    pages: list[tuple[int, int]]
    """Holds page numbers by ordinal, from `num_cached` on, as runs: the first of some neighbours, and how many they
    are. Where they are fewer than the ordinals left, they are a window, used as a ring (ordinal i is
    ``pages[i % len(pages)]``). The sender may be as many pages ahead of `PagesTaken` as the window is long."""
    present: list[tuple[int, int]] = []
    """The ordinals whose bytes are in their page already, as runs. They are not to be written."""
    num_cached: Count = 0
    """Counts the first ordinals that are in the decoder's own KV cache. They have no page, and are not to be written.
    It is never all of them, and 0 in a window."""


class PagesWritten(Message, frozen=True, kw_only=True):
    """`PagesWritten`, sender → receiver, for windowed attempts only, says that the first `count` ordinals have
    arrived."""

    attempt: Name
    count: Count


class PagesTaken(Message, frozen=True, kw_only=True):
    """`PagesTaken`, receiver → sender, for windowed attempts only, says that the first `count` ordinals have been read.
    Their pages may be written again."""

    attempt: Name
    count: Count


class Refusal(Message, tag="ReservationRefused", frozen=True, kw_only=True, omit_defaults=True):
    """`Refusal`, receiver → sender, says that nothing (more) will be granted to this attempt.

    `epoch` is the receiver's own. Where it is not the one that the sender shook hands with, the receiver was restarted.
    An empty one is from a receiver that does not know the sender (any more); the sender is to shake hands anew then,
    too.
    """

    attempt: Name
    epoch: Name
    reason: str
    term: Term | None = None
    """The highest term that the receiver has heard of, where the attempt is refused because its own is lower."""


class WritesDone(Message, frozen=True, kw_only=True):
    """`WritesDone`, sender → receiver, says that every byte of this attempt has arrived (NIXL said DONE for every
    write)."""

    attempt: Name
    num_bytes: Count
    transfer_s: Seconds
    """The seconds during which at least one write of this attempt was under way."""


class WritesEnded(Message, frozen=True, kw_only=True):
    """`WritesEnded`, sender → receiver, says that this attempt will not be completed, and no write of mine can touch
    its pages on any rank."""

    attempt: Name
    reason: str
    has_broken: bool = False
    """True where a write of mine was broken off instead of ending. What it had handed to the network may still
    arrive, until the connection that it came over is read to its end."""


class Cancel(Message, frozen=True, kw_only=True):
    """`Cancel`, receiver → sender, says: stop writing this attempt, then say `WritesEnded`."""

    attempt: Name


class Heartbeat(Message, frozen=True, kw_only=True):
    """`Heartbeat`, sender → receiver, says: I am alive and these attempts are still mine. It is sent once after the
    handshake, and every `heartbeat_s` while the sender has attempts there or last words that are not known to have
    arrived."""

    epoch: Name
    serial: Count = 0
    """Counts this connection's heartbeats. The answer repeats it."""
    open: list[Name] = []
    """The attempts for which a write of this epoch may be under way to this receiver, over any connection."""


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """`HeartbeatAck`, receiver → sender, says: I am alive. A changed `epoch` means that I was restarted and know
    nothing of you."""

    epoch: Name
    serial: Count = 0
    missing: list[Name] = []
    """The attempts that were not among the open ones, and whose last word is lacking here. It was lost, and is to be
    said again. Everything else that was said before the heartbeat has arrived."""


SenderMessage = Hello | Reserve | PagesWritten | WritesDone | WritesEnded | Heartbeat
ReceiverMessage = Welcome | HelloRefused | Reserved | PagesTaken | Refusal | Cancel | HeartbeatAck


# ── signals: decoder → proxy ────────────────────────────────────────────────────────────────────────────────────────


class KvGranted(Message, frozen=True, kw_only=True):
    """`KvGranted`, decoder → proxy, says that a rank has granted the attempt its pages, and that `num_pages` are fewer
    than its prompt has, because the engine's own cache has the others. The attempt will not take more of them. It is
    not sent where none are cached."""

    attempt: Name
    rank: int
    epoch: Name
    num_pages: Count


class KvReady(Message, frozen=True, kw_only=True):
    """`KvReady` says that this rank holds all of the attempt's KV: custody FILLING → READY."""

    attempt: Name
    rank: int
    epoch: Name
    num_pages: Count
    num_bytes: Count
    """The bytes that were moved. The sum over all ranks counts. Where rank 0 speaks for the others, its signal has all
    the bytes, theirs 0."""
    transfer_s: Seconds


class KvFailed(Message, frozen=True, kw_only=True):
    """`KvFailed` says that this rank will never hold the attempt's KV. Its pages come back with a `KvReleased` of their
    own."""

    attempt: Name
    rank: int
    epoch: Name
    reason: str


class KvReleased(Message, frozen=True, kw_only=True):
    """`KvReleased` says that this rank's pages of the attempt are free again, and that no late write can touch them.
    `reason` is one word; the `KvFailed` of an attempt has told why it failed."""

    attempt: Name
    rank: int
    epoch: Name
    num_pages: Count
    reason: str
    """The reason: ``consumed``, ``cancelled``, ``failed`` or ``expired``."""


class ProxyNotif(Message, frozen=True, kw_only=True):
    """`ProxyNotif` is LMCache's KV-ready notification (LMCache PD, ``ProxyNotif``). The last three fields are our
    additions; old peers ignore them and need not send them."""

    req_id: Name
    rank: int | None = None
    attempt: Name | None = None
    status: Name | None = None


Signal = KvGranted | KvReady | KvFailed | KvReleased
AnySignal = KvGranted | KvReady | KvFailed | KvReleased | ProxyNotif


# ── HTTP: proxy ↔ built-in engine ───────────────────────────────────────────────────────────────────────────────────


class WrittenPages(msgspec.Struct, frozen=True, kw_only=True):
    """`WrittenPages` are pages of a decoder, as runs, and who wrote them: `num_senders` ranks of the attempt with this
    tag.

    Rank 0 of a decoder tells the others, over a channel of the engine's own, what they are to read.
    """

    pages: list[tuple[int, int]]
    tag: bytes
    num_senders: Ranks


def bracketed(host: str) -> str:
    """Returns a host as addresses with a port have it: an IPv6 address stands in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An `Endpoint` tells where the receiver that grants this rank's pages listens for control messages. It is rank
    0's, for all ranks."""

    rank: Ranks
    host: Name
    port: Port

    @property
    def address(self) -> str:
        return f"tcp://{bracketed(self.host)}:{self.port}"


class PushParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ``kv_transfer_params`` of a prefill leg. They say: push this attempt's KV to these receivers, all ranks of
    one decoder."""

    attempt: Name
    receivers: Annotated[list[Endpoint], msgspec.Meta(max_length=MAX_RANKS)]
    timeout_s: Annotated[float, msgspec.Meta(le=1e9)]
    """The seconds that this attempt may still take, counted from the moment the leg is sent."""
    notify: Name | None = None
    prompt_token_ids: list[int] | None = None
    """The prompt as ids, so that chat is not rendered and tokenized twice."""
    num_answer_tokens: int = 0
    """Counts the ids at the end of `prompt_token_ids` that are no prompt: they are the answer's first tokens, which the
    client has been shown. The answer goes on behind them as if it had never been interrupted. They must be fewer than
    the answer may have: a prefiller is not told `max_tokens`."""
    capability: Name | None = None
    """The proxy's word that this attempt is its own (`transfer.trust.AttemptKey.sign`). It goes on to the receivers."""
    decoder_epoch: Name | None = None
    """The epoch, in the decoder's ``/kv_buffer``, of the process whose pages were set aside for the attempt. A process
    that was started later at the same address gives it no pages. With None, whichever process is there does."""
    term: Term | None = None
    """The term of the leader for whom the leg is sent; None where there is one proxy. It goes on to the receivers,
    which begin nothing of a lower term than they have heard of. The built-in prefiller takes it from the leg's header
    `TERM_HEADER`."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ``kv_transfer_params`` of a prefill reply. They are passed to the decode leg verbatim.

    The decoder continues after `first_token_id` without sampling it again and without reading the prompt; its answer
    *starts with* that token, so stop strings and multi-byte characters may straddle it.
    """

    attempt: Name
    prompt_token_ids: list[int]
    first_token_id: int
    num_pages: Count
    first_token_logprobs: dict[str, Any] | None = None
    """The same as in the reply's ``logprobs`` for one token, in the engine's neutral form; None when not asked for."""
    num_answer_tokens: int = 0
    """The same as in `PushParams`. Then `first_token_id` is the first one *after* those, and the decoder shows only
    what they had not made certain yet."""


class ResumeParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``kv_transfer_params`` of a request that one engine serves alone. They say: go on with an answer begun
    elsewhere.

    Both fields are the same as in `PushParams`.
    """

    prompt_token_ids: list[int]
    num_answer_tokens: int


class PageGroupFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`PageGroupFacts` is `transfer.geometry.PageGroup` on the wire."""

    kind: str
    num_layers: int
    window: int | None = None
    state_pages: int = 0


class CancelBody(msgspec.Struct):
    """`CancelBody` is the body of ``POST /kv_transfer/cancel``."""

    attempt: Name


class SenderEndedBody(msgspec.Struct):
    """`SenderEndedBody` is the body of ``POST /kv_transfer/sender_ended``. It says that the prefiller's process with
    this epoch (of its ``/kv_buffer``) is dead."""

    epoch: Name


class BufferFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`BufferFacts` is the answer to ``GET /kv_buffer`` of a built-in engine. Pages are per rank; a prefiller has no PD
    buffer and reports 0 pages.

    Pages that are not free are occupied: reserved, ready, being read, or in quarantine. A page that only remembers a
    chunk for later prompts is free, because it is handed out again as soon as somebody needs it.
    """

    epoch: str
    role: str
    model: str
    dtype: str
    chunk_size: int
    bytes_per_token: int
    page_bytes: int
    num_pages: int
    num_free: int
    num_quarantined: int
    max_model_len: int
    receivers: list[Endpoint]
    groups: list[PageGroupFacts] = []
    """The page groups over which a prompt's pages are counted. Where there are none, a chunk takes one page."""
    windowed: bool = False
    """True where a prompt larger than the buffer can pass through it while it is alone."""
    num_reserved: int = 0
    """Counts the pages granted to attempts whose KV is still arriving. An attempt that waits for its pages holds
    none."""
    num_queued: int = 0
    """Counts the attempts that wait for pages now."""
    num_reservations_waited: int = 0
    """Counts the attempts, since the process started, that had to wait for pages which had been promised to them
    although they were not free."""
    fleet_key: str = ""
    """The fingerprint of the engine's fleet key, or ``none``; it is empty where the engine does not say. Two engines
    exchange KV only where this is equal."""
    num_cached: int = 0
    """Counts the pages of prompts, since the process started, that took no page here and were not sent, because the
    decoder's own KV cache had them."""
    num_wrong_tags: int = 0
    """Counts how often, since the process started, pages of an attempt held what another one had written. Each time
    cost an attempt; any at all is a fault of the transfer."""
    term: Term | None = None
    """The highest term that this process has heard of, from legs or from other engines; None where there was none."""
    num_cache_pages: Count = 0
    """The number of pages of the KV cache in which the engine computes; 0 where it does not say."""
    num_cache_free: Count = 0
    """The number of these that no sequence holds."""
    num_cache_waiting: Count = 0
    """Counts the requests that wait for pages of that cache, or for their turn."""


_encoder = msgspec.msgpack.Encoder()
_from_sender: msgspec.msgpack.Decoder[SenderMessage] = msgspec.msgpack.Decoder(SenderMessage)
_from_receiver: msgspec.msgpack.Decoder[ReceiverMessage] = msgspec.msgpack.Decoder(ReceiverMessage)
_signal: msgspec.msgpack.Decoder[AnySignal] = msgspec.msgpack.Decoder(AnySignal)


def encode(message: Message) -> bytes:
    """Returns one msgpack map, ``type`` first."""
    return _encoder.encode(message)


def decode_from_sender(payload: bytes) -> SenderMessage:
    """Returns the sender's message in `payload`. Raises `msgspec.DecodeError` (or its subclass `ValidationError`) on
    anything else."""
    return _from_sender.decode(payload)


def decode_from_receiver(payload: bytes) -> ReceiverMessage:
    """Returns the receiver's message in `payload`. Raises `msgspec.DecodeError` (or its subclass `ValidationError`) on
    anything else."""
    return _from_receiver.decode(payload)


def decode_signal(payload: bytes) -> AnySignal:
    """Returns the signal in `payload`. Raises `msgspec.DecodeError` (or its subclass `ValidationError`) on anything
    else."""
    return _signal.decode(payload)
