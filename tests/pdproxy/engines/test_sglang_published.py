"""Our bodies, read by the classes of the published SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdproxy.engines.adapter import AttemptInfo
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.sglang import SglangAdapter
from pdproxy.openai.request import CHAT, COMPLETIONS, parse
from tests.helpers import sglang_bodies
from tests.helpers.published import unpacked

ATTEMPT = "fedcba9876543210fedcba9876543210"
ROOM = int(ATTEMPT, 16) % 2**63
PREFILLER = SglangAdapter("prefill", bootstrap="10.0.0.1:8998", data_parallel_rank=2)
DECODER = SglangAdapter("decode", bootstrap=None, data_parallel_rank=1)
PASSAGE = AttemptInfo(
    attempt=ATTEMPT,
    prefiller=EngineInfo(epoch=None, bootstrap="10.0.0.1:8998", data_parallel_rank=2),
    decoder=EngineInfo(epoch=None),
    timeout_s=9.5,
    notify="",
    prompt_ids=None,
)
CLASSES = {CHAT: "ChatCompletionRequest", COMPLETIONS: "CompletionRequest"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (COMPLETIONS, {"prompt": "hi", "max_tokens": 5}),
    "ids": (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 1, "logprobs": 2}),
    "prompts": (COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 5}),
    "lists of ids": (COMPLETIONS, {"prompt": [[1, 2], [3]], "stream": True}),
    "chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [TOOL],
            "tool_choice": "required",
        },
    ),
}


@pytest.fixture(scope="module")
def read() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Of each of `BODIES`, the prefill leg's and the decode leg's."""
    sglang, base64 = unpacked("sglang", "0.5.23"), unpacked("pybase64", "1.5.1")
    legs = []
    for endpoint, body in BODIES.values():
        request = parse(endpoint, json.dumps({"model": "m"} | body).encode())
        for leg in (PREFILLER.prefill_body(request, PASSAGE), DECODER.decode_leg(request, PASSAGE, None).body):
            legs.append([CLASSES[endpoint], json.loads(leg)])
    lines = _run([json.dumps(leg) for leg in legs], sglang, base64)
    return {name: (lines[2 * i], lines[2 * i + 1]) for i, name in enumerate(BODIES)}


def _run(lines: list[str], sglang: Path, *others: Path) -> list[dict[str, Any]]:
    path = os.pathsep.join(str(folder) for folder in (sglang, *others))
    command = [sys.executable, sglang_bodies.__file__, str(sglang)]
    done = subprocess.run(
        command,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", ["text", "ids", "chat"])
def test_both_legs_meet_in_one_room(name: str, read: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for leg in read[name]:
        assert [leg[field] for field in sglang_bodies.ROOMS] == ["10.0.0.1", 8998, ROOM]
        assert leg["rid"] == ATTEMPT


@pytest.mark.parametrize(("name", "number"), [("prompts", 3), ("lists of ids", 2)])
def test_every_prompt_has_its_own_room(
    name: str, number: int, read: dict[str, tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    prefill, decode = read[name]
    assert prefill["each"] == decode["each"]
    assert prefill["each"] == [["10.0.0.1", 8998, ROOM + i] for i in range(number)]


@pytest.mark.parametrize("name", BODIES)
def test_each_leg_goes_to_its_own_rank(name: str, read: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    ranks = [(leg["routed_dp_rank"], leg["disagg_prefill_dp_rank"]) for leg in read[name]]
    assert ranks == [(2, 2), (1, 2)]


@pytest.mark.parametrize("name", BODIES)
def test_only_the_decoder_streams(name: str, read: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    prefill, decode = read[name]
    assert prefill["stream"] is False
    assert decode.get("stream", False) is BODIES[name][1].get("stream", False)
    asked = set(BODIES[name][1]) - {"stream", "stream_options"}
    assert all(prefill[field] == decode[field] for field in asked)
