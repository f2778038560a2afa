"""The module tells of what kind an engine is that does not answer as its configured kind does.

It is asked only where an engine's facts could not be read. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdproxy.config.values import Engine

LOOKS = ("/kv_buffer", "/server_info", "/get_model_info", "/metrics", "/version")
"""The paths by which kinds can be told apart. No kind of engine has all of them."""
_BUILTIN: tuple[Engine, ...] = ("builtin",)
_SGLANG: tuple[Engine, ...] = ("sglang",)
_VLLM: tuple[Engine, ...] = ("vllm_nixl", "vllm_transfer", "lmcache", "mooncake")


def other_kind(configured: str, answers: Mapping[str, bytes]) -> str | None:
    """Returns what the engine seems to be and what to configure, as part of a sentence. Returns None where it is of the
    kind that is `configured`, or cannot be told.

    `answers` are the bodies of those of `LOOKS` that were answered with 200.
    """
    sglang = _object(answers.get("/server_info")) or _object(answers.get("/get_model_info"))
    if {"epoch", "num_pages", "receivers"} <= _object(answers.get("/kv_buffer")).keys():
        kinds, what = _BUILTIN, "the built-in engine"
    elif "model_path" in sglang or b"sglang:" in answers.get("/metrics", b""):
        kinds, what = _SGLANG, f"SGLang {sglang.get('version', '')}"
    elif b"vllm:" in answers.get("/metrics", b"") or "version" in _object(answers.get("/version")):
        kinds, what = _VLLM, f"vLLM {_object(answers.get('/version')).get('version', '')}"
    else:
        return None
    if configured in kinds:
        return None
    others = f" (or {' or '.join(kinds[1:])}, as its connector is)" if len(kinds) > 1 else ""
    return f'this is {what.strip()}, and {configured} is configured; say engine = "{kinds[0]}"{others}'


def _object(body: bytes | None) -> dict[str, Any]:
    """Returns a JSON object; empty for anything else."""
    try:
        value = msgspec.json.decode(body or b"null")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
