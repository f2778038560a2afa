"""Our messages, bodies and configuration against LMCache's own code, as published.

Its modules need torch and a GPU's libraries to be imported, so that single classes and functions are taken out of its
files and run as they stand there.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdproxy.engines.adapter import AttemptInfo
from pdproxy.engines.info import EngineInfo, Receiver
from pdproxy.engines.lmcache import LMCacheAdapter
from pdproxy.engines.lmcache_config import _OLDER_NAMES, USUAL_CHUNK_SIZE
from pdproxy.kv_signals.board import KvBoard
from pdproxy.openai.request import COMPLETIONS, parse
from tests.helpers import lmcache_standin as standin
from tests.helpers.published import unpacked
from tests.helpers.standin_words import MODEL
from transfer import wire

VERSION = "0.5.6"
SYNC, ASYNC = "v1/storage_backend/pd_backend.py", "v1/storage_backend/pd_backend_async.py"
NIXL = "v1/transfer_channel/nixl_channel.py"
VLLM, VLLM_UTILS = "integration/vllm/vllm_v1_adapter.py", "integration/vllm/utils.py"


@pytest.fixture(scope="module")
def folder() -> Path:
    return unpacked("lmcache", VERSION) / "lmcache"


USUAL: dict[str, Any] = {name: getattr(typing, name) for name in ("Any", "List", "Mapping", "Optional", "Union")}
"""What its annotations are made of."""
USUAL |= {"msgspec": msgspec, "dataclass": dataclass, "field": field}


def taken(file: Path, *names: str, **known: Any) -> dict[str, Any]:
    """What `file` defines under these names, run where nothing but `known` is known; decorators are left out, except
    for dataclasses'."""
    tree = ast.parse(file.read_text())
    found = [node for node in ast.walk(tree) if _name(node) in names]
    assert len(found) == len(names), f"{file}: {[_name(node) for node in found]}"
    for node in found:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
    body: list[Any] = sorted(found, key=lambda node: node.lineno)
    module = ast.Module(body=body, type_ignores=[])
    space: dict[str, Any] = {"__name__": "lmcache_parts", **USUAL, **known}
    exec(compile(module, str(file), "exec", dont_inherit=True), space)
    return space


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return target.id if isinstance(target, ast.Name) else None
    return node.name if isinstance(node, ast.ClassDef | ast.FunctionDef) else None


@pytest.fixture(scope="module")
def sync(folder: Path) -> SimpleNamespace:
    names = ("PDMsgBase", "AllocRequest", "AllocResponse", "ProxyNotif", "CacheQueryRequest", "CacheQueryResponse")
    return SimpleNamespace(**taken(folder / SYNC, *names, "PDMsg"))


@pytest.fixture(scope="module")
def later(folder: Path) -> SimpleNamespace:
    names = ("PDMsgBase", "AllocRequest", "AllocResponse", "ProxyNotif", "CancelNotif", "PDMsg")
    return SimpleNamespace(**taken(folder / ASYNC, *names))


@pytest.fixture(scope="module")
def nixl(folder: Path) -> SimpleNamespace:
    names = ("NixlMsgBase", "NixlInitRequest", "NixlMemRegRequest", "NixlInitResponse", "NixlMemRegResponse", "NixlMsg")
    return SimpleNamespace(**taken(folder / NIXL, *names))


# ── notifications ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", ["sync", "later"])
def test_their_notification_is_understood_here(backend: str, request: pytest.FixtureRequest) -> None:
    theirs = request.getfixturevalue(backend)
    payload = msgspec.msgpack.encode(theirs.ProxyNotif(req_id="a1"))
    assert wire.decode_signal(payload) == wire.ProxyNotif(req_id="a1")
    board = KvBoard()
    expectation = board.expect("a1", {0, 1})
    board.deliver(wire.decode_signal(payload))
    assert not expectation.is_ready
    board.deliver(wire.decode_signal(payload))
    assert expectation.is_ready


@pytest.mark.parametrize("backend", ["sync", "later"])
def test_what_we_added_does_not_disturb_their_reader(backend: str, request: pytest.FixtureRequest) -> None:
    theirs = request.getfixturevalue(backend)
    ours = wire.encode(wire.ProxyNotif(req_id="a1", rank=1, attempt="a1", status="failed"))
    assert msgspec.msgpack.decode(ours, type=theirs.PDMsg) == theirs.ProxyNotif(req_id="a1")


# ── the stand-in's messages ─────────────────────────────────────────────────────────────────────────────────────────

SAID: list[standin.Message] = [
    standin.AllocRequest(keys=["k"], fmt=1, shape=[2, 4, 256, 64], dtype="bfloat16", last_chunk_toks=3),
    standin.AllocResponse(already_sent_indexes=[1], remote_indexes=[0]),
    standin.ProxyNotif(req_id="a1"),
    standin.NixlInitRequest(local_meta_bytes=b"m"),
    standin.NixlInitResponse(remote_agent_name=b"n", remote_meta_bytes=b"m"),
    standin.NixlMemRegRequest(remote_agent_name=b"n", local_id="", local_xfer_dlist_bytes=b"d"),
    standin.NixlMemRegResponse(remote_xfer_dlist_bytes=b"d"),
]


