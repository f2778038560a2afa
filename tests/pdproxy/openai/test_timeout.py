"""The client's own time limit: where it may stand, what it may be, and that engines never see it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.errors import InvalidRequest
from pdproxy.openai.request import COMPLETIONS, GenerationRequest, parse


def request(headers: dict[str, str] | None = None, **body: Any) -> GenerationRequest:
    return parse(COMPLETIONS, json.dumps({"prompt": "a"} | body).encode(), headers)


@pytest.mark.parametrize(
    ("headers", "body", "seconds"),
    [
        ({}, {}, None),
        ({}, {"timeout": None}, None),
        ({}, {"timeout": 3}, 3.0),
        ({}, {"timeout": 0.25}, 0.25),
        ({"x-request-timeout": "30"}, {}, 30.0),
        ({"x-request-timeout": " 1.5s "}, {}, 1.5),
        ({"x-request-timeout": "250ms"}, {}, 0.25),
        ({"x-request-timeout": "5"}, {"timeout": 3}, 3.0),
        ({"x-request-timeout": "2"}, {"timeout": 3}, 2.0),
    ],
)
def test_where_it_is_read(headers: dict[str, str], body: dict[str, Any], seconds: float | None) -> None:
    read = request(headers, **body)
    assert read.timeout_s == seconds
    assert list(read.fields) == ["prompt"]


@pytest.mark.parametrize("value", [0, -1, "10", True, [], {}])
def test_bad_field(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(timeout=value)
    assert caught.value.param == "timeout"


@pytest.mark.parametrize("value", ["", "0", "0ms", "-1", "1m", "s", "1e3", "nan", "1 s", "99999999999"])
def test_bad_header(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request({"x-request-timeout": value})
    assert caught.value.param == "x-request-timeout"
