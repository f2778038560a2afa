"""Pages from elsewhere: not unless the operator names their origin."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.assemble import assemble
from pdproxy.config.settings import Settings
from pdproxy.errors import ConfigError
from tests.fakes.proxy_harness import proxy_in_front_of

SHOP = "https://shop.example"
ASKING = {
    "origin": SHOP,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-session-id",
}


async def test_off_by_default() -> None:
    async with proxy_in_front_of() as house:
        answer = await house.post(headers={"origin": SHOP})
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert (await house.call_raw("/v1/completions", b"", ASKING, "OPTIONS").answer()).status == 405


@pytest.mark.parametrize("origins", [(SHOP, "http://localhost:3000"), ("*",)])
async def test_a_named_origin_may_ask(origins: tuple[str, ...]) -> None:
    """Its preflight carries no key."""
    async with proxy_in_front_of(cors_origins=origins, api_keys=("secret",)) as house:
        allowed = await house.call_raw("/v1/completions", b"", ASKING, "OPTIONS").answer()
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-headers"] == ASKING["access-control-request-headers"]
        mine = {"origin": SHOP, "x-api-key": "secret"}
        for headers, status in ((mine, 200), ({"origin": SHOP}, 401)):
            answer = await house.post(headers=headers, stream=True)
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] in (SHOP, "*")
            assert "x-pdproxy-path" in answer.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in answer.headers


async def test_another_origin_may_not() -> None:
    async with proxy_in_front_of(cors_origins=(SHOP,)) as house:
        other = ASKING | {"origin": "https://evil.example"}
        assert (await house.call_raw("/v1/completions", b"", other, "OPTIONS").answer()).status == 400
        answer = await house.post(headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["shop.example", "https://shop.example/", "https://shop.example/path"])
def test_what_is_no_origin(origin: str) -> None:
    options: dict[str, Any] = {"prefill": ("http://p:1",), "decode": ("http://d:1",), "cors_origins": (origin,)}
    with pytest.raises(ConfigError, match=r"cors_origins: .* is no origin"):
        assemble(Settings(**options))