@pytest.mark.parametrize("message", SAID, ids=lambda message: type(message).__name__)
def test_the_stand_in_speaks_as_lmcache_does(
    message: standin.Message, sync: SimpleNamespace, nixl: SimpleNamespace
) -> None:
    module = nixl if type(message).__name__.startswith("Nixl") else sync
    known = module.NixlMsg if module is nixl else module.PDMsg
    theirs = msgspec.msgpack.decode(standin.pack(message), type=known)
    assert msgspec.structs.asdict(theirs) == msgspec.structs.asdict(message)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(theirs), type=standin.AnyMessage) == message


def test_the_stand_in_names_pages_as_lmcache_does(folder: Path) -> None:
    known = {"STR_DTYPE_TO_TORCH_DTYPE": {"bfloat16": "bf16"}, "TORCH_DTYPE_TO_STR_DTYPE": {"bf16": "bfloat16"}}
    torch = SimpleNamespace(dtype=object)
    key_class = taken(folder / "utils.py", "CacheEngineKey", **known, torch=torch)
    (ours,) = standin.chunk_keys([1, 2, 3], 256, rank=1, num_ranks=2, seed="0")
    key = key_class["CacheEngineKey"].from_string(ours)
    assert (key.model_name, key.world_size, key.worker_id, key.to_string()) == (MODEL, 2, 1, ours)


# ── bodies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def prefill_params(adapter: LMCacheAdapter, *, is_alone: bool = False) -> Mapping[str, Any]:
    """What vLLM hands to the connector of our prefill leg."""
    request = parse(COMPLETIONS, b'{"model":"m","prompt":[1,2,3],"max_tokens":5}')
    receivers = tuple(Receiver(rank=rank, host="d", port=7300 + rank, alloc_port=7400 + rank) for rank in range(2))
    info = AttemptInfo(
        attempt="a1",
        prefiller=EngineInfo(epoch="p"),
        decoder=EngineInfo(epoch="d", receivers=receivers),
        timeout_s=1.0,
        notify="tcp://p:1",
        prompt_ids=None,
    )
    body = adapter.one_token_body(request) if is_alone else adapter.prefill_body(request, info)
    params: Mapping[str, Any] = msgspec.json.decode(body)["kv_transfer_params"]
    return params


@pytest.mark.parametrize("first_token", ["auto", "prefiller", "decoder"])
def test_their_connector_finds_the_receiver_in_our_prefill_leg(folder: Path, first_token: Any) -> None:
    parts = taken(folder / VLLM, "DisaggSpec", "tmp_disagg_tracker", "update_state_after_alloc")
    adapter = LMCacheAdapter("prefill", buffer=None, first_token=first_token)
    request = SimpleNamespace(request_id="r", kv_transfer_params=prefill_params(adapter))
    lookups = SimpleNamespace(clear_lookup_status=lambda request_id: None)
    connector = SimpleNamespace(lookup_client=lookups, load_specs={}, _unfinished_requests={})
    parts["update_state_after_alloc"](connector, request, 0)
    spec = parts["tmp_disagg_tracker"]["r"]
    assert (spec.req_id, spec.receiver_host) == ("a1", "d")
    assert (spec.receiver_init_port, spec.receiver_alloc_port) == ([7300, 7301], [7400, 7401])


def finished(folder: Path, params: Mapping[str, Any]) -> Any:
    """What their connector puts into the reply of a leg with these."""
    status = SimpleNamespace(FINISHED_ABORTED="aborted")
    parts = taken(folder / VLLM, "request_finished", RequestStatus=status)
    config = SimpleNamespace(get_extra_config_value=lambda name, default: default)
    request = SimpleNamespace(request_id="r", status="stopped", kv_transfer_params=params, _output_token_ids=[42])
    return parts["request_finished"](SimpleNamespace(config=config), request, [])[1]


def test_the_first_token_is_told_where_it_is_asked_for(folder: Path) -> None:
    """By which `read_prefill` knows a prompt that was shortened."""
    prefiller, auto = (LMCacheAdapter("prefill", buffer=None, first_token=mode) for mode in ("prefiller", "auto"))
    assert finished(folder, prefill_params(prefiller)) == {"first_tok": 42}
    assert finished(folder, prefill_params(auto)) is None


def test_a_leg_that_nothing_follows_is_not_to_be_saved(folder: Path) -> None:
    """Else their asynchronous sender looks for a receiver that there is none of."""
    parts = taken(folder / VLLM_UTILS, "extract_request_configs_from_sampling_params")
    read = parts["extract_request_configs_from_sampling_params"]
    auto = LMCacheAdapter("prefill", buffer=None)
    alone = {"kv_transfer_params": prefill_params(auto, is_alone=True)}
    assert read(SimpleNamespace(extra_args=alone)) == {"lmcache.skip_save": True}
    assert read(SimpleNamespace(extra_args={"kv_transfer_params": prefill_params(auto)})) is None


# ── configuration ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_names_in_their_yaml(folder: Path) -> None:
    aliases = taken(folder / "v1/config.py", "_CONFIG_ALIASES")["_CONFIG_ALIASES"]
    pd = {old: new for old, new in aliases.items() if new.startswith(("pd_", "enable_pd"))}
    assert pd == _OLDER_NAMES
    text = (folder / "v1/config.py").read_text()
    for name in ("pd_peer_init_port", "pd_peer_alloc_port", "pd_buffer_size", "pd_skip_proxy_notification"):
        assert f'"{name}"' in text
    assert f'"chunk_size": {{"type": int, "default": {USUAL_CHUNK_SIZE}' in text
