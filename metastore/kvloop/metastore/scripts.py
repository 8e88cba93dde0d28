"""Lua scripts, each with its one typed function.

Every script reads through pcall with a bounded range: a value of another type, or of any size, under our
keys is a miss and costs no memory. Writes set value and TTL in one command.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvloop.metastore import codec
from kvloop.metastore.port import DirectoryUnavailable, Outage

MAX_HINT_SCOPES = 4
MAX_HINT_BYTES = 512


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and its digest."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        # EVALSHA names scripts by SHA-1; nothing secret depends on it.
        digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


class Runner(Protocol):
    """Whatever runs scripts on the node that owns the first key."""

    async def run(self, script: Script, keys: Sequence[bytes], *args: bytes | int) -> Any:
        """Return the script's answer, loading it when the server doesn't know it."""
        ...


class RawFound(NamedTuple):
    """A value as the store has it, and the store's time."""

    value: bytes | None
    ttl_ms: int
    now_us: int


class RawHint(NamedTuple):
    """Which of the keys asked for led to a lease (-1: none), the scope's tag if a hint did, and the lease."""

    position: int
    scope_tag: bytes
    found: RawFound


_LOOKUP = Script(f"""
-- KEYS[1] lease key
-- returns {{value or false, TTL in ms, the store's time in microseconds}}
local now = redis.call('TIME')
local now_us = now[1] * 1000000 + now[2]
local value = redis.pcall('GETRANGE', KEYS[1], 0, {codec.MAX_BYTES})
if type(value) ~= 'string' or #value == 0 or #value > {codec.MAX_BYTES} then
  return {{false, 0, now_us}}
end
return {{value, redis.call('PTTL', KEYS[1]), now_us}}
""")

_PUBLISH = Script(f"""
-- KEYS[1] lease key; ARGV[1] value with its header; ARGV[2] TTL in ms
-- returns {{1 when written or 0, value of another lease that was replaced or false}}
local old = redis.pcall('GETRANGE', KEYS[1], 0, {codec.MAX_BYTES})
local displaced = false
-- What has no TTL or no header isn't an entry and is written over.
if type(old) == 'string' and #old > {codec.HEADER_BYTES} and #old <= {codec.MAX_BYTES}
    and string.sub(old, 1, 3) == 'KVL' and redis.call('PTTL', KEYS[1]) >= 0
    and string.sub(old, 21, 36) ~= string.sub(ARGV[1], 21, 36) then
  local standing = tonumber(string.sub(old, 5, 20))
  if standing and standing > tonumber(string.sub(ARGV[1], 5, 20)) then
    -- A start that lies ahead of the clock was written before the clock was set back.
    local now = redis.call('TIME')
    if standing <= now[1] * 1000000 + now[2] then
      return {{0, false}}
    end
  end
  displaced = old
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {{1, displaced}}
""")

_REMOVE = Script("""
-- KEYS[1] lease key; ARGV[1] digest of the lease id
-- returns 1 when the entry was this lease's and is gone, or 0
local old = redis.pcall('GETRANGE', KEYS[1], 0, 35)
if type(old) == 'string' and string.sub(old, 1, 3) == 'KVL' and string.sub(old, 21, 36) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
""")

_RENEW = Script("""
-- KEYS[1] lease key; KEYS[2] alive key; ARGV[1] digest of the lease id; ARGV[2] TTL in ms
-- returns 0 without a session, 1 when the entry stands for at least that long, 2 without an entry, 3 when it
--   is another lease's
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
local old = redis.pcall('GETRANGE', KEYS[1], 0, 35)
if type(old) ~= 'string' or string.sub(old, 1, 3) ~= 'KVL' then return 2 end
if string.sub(old, 21, 36) ~= ARGV[1] then return 3 end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
""")

_HINT = Script(f"""
-- KEYS hint keys; ARGV[1] length byte and tag of the scope; ARGV[2] TTL in ms
-- returns the number of keys written
for _, key in ipairs(KEYS) do
  local old = redis.pcall('GETRANGE', key, 0, {MAX_HINT_BYTES})
  local value, count, left = 'KVH1' .. ARGV[1], 1, tonumber(ARGV[2])
  if type(old) == 'string' and string.sub(old, 1, 4) == 'KVH1' and #old <= {MAX_HINT_BYTES} then
    left = math.max(left, redis.call('PTTL', key))
    local at = 5
    while at <= #old and count < {MAX_HINT_SCOPES} do
      local last = at + string.byte(old, at)
      local record = string.sub(old, at, last)
      if record ~= ARGV[1] then
        value = value .. record
        count = count + 1
      end
      at = last + 1
    end
  end
  redis.call('SET', key, value, 'PX', left)
end
return #KEYS
""")

_CANDIDATES = """
local function candidates(key)
  local value = redis.pcall('GETRANGE', key, 0, %d)
  local tags = {}
  if type(value) ~= 'string' or string.sub(value, 1, 4) ~= 'KVH1' then return tags end
  local at = 5
  while at <= #value do
    local last = at + string.byte(value, at)
    tags[#tags + 1] = string.sub(value, at + 1, last)
    at = last + 1
  end
  return tags
end
"""

