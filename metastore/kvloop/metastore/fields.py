"""Small shared tables: one key, many fields, each with a deadline of its own.

A table of some hundred short values (workers, cost estimates) is read whole in one round trip, without
scanning a store that may hold millions of leases. Deadlines are by the store's clock; the key's TTL is the
latest of them, so that an abandoned table goes by itself.
"""

from collections.abc import Callable
from typing import Protocol

from kvloop.metastore.guard import GuardedLink
from kvloop.metastore.memory import ExpiringTable
from kvloop.metastore.port import DirectoryUnavailable, Outage
from kvloop.metastore.scripts import Script
from kvloop.metastore.ttl import positive_milliseconds
from kvloop.runtime.clock import Clock, SystemClock

MAX_FIELDS = 4096
MAX_VALUE_BYTES = 8192


class Fields(Protocol):
    """A shared table. Methods raise DirectoryUnavailable when the store fails."""

    async def put(self, field: bytes, value: bytes, ttl_s: float) -> bool:
        """Write a field; False when the table is full."""
        ...

    async def merge(self, field: bytes, sample: str, ttl_s: float) -> str:
        """Merge "limit weight v1 v2 ..." into the field's weighted mean; return "count m1 m2 ..."."""
        ...

    async def remove(self, field: bytes, prefix: bytes) -> bool:
        """Remove a field if its value begins so."""
        ...

    async def all(self) -> dict[bytes, bytes]:
        """Return the live fields."""
        ...


_COMMON = f"""
local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
local function write(key, field, value, ttl)
  local left = redis.pcall('PTTL', key)
  if redis.call('TYPE', key)['ok'] ~= 'hash' then
    redis.call('DEL', key)
    left = 0
  elseif redis.call('HEXISTS', key, field) == 0 and redis.call('HLEN', key) >= {MAX_FIELDS} then
    return 0
  end
  redis.call('HSET', key, field, string.format('%013d', now_ms() + ttl) .. value)
  redis.call('PEXPIRE', key, math.max(left, ttl))
  return 1
end
"""

_PUT = Script(
    _COMMON
    + """
-- KEYS[1] table; ARGV[1] field; ARGV[2] value; ARGV[3] TTL in ms
-- returns 1 when written, 0 when the table is full
return write(KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]))
"""
)

_MERGE = Script(
    _COMMON
    + """
-- KEYS[1] table; ARGV[1] field; ARGV[2] "limit weight v1 v2 ..."; ARGV[3] TTL in ms
-- returns "count m1 m2 ...": the weighted mean, whose weight is limited so that it follows changes
local function numbers(text)
  local list = {}
  for word in string.gmatch(text, '%S+') do list[#list + 1] = tonumber(word) end
  return list
end
local sample = numbers(ARGV[2])
local limit, weight = sample[1], sample[2]
local mean = {}
local old = redis.pcall('HGET', KEYS[1], ARGV[1])
if type(old) == 'string' and (tonumber(string.sub(old, 1, 13)) or 0) > now_ms() then
  mean = numbers(string.sub(old, 14))
end
if #mean ~= #sample - 1 then
  mean = {0}
  for i = 3, #sample do mean[i - 1] = sample[i] end
end
local count = mean[1]
for i = 2, #mean do
  mean[i] = mean[i] + (sample[i + 1] - mean[i]) * weight / (count + weight)
end
mean[1] = math.min(count + weight, limit)
for i = 1, #mean do mean[i] = string.format('%.17g', mean[i]) end
local value = table.concat(mean, ' ')
write(KEYS[1], ARGV[1], value, tonumber(ARGV[3]))
return value
"""
)

_REMOVE = Script("""
-- KEYS[1] table; ARGV[1] field; ARGV[2] how its value must begin
-- returns 1 when removed, or 0
local old = redis.pcall('HGET', KEYS[1], ARGV[1])
if type(old) == 'string' and string.sub(old, 14, 13 + #ARGV[2]) == ARGV[2] then
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
""")

