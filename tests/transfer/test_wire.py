"""The wire contract: every message survives the trip, strangers' fields are ignored, anything else is refused."""

from __future__ import annotations

import msgspec
import pytest

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
    wire.ReservationRefused(attempt="a", epoch="e", reason="too large"),
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
