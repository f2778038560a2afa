"""The wire contract: every message survives the trip, strangers' fields are ignored, anything else is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from transfer import wire

LAYOUT = wire.Layout(
    model="m", dtype="bfloat16", chunk_size=256, page_bytes=1 << 20, cache="layer,kv;abc", heads="32×8"
)

SLAB = wire.Slab(
    epoch="e", layout=LAYOUT, metadata=b"\x00\xff", base_address=2**63 + 5, num_pages=9, device_id=1, memory="VRAM"
)

FROM_SENDER: list[wire.SenderMessage] = [
    wire.Hello(version=wire.PROTOCOL_VERSION, epoch="e", layout=LAYOUT),
    wire.Reserve(
        attempt="a", epoch="e", num_pages=3, num_now=1, num_tokens=700, timeout_s=1.5, notify="tcp://127.0.0.1:1"
    ),
    wire.Reserve(attempt="a", epoch="e", num_pages=3, num_now=3, num_tokens=700, timeout_s=1.5, notify=None),
    wire.Reserve(
        attempt="a", epoch="e", num_pages=3, num_now=3, num_tokens=7, timeout_s=1.5, notify=None, capability="c" * 64
    ),
    wire.Reserve(attempt="a", epoch="e", num_pages=3, num_now=3, num_tokens=7, timeout_s=1.5, notify=None, term=7),
    wire.PagesWritten(attempt="a", count=3),
    wire.WritesDone(attempt="a", num_bytes=1 << 40, transfer_s=0.25),
    wire.WritesEnded(attempt="a", reason="cancelled"),
    wire.WritesEnded(attempt="a", reason="broken", has_broken=True),
    wire.Hello(
        version=wire.PROTOCOL_VERSION,
        epoch="e",
        layout=LAYOUT,
        serial=7,
        process=wire.Process(pid=2**22, started=2**40, boot_id="b" * 36, pid_namespace=4026531836),
    ),
    wire.Heartbeat(epoch="e"),
    wire.Heartbeat(epoch="e", serial=3, open=["a", "b"]),
]
FROM_RECEIVER: list[wire.ReceiverMessage] = [
    wire.Welcome(
        epoch="e",
        layout=LAYOUT,
        slabs=[SLAB, SLAB],
        num_pages=7,
        whole_requests=True,
        heartbeat_s=5.0,
        writer_timeout_s=30.0,
    ),
    wire.HelloRefused(field="dtype", ours="float16", theirs="bfloat16"),
    wire.Reserved(attempt="a", pages=[(0, 1), (5, 2)]),
    wire.Reserved(attempt="a", pages=[(0, 1), (5, 1)], present=[(3, 1)], num_cached=2),
    wire.PagesTaken(attempt="a", count=3),
    wire.Refusal(attempt="a", epoch="e", reason="too large"),
    wire.Refusal(attempt="a", epoch="e", reason="replaced", term=8),
    wire.Cancel(attempt="a"),
    wire.HeartbeatAck(epoch="e"),
    wire.HeartbeatAck(epoch="e", serial=3, missing=["c"]),
]
SIGNALS: list[wire.AnySignal] = [
    wire.KvGranted(attempt="a", rank=0, epoch="e", num_pages=3),
    wire.KvReady(attempt="a", rank=0, epoch="e", num_pages=3, num_bytes=99, transfer_s=0.5),
    wire.KvFailed(attempt="a", rank=0, epoch="e", reason="died"),
    wire.KvReleased(attempt="a", rank=0, epoch="e", num_pages=3, reason="consumed"),
    wire.ProxyNotif(req_id="r"),
    wire.ProxyNotif(req_id="r", rank=1, attempt="a", status="ready"),
]


def names(messages: list[object]) -> set[str]:
    return {type(message).__name__ for message in messages}


def members(union: object) -> set[str]:
    return {member.__name__ for member in union.__args__}  # type: ignore[attr-defined]


def test_every_message_is_covered_here() -> None:
    assert names([*FROM_SENDER]) == members(wire.SenderMessage)
    assert names([*FROM_RECEIVER]) == members(wire.ReceiverMessage)
    assert names([*SIGNALS]) == members(wire.AnySignal)


@pytest.mark.parametrize("message", FROM_SENDER, ids=repr)
def test_from_sender(message: wire.SenderMessage) -> None:
    assert wire.decode_from_sender(wire.encode(message)) == message


@pytest.mark.parametrize("message", FROM_RECEIVER, ids=repr)
def test_from_receiver(message: wire.ReceiverMessage) -> None:
    assert wire.decode_from_receiver(wire.encode(message)) == message


@pytest.mark.parametrize("signal", SIGNALS, ids=repr)
def test_signal(signal: wire.AnySignal) -> None:
    assert wire.decode_signal(wire.encode(signal)) == signal


def test_a_message_is_a_map_with_its_type() -> None:
    fields = msgspec.msgpack.decode(wire.encode(wire.Cancel(attempt="a")))
    assert fields == {"type": "Cancel", "attempt": "a"}


def test_the_type_of_a_refusal_is_not_the_name_of_its_class() -> None:
    """The class has another name than the error that it becomes. Peers know it by the type."""
    fields = msgspec.msgpack.decode(wire.encode(wire.Refusal(attempt="a", epoch="e", reason="r")))
    assert fields == {"type": "ReservationRefused", "attempt": "a", "epoch": "e", "reason": "r"}


def test_lmcaches_notification_is_understood() -> None:
    """What an LMCache prefiller sends, byte for byte a msgspec map of two fields."""
    payload = msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": "cmpl-1"})
    assert wire.decode_signal(payload) == wire.ProxyNotif(req_id="cmpl-1")


def test_fields_of_a_newer_peer_are_ignored() -> None:
    payload = msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": "r", "rank": 2, "colour": [1, {"deep": None}]})
    assert wire.decode_signal(payload) == wire.ProxyNotif(req_id="r", rank=2)


MALFORMED = {
    "empty": b"",
    "not msgpack": b"\xc1",
    "cut short": wire.encode(wire.WritesEnded(attempt="a", reason="r"))[:-1],
    "not a map": msgspec.msgpack.encode(["WritesEnded", "a", "r"]),
    "no type": msgspec.msgpack.encode({"attempt": "a", "reason": "r"}),
    "unknown type": msgspec.msgpack.encode({"type": "Reboot", "attempt": "a"}),
    "a field is missing": msgspec.msgpack.encode({"type": "WritesEnded", "attempt": "a"}),
    "a field has the wrong type": msgspec.msgpack.encode({"type": "WritesEnded", "attempt": 7, "reason": "r"}),
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07os.exit\x94.",
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("decode", [wire.decode_from_sender, wire.decode_from_receiver, wire.decode_signal])
def test_malformed_is_refused(decode: object, payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(payload)  # type: ignore[operator]


def test_each_channel_takes_its_own_messages_only() -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode_from_sender(wire.encode(wire.Cancel(attempt="a")))
    with pytest.raises(msgspec.ValidationError):
        wire.decode_from_receiver(wire.encode(wire.Heartbeat(epoch="e")))
    with pytest.raises(msgspec.ValidationError):
        wire.decode_signal(wire.encode(wire.Heartbeat(epoch="e")))


PARAMS = wire.PushParams(
    attempt="a", receivers=[wire.Endpoint(rank=0, host="10.0.0.7", port=7300)], timeout_s=30.0, prompt_token_ids=[1, 2]
)
HANDOFF = wire.Handoff(
    attempt="a", prompt_token_ids=[1, 2], first_token_id=3, num_pages=1, first_token_logprobs={"top": [[1, -0.5]]}
)
FACTS = wire.BufferFacts(
    epoch="e",
    role="decode",
    model="m",
    dtype="bfloat16",
    chunk_size=256,
    bytes_per_token=4096,
    page_bytes=1 << 20,
    num_pages=7,
    num_free=6,
    num_quarantined=1,
    max_model_len=8192,
    receivers=PARAMS.receivers,
)


@pytest.mark.parametrize("body", [PARAMS, HANDOFF, FACTS], ids=lambda body: type(body).__name__)
def test_http_bodies_survive_json_and_ignore_unknown_fields(body: msgspec.Struct) -> None:
    fields = msgspec.json.decode(msgspec.json.encode(body))
    assert msgspec.convert({**fields, "do_remote_decode": True}, type(body)) == body


@pytest.mark.parametrize("missing", ["attempt", "receivers", "timeout_s"])
def test_push_params_without_what_they_need_are_refused(missing: str) -> None:
    fields = msgspec.to_builtins(PARAMS)
    del fields[missing]
    with pytest.raises(msgspec.ValidationError, match=missing):
        msgspec.convert(fields, wire.PushParams)


def test_an_endpoint_is_an_address() -> None:
    assert PARAMS.receivers[0].address == "tcp://10.0.0.7:7300"
    assert wire.Endpoint(rank=0, host="fd00::7", port=7300).address == "tcp://[fd00::7]:7300"


# ── bounds ──────────────────────────────────────────────────────────────────────────────────────────────────────────

WRITTEN = wire.WrittenPages(pages=[(0, 1)], tag=b"t", num_senders=1)
RESUME = wire.ResumeParams(prompt_token_ids=[1, 2], num_answer_tokens=1)
GROUP = wire.PageGroupFacts(kind="full", num_layers=2)
CALLS = wire.CancelBody(attempt="a"), wire.SenderEndedBody(epoch="e")
RANGES = {
    (0, 2**53),  # a count, exact in any language's numbers
    (0, 1_000_000_000),  # seconds
    (0, 256),  # ranks
    (0, 65_535),  # a port
    (1, 2**31),  # a process
    (0, 2**63 - 1),  # an inode
    (1, 2**63 - 1),  # a term
    (None, 1_000_000_000),  # what is left of an attempt's time, which may be over
}
LENGTHS = {64, 256, 8192}
UNBOUNDED_NUMBERS = {
    "Hello.version",  # compared with one number
    "Slab.base_address",
    *("Reserve.num_pages", "Reserve.num_now", "Reserve.num_tokens", "Reserve.timeout_s"),  # refused with an answer
    "Reserve.term",  # likewise
    *("Reserved.pages", "Reserved.present", "WrittenPages.pages"),  # looked at together
    *("KvGranted.rank", "KvReady.rank", "KvFailed.rank", "KvReleased.rank", "ProxyNotif.rank"),  # names, not counts
    *("PushParams.prompt_token_ids", "Handoff.prompt_token_ids", "ResumeParams.prompt_token_ids"),
    *("PushParams.num_answer_tokens", "Handoff.num_answer_tokens", "ResumeParams.num_answer_tokens"),
    "Handoff.first_token_id",
    *(f"PageGroupFacts.{name}" for name in ("num_layers", "window", "state_pages")),
    *(f"BufferFacts.{name}" for name in ("chunk_size", "bytes_per_token", "page_bytes", "num_pages", "num_free")),
    *(f"BufferFacts.{name}" for name in ("num_quarantined", "max_model_len", "num_reserved", "num_queued")),
    *(f"BufferFacts.{name}" for name in ("num_reservations_waited", "num_cached", "num_wrong_tags")),
}
"""Whoever reads these fields looks at their numbers."""
UNBOUNDED_TEXTS = {
    "Slab.metadata",
    *("Refusal.reason", "WritesEnded.reason", "KvFailed.reason", "KvReleased.reason"),  # cut off
    "WrittenPages.tag",
    "PageGroupFacts.kind",
    *(f"BufferFacts.{name}" for name in ("epoch", "role", "model", "dtype", "fleet_key")),
}


def structs_of(value: object) -> Iterator[msgspec.Struct]:
    """The struct itself, and every one inside."""
    if isinstance(value, msgspec.Struct):
        yield value
        for name in value.__struct_fields__:
            yield from structs_of(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from structs_of(item)


SAMPLES: dict[str, msgspec.Struct] = {
    type(one).__name__: one
    for message in (*FROM_SENDER, *FROM_RECEIVER, *SIGNALS, PARAMS, HANDOFF, FACTS, WRITTEN, RESUME, GROUP, *CALLS)
    for one in structs_of(message)
}


def leaves(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The kinds of the values that a field holds, of those in its list, too."""
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from leaves(one)
    elif isinstance(kind, inspect.ListType):
        yield from leaves(kind.item_type)
    elif isinstance(kind, inspect.TupleType):
        for one in kind.item_types:
            yield from leaves(one)
    else:
        yield kind