_ALL = Script(
    _COMMON
    + f"""
-- KEYS[1] table
-- returns {{field, value, field, value, ...}} of the live fields; forgets the others
local size = redis.pcall('HLEN', KEYS[1])
if type(size) ~= 'number' or size > {MAX_FIELDS} then return {{}} end
local all, now, live = redis.call('HGETALL', KEYS[1]), now_ms(), {{}}
for i = 1, #all, 2 do
  if (tonumber(string.sub(all[i + 1], 1, 13)) or 0) > now then
    live[#live + 1] = all[i]
    live[#live + 1] = string.sub(all[i + 1], 14)
  else
    redis.pcall('HDEL', KEYS[1], all[i])
  end
end
return live
"""
)


class RedisFields:
    """A table in Redis or Valkey, over a link that somebody else owns."""

    def __init__(self, link: GuardedLink, key: bytes) -> None:
        self._link = link
        self._key = key

    async def put(self, field: bytes, value: bytes, ttl_s: float) -> bool:
        """See Fields."""
        _bounded(value)
        ttl_ms = positive_milliseconds(ttl_s)
        return bool(await self._link.run(_PUT, (self._key,), field, value, ttl_ms) == 1)

    async def merge(self, field: bytes, sample: str, ttl_s: float) -> str:
        """See Fields."""
        ttl_ms = positive_milliseconds(ttl_s)
        answer = await self._link.run(_MERGE, (self._key,), field, sample.encode(), ttl_ms)
        if not isinstance(answer, bytes):
            raise DirectoryUnavailable(Outage.OTHER)
        return answer.decode(errors="replace")

    async def remove(self, field: bytes, prefix: bytes) -> bool:
        """See Fields."""
        return bool(await self._link.run(_REMOVE, (self._key,), field, prefix) == 1)

    async def all(self) -> dict[bytes, bytes]:
        """See Fields."""
        flat = await self._link.run(_ALL, (self._key,))
        if not isinstance(flat, list) or len(flat) % 2:
            raise DirectoryUnavailable(Outage.OTHER)
        return dict(zip(flat[::2], flat[1::2], strict=True))


class MemoryFields:
    """A table in this process."""

    def __init__(self, clock: Clock | None = None, opened: Callable[[], None] = lambda: None) -> None:
        """Take the clock, and what raises DirectoryUnavailable once the store is closed."""
        self._table: ExpiringTable[bytes] = ExpiringTable(clock or SystemClock())
        self._opened = opened

    async def put(self, field: bytes, value: bytes, ttl_s: float) -> bool:
        """See Fields."""
        self._opened()
        _bounded(value)
        ttl_ms = positive_milliseconds(ttl_s)
        if self._table.get(field) is None and len(self._table) >= MAX_FIELDS:
            return False
        self._table.set(field, value, ttl_ms)
        return True

    async def merge(self, field: bytes, sample: str, ttl_s: float) -> str:
        """See Fields."""
        self._opened()
        limit, weight, *values = (float(word) for word in sample.split())
        held = self._table.get(field)
        count, *means = [float(word) for word in held[0].split()] if held is not None else [0.0, *values]
        if len(means) != len(values):
            count, means = 0.0, list(values)
        means = [
            mean + (value - mean) * weight / (count + weight)
            for mean, value in zip(means, values, strict=True)
        ]
        merged = " ".join(f"{number:.17g}" for number in (min(count + weight, limit), *means))
        await self.put(field, merged.encode(), ttl_s)
        return merged

    async def remove(self, field: bytes, prefix: bytes) -> bool:
        """See Fields."""
        self._opened()
        held = self._table.get(field)
        if held is None or not held[0].startswith(prefix):
            return False
        self._table.remove(field)
        return True

    async def all(self) -> dict[bytes, bytes]:
        """See Fields."""
        self._opened()
        return self._table.live()


def _bounded(value: bytes) -> None:
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"a field has at most {MAX_VALUE_BYTES} bytes")
