"""Label selectors, as Kubernetes takes them and as people misspell them."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.config.settings import Settings
from pdproxy.discovery.factory import make_discovery
from pdproxy.discovery.selectors import is_selector
from pdproxy.errors import ConfigError


@pytest.mark.parametrize(
    "text",
    [
        "role=prefill",
        "role==prefill",
        " app = vllm , role != decode ",
        "llm-d.ai/role=prefill",
        "role in (prefill, both),!canary",
        "role notin(decode)",
        "role in (,a)",
        "app",
        "! app",
        "empty=",
        "generation>2,generation < 9",
        f"{'k' * 63}={'v' * 63}",
        "a=B_c.d-e",
        "in in (in)",
    ],
)
def test_selectors(text: str) -> None:
    assert is_selector(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "role:prefill",
        "role=prefill;app=vllm",
        "role=prefill app=vllm",
        "role=prefill,",
        ",role=prefill",
        "role=prefill,,app=vllm",
        "=prefill",
        "role=-prefill",
        "role='prefill'",
        "role in prefill",
        "role in (prefill",
        "role in ()x",
        "rolein (prefill)",
        "!role=prefill",
        "a/b/c=d",
        "Upper.Case/role=x",
        "generation>x",
        f"{'k' * 64}=v",
        f"k={'v' * 64}",
        "role=préfill",
        "role=prefill\x00",
    ],
)
def test_what_is_none(text: str) -> None:
    assert not is_selector(text)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_option_is_named_before_a_cluster_is_asked(role: str) -> None:
    options: dict[str, Any] = {"prefill_selector": "role=p", "decode_selector": "role=d"}
    settings = Settings(discover="kubernetes", discover_namespace="llm", **options | {f"{role}_selector": "role:x"})
    with pytest.raises(ConfigError, match=rf"^{role}_selector: 'role:x' is no label selector; write k=v, "):
        make_discovery(settings)
