"""The module keeps the store in Redis or Valkey. Each change is one Lua script, and only the server's clock counts.

All keys have the fleet's name in braces, so that a cluster keeps them in one slot. Scripts are sent as they are, each
time: about a kilobyte per second, and no script is missing after the server has restarted.

A server that only follows another is refused. One that is promoted may lack what the old one acknowledged last: a lead
that somebody holds, and the term of it. The terms that callers have seen then keep the next one greater. That no two
lead at once is not promised across such a promotion.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from pdproxy.coordination.store import UNREADABLE, Leader, Member, bounded, check_seen, foreign, unavailable
from pdproxy.errors import ConfigError, StoreUnavailable

_FOREIGN = "PDPROXY_FOREIGN"

NOW_MS: Final = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
"""
HOLD: Final = (
    NOW_MS
    + """
redis.call('PERSIST', KEYS[2]) -- terms never end; and a server that only follows another refuses to write
local found = redis.call('HMGET', KEYS[1], 'term', 'member', 'address')
if redis.call('EXISTS', KEYS[1]) == 1 then
  if found[2] == ARGV[1] then
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
  elseif redis.call('PTTL', KEYS[1]) < 0 then
    return redis.error_reply('PDPROXY_FOREIGN a lead without an end')
  end
  return found
end
local known = redis.call('GET', KEYS[2])
if known and not string.match(known, '^%d+$') then
  return redis.error_reply('PDPROXY_FOREIGN no term')
end
local term = math.max(tonumber(known or now_ms), tonumber(ARGV[3])) + 1
local said = string.format('%.0f', term)
redis.call('SET', KEYS[2], said)
redis.call('HSET', KEYS[1], 'term', said, 'member', ARGV[1], 'address', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {said, ARGV[1], ARGV[2]}
"""
)
RELEASE: Final = """
local found = redis.call('HMGET', KEYS[1], 'term', 'member')
if found[1] == ARGV[1] and found[2] == ARGV[2] then
  redis.call('DEL', KEYS[1])
end
"""
ENTER: Final = (
    NOW_MS
    + """
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', now_ms + ARGV[3]) .. ' ' .. ARGV[2])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
"""
)
MEMBERS: Final = (
    NOW_MS
    + """
local all = redis.call('HGETALL', KEYS[1])
local present = {}
for at = 1, #all, 2 do
  local until_ms, member = string.match(all[at + 1], '^(%d+) (.*)$')
  if not until_ms then
    return redis.error_reply('PDPROXY_FOREIGN no member')
  elseif tonumber(until_ms) > now_ms then
    present[#present + 1] = member
  else
    redis.call('HDEL', KEYS[1], all[at])
  end
end
return present
"""
)
SECRET: Final = "redis.call('SET', KEYS[1], ARGV[1], 'NX') return redis.call('GET', KEYS[1])"


class RedisStore:
    """Implements `store.Store`. Mutable state: the client's connections."""

    __slots__ = ("_client", "_prefix", "_timeout_s", "_where")

    def __init__(self, url: str, fleet: str, *, timeout_s: float) -> None:
        """Raises `ConfigError` where redis-py cannot read the URL."""
        self._timeout_s = timeout_s
        self._prefix = f"pdproxy:{{{fleet}}}:"
        try:
            parts = urlsplit(url)
            self._where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
            # One more try, at once: the server may have closed an idle connection. All calls here may be repeated.
            retry = Retry(NoBackoff(), 1)
            self._client: Redis = Redis.from_url(url, retry=retry, socket_connect_timeout=timeout_s, protocol=2)
        except (ValueError, TypeError):  # whose text may have a part of the password
            raise ConfigError(f"coordinator: the URL cannot be used: {UNREADABLE}") from None

    async def hold(self, member: str, address: str, *, seen: int, ttl_s: float) -> Leader:
        check_seen(seen)
        answer = await self._run(HOLD, ["leader", "term"], member, address, seen, _ms(ttl_s))
        leader = self._leader(answer)
        if leader is None:
            raise foreign(self._where, f"{self._prefix}leader")
        return leader

    async def look(self) -> Leader | None:
        return self._leader(await self._ask("HMGET", f"{self._prefix}leader", "term", "member", "address"))

    async def release(self, leader: Leader) -> None:
        await self._run(RELEASE, ["leader"], leader.term, leader.member)

    async def enter(self, member: Member, ttl_s: float) -> None:
        await self._run(ENTER, ["members"], member.id, msgspec.json.encode(member), _ms(ttl_s))

    async def leave(self, member_id: str) -> None:
        await self._ask("HDEL", f"{self._prefix}members", member_id)

    async def members(self) -> list[Member]:
        answer = await self._run(MEMBERS, ["members"])
        try:
            found = [msgspec.json.decode(text, type=Member) for text in answer]
        except (msgspec.DecodeError, TypeError):
            raise foreign(self._where, f"{self._prefix}members") from None
        return sorted(found, key=lambda member: member.id)

    async def secret(self, proposed: str) -> str:
        answer = await self._run(SECRET, ["secret"], proposed)
        try:
            return str(answer, "utf-8")
        except (TypeError, UnicodeDecodeError):
            raise foreign(self._where, f"{self._prefix}secret") from None

    async def aclose(self) -> None:
        with suppress(StoreUnavailable, RedisError, OSError), bounded(self._timeout_s, self._where):
            await self._client.aclose()

    def _leader(self, answer: Any) -> Leader | None:
        if answer == [None, None, None]:
            return None
        try:
            term, member, address = (str(part, "ascii" if at == 0 else "utf-8") for at, part in enumerate(answer))
            return Leader(int(term), member, address)
        except (TypeError, ValueError):
            raise foreign(self._where, f"{self._prefix}leader") from None

    async def _run(self, script: str, names: list[str], *arguments: str | int | bytes) -> Any:
        return await self._ask("EVAL", script, len(names), *(f"{self._prefix}{name}" for name in names), *arguments)

    async def _ask(self, *words: str | int | bytes) -> Any:
        try:
            with bounded(self._timeout_s, self._where):
                return await self._client.execute_command(*words)  # type: ignore[no-untyped-call]
        except ResponseError as error:
            if "WRONGTYPE" in str(error) or _FOREIGN in str(error):
                raise foreign(self._where, self._prefix) from None
            raise unavailable(self._where, str(error)) from None
        except StoreUnavailable:
            raise
        except Exception as error:
            # redis-py passes on what its parser says of an answer that is none of Redis's, and what an event loop says
            # of a connection that was closed in that moment: with uvloop it is a RuntimeError.
            raise unavailable(self._where, str(error) or type(error).__name__) from None


def _ms(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