def fields_with(*kinds: type[inspect.Type]) -> Iterator[tuple[str, str, Any]]:
    for name, sample in SAMPLES.items():
        told = inspect.type_info(type(sample))
        assert isinstance(told, inspect.StructType)
        yield from ((name, f.name, leaf) for f in told.fields for leaf in leaves(f.type) if isinstance(leaf, kinds))


NUMBERS = list(fields_with(inspect.IntType, inspect.FloatType))
TEXTS = list(fields_with(inspect.StrType, inspect.BytesType))
RANGED = [(name, field, kind) for name, field, kind in NUMBERS if kind.ge is not None or kind.le is not None]
SHORT = [(name, field, kind) for name, field, kind in TEXTS if kind.max_length is not None]


def decode_with(name: str, field: str, value: object) -> object:
    """What a peer reads in that field, where it is sent `value`: in a list, where the field is one."""
    sample = SAMPLES[name]
    fields = msgspec.to_builtins(sample, builtin_types=(bytes,))
    is_list = isinstance(getattr(sample, field), list)
    payload = msgspec.msgpack.encode({**fields, field: [value] if is_list else value})
    read = getattr(msgspec.msgpack.decode(payload, type=type(sample)), field)
    return read[0] if is_list else read


def test_every_struct_is_covered_here() -> None:
    kinds = {n for n, kind in vars(wire).items() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
    assert {*SAMPLES} == kinds - {"Message"}


def test_a_field_that_is_left_out_stands_for_nothing() -> None:
    """For an engine of one rank, where it is the number of ranks. An older peer, or one of another make, says less."""
    left_out: dict[str, object] = {}
    for name, sample in SAMPLES.items():
        needed = [f.encode_name for f in msgspec.structs.fields(type(sample)) if f.required]
        fields = msgspec.to_builtins(sample, builtin_types=(bytes,))
        tag = {"type": type(sample).__struct_config__.tag} if isinstance(sample, wire.Message) else {}
        least = msgspec.convert(tag | {field: fields[field] for field in needed}, type(sample))
        left_out |= {
            f"{name}.{field}": getattr(least, field) for field in sample.__struct_fields__ if field not in needed
        }
    assert left_out.pop("Layout.tp_size") == 1
    assert {name: value for name, value in left_out.items() if value} == {}


def test_every_number_has_bounds_or_is_looked_at_by_its_reader() -> None:
    assert {f"{name}.{field}" for name, field, kind in NUMBERS if kind.le is None} == UNBOUNDED_NUMBERS
    assert {(kind.ge, kind.le) for _, _, kind in RANGED} == RANGES


def test_every_text_is_short_or_cut_off_by_its_reader() -> None:
    assert {f"{name}.{field}" for name, field, kind in TEXTS if kind.max_length is None} == UNBOUNDED_TEXTS
    assert {kind.max_length for _, _, kind in SHORT} == LENGTHS


@pytest.mark.parametrize(("name", "field", "kind"), RANGED, ids=lambda one: one if isinstance(one, str) else "")
def test_a_number_beyond_its_bounds_is_refused(
    name: str, field: str, kind: inspect.IntType | inspect.FloatType
) -> None:
    step = 1 if isinstance(kind, inspect.IntType) else 1e-3
    number = int if isinstance(kind, inspect.IntType) else float
    inside = [number(bound) for bound in (kind.ge, kind.le) if bound is not None]
    assert [decode_with(name, field, value) for value in inside] == inside
    outside = [] if kind.ge is None else [kind.ge - step]
    outside.append(kind.le + step)
    outside += [math.nan, math.inf] if number is float else []
    for value in outside:
        with pytest.raises(msgspec.ValidationError, match=field):
            decode_with(name, field, value)


@pytest.mark.parametrize(("name", "field", "kind"), SHORT, ids=lambda one: one if isinstance(one, str) else "")
def test_a_text_that_is_too_long_is_refused(name: str, field: str, kind: inspect.StrType | inspect.BytesType) -> None:
    one: str | bytes = "x" if isinstance(kind, inspect.StrType) else b"x"
    assert kind.max_length is not None
    assert decode_with(name, field, one * kind.max_length) == one * kind.max_length
    with pytest.raises(msgspec.ValidationError, match=field):
        decode_with(name, field, one * (kind.max_length + 1))


def test_no_more_ranks_than_there_can_be_are_named() -> None:
    welcome = next(message for message in FROM_RECEIVER if isinstance(message, wire.Welcome))
    for message, field, one in ((welcome, "slabs", SLAB), (PARAMS, "receivers", PARAMS.receivers[0])):
        most, too_many = (msgspec.structs.replace(message, **{field: [one] * count}) for count in (256, 257))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(most), type=type(message)) == most
        with pytest.raises(msgspec.ValidationError, match=field):
            msgspec.msgpack.decode(msgspec.msgpack.encode(too_many), type=type(message))