_FIND = Script(
    """
-- KEYS lease keys, or any of the hint keys; ARGV[1] number of lease keys; ARGV[2] beginning of the hint keys;
-- ARGV[3] their ends, longest prefix first, with spaces in between: one argument costs less than 40 keys
-- returns {position from 1 of the lease key or, after those, of the hint that led to a lease, or 0; tag of
--   the scope or ''; value or false; TTL in ms; seconds; microseconds}; reads keys that it is not given,
--   which a cluster forbids
"""
    + _CANDIDATES % MAX_HINT_BYTES
    + f"""
local now = redis.call('TIME')
local function live(key)
  local value = redis.pcall('GETRANGE', key, 0, {codec.MAX_BYTES})
  if type(value) == 'string' and #value > {codec.HEADER_BYTES} and #value <= {codec.MAX_BYTES}
      and string.sub(value, 1, 4) == 'KVL1' then
    local left = redis.call('PTTL', key)
    if left > 0 then return value, left end
  end
end
local leases = tonumber(ARGV[1])
for position = 1, leases do
  local value, left = live(KEYS[position])
  if value then return {{position, '', value, left, now[1], now[2]}} end
end
local seen, position = {{}}, leases
for ending in string.gmatch(ARGV[3], '%S+') do
  position = position + 1
  for _, tag in ipairs(candidates(ARGV[2] .. ending)) do
    if not seen[tag] then
      seen[tag] = true
      local value, left = live('kvloop:{{' .. tag .. '}}:lease')
      if value then return {{position, tag, value, left, now[1], now[2]}} end
    end
  end
end
return {{0, '', false, 0, now[1], now[2]}}
"""
)

_SCOPES = Script(
    """
-- KEYS hint keys, longest prefix first
-- returns {seconds, microseconds, position, tag, position, tag, ...} of at most 8 scopes, longest first
"""
    + _CANDIDATES % MAX_HINT_BYTES
    + """
local now = redis.call('TIME')
local answer, seen = {now[1], now[2]}, {}
for position, key in ipairs(KEYS) do
  for _, tag in ipairs(candidates(key)) do
    if not seen[tag] and #answer < 18 then
      seen[tag] = true
      answer[#answer + 1] = position
      answer[#answer + 1] = tag
    end
  end
end
return answer
"""
)


@contextmanager
def _shaped() -> Iterator[None]:
    """Turn an answer of another shape, which only something else than a store gives, into an outage."""
    try:
        yield
    except (ValueError, TypeError):
        raise DirectoryUnavailable(Outage.OTHER) from None


def _clock(seconds: bytes, micros: bytes) -> int:
    return int(seconds) * 1_000_000 + int(micros)


async def lookup(runner: Runner, key: bytes) -> RawFound:
    """Return the value under a lease key with its TTL, and the store's time."""
    answer = await runner.run(_LOOKUP, (key,))
    try:
        value, ttl_ms, now_us = answer
        return RawFound(value, int(ttl_ms), int(now_us))
    except (ValueError, TypeError):
        raise DirectoryUnavailable(Outage.OTHER) from None


async def publish(runner: Runner, key: bytes, value: bytes, ttl_ms: int) -> tuple[bool, bytes | None]:
    """Write a value unless a later-started turn's stands; return whether, and what was displaced."""
    answer = await runner.run(_PUBLISH, (key,), value, ttl_ms)
    with _shaped():
        won, displaced = answer
        return won == 1, displaced


async def remove(runner: Runner, key: bytes, lease_tag: bytes) -> bool:
    """Remove a value if it is this lease's."""
    return bool(await runner.run(_REMOVE, (key,), lease_tag) == 1)


async def renew(runner: Runner, lease_key: bytes, alive_key: bytes, lease_tag: bytes, ttl_ms: int) -> int:
    """Prolong a lease's entry while a session is open; return 0 to 3 as the script says."""
    answer = await runner.run(_RENEW, (lease_key, alive_key), lease_tag, ttl_ms)
    with _shaped():
        return int(answer)


async def put_hints(runner: Runner, keys: Sequence[bytes], scope_tag: bytes, ttl_ms: int) -> None:
    """Put a scope in front of every hint key's scopes."""
    await runner.run(_HINT, keys, bytes((len(scope_tag),)) + scope_tag, ttl_ms)


async def find(
    runner: Runner, leases: Sequence[bytes], hint_prefix: bytes, hint_tags: Sequence[bytes]
) -> RawHint:
    """Return the first live lease of these keys, or else that the hints lead to; standalone servers only."""
    named = leases or (hint_prefix + hint_tags[0],)
    answer = await runner.run(_FIND, named, len(leases), hint_prefix, b" ".join(hint_tags))
    with _shaped():
        position, scope_tag, value, ttl_ms, seconds, micros = answer
        return RawHint(position - 1, scope_tag, RawFound(value, ttl_ms, _clock(seconds, micros)))


async def hinted_scopes(runner: Runner, keys: Sequence[bytes]) -> tuple[int, list[tuple[int, bytes]]]:
    """Return the store's time and the scopes that the hints lead to, with the key's position."""
    answer = await runner.run(_SCOPES, keys)
    with _shaped():
        seconds, micros, *rest = answer
        pairs = zip(rest[::2], rest[1::2], strict=True)
        return _clock(seconds, micros), [(position - 1, scope_tag) for position, scope_tag in pairs]
