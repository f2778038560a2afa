"""Requests through a front, whose leader admits them."""

from __future__ import annotations

import pytest

from tests.fakes.proxy_harness import WAYS, Way, proxy_in_front_of, until


@pytest.mark.parametrize("way", WAYS)
async def test_a_front_serves_as_the_proxy_does(way: Way) -> None:
    async with proxy_in_front_of(way=way, by_front=True) as house:
        answers = [await house.post(stream=stream) for stream in (False, True)]
        assert [answer.status for answer in answers] == [200, 200]
        assert house.leader is not None
        owner = house.leader.pool.of_role("decode")[0]
        await until(lambda: owner.held == 0)
        assert owner.account is not None
        assert owner.account.granted_total == 2 * 1 + 1, "two requests, and the canary before them"
