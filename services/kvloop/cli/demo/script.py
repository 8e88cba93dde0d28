"""The demo's conversation: an agent looks for the cause of an outage; every tool result is made up here.

The text is a pure function of nothing, so every run has the same prompts. Tool results come as user messages,
which every chat template has.
"""

import json
from collections.abc import Callable

SYSTEM = (
    "You are an on-call engineer's assistant. You are given the output of tools, one at a time. "
    "After each, say in one or two short sentences what you see and what you would look at next."
)
WARM_UP = "Name three rivers of Europe, and the sea into which each of them flows."

LONGEST_DIRECT = 256
"""New tokens up to which D goes on by itself: the last tool result, which is shorter than those before."""
WAYS = (
    ("RECOMPUTE", "NOT_FOUND"),
    *[("READBACK", "PROVEN")] * 4,
    ("DIRECT", "PROVEN"),
    ("RECOMPUTE", "NOT_FOUND"),
)
"""Verdict and reason of every turn with reuse."""
STARTED_OVER = len(WAYS)
"""Before this turn the agent ends its conversation: it begins anew, and nothing of it is held any more."""

_SERVICES = ("checkout", "payment", "inventory", "basket", "mailer")


def turns() -> list[str]:
    """Return the messages of the user's side."""
    return [
        _task(),
        _result("tail -n 18 /var/log/checkout/app.log", _log()),
        _result("curl -s http://127.0.0.1:9100/api/pools?format=json", _pools()),
        _result("kubectl get pods -n shop -o wide", _pods()),
        _result("git -C /srv/checkout diff v4.1.8 v4.1.9 -- config pool.py", _diff()),
        _result("pytest -q tests/pool", _tests()),
        _task(),
    ]


def _task() -> str:
    return (
        "Since 09:12 today every fifth order fails with HTTP 503. Help me to find out why. "
        "Here is what is in the service's folder.\n\n" + _call("ls -l /srv/checkout", _listing())
    )


def _result(command: str, output: str) -> str:
    return "Tool result.\n\n" + _call(command, output)


def _call(command: str, output: str) -> str:
    return f"$ {command}\n{output}"


def _rows(count: int, row: Callable[[int], str]) -> str:
    return "\n".join(row(index) for index in range(count))


def _number(index: int, modulus: int) -> int:
    """Return a number that looks arbitrary and never changes."""
    return (index * 7919 + 104729) * 31 % modulus


def _listing() -> str:
    names = (
        "Dockerfile", "Makefile", "README.md", "app.py", "cart.py", "config.yaml", "handlers.py",
        "migrations", "models.py", "orders.py", "pool.py", "prices.py", "pyproject.toml", "retry.py",
        "tests", "tracing.py",
    )  # fmt: skip

    def row(index: int) -> str:
        size = 400 + _number(index, 18000)
        minute = 10 + _number(index, 49)
        return f"-rw-r--r-- 1 shop shop {size:6d} Mar  4 08:{minute} {names[index]}"

    return _rows(len(names), row)


def _log() -> str:
    texts = (
        "INFO request accepted path=/v1/orders",
        "INFO pool acquire waited_ms=4",
        "WARN pool acquire waited_ms=1873",
        "ERROR pool exhausted size=8 waiting=41",
        "ERROR upstream payment answered 503",
    )

    def row(index: int) -> str:
        second, millis = index * 3 % 60, _number(index, 1000)
        order = 880000 + _number(index, 9973)
        return f"2026-03-04T09:12:{second:02d}.{millis:03d}Z {texts[index % 5]} order={order}"

    return _rows(18, row)


def _pools() -> str:
    pools = [
        {
            "service": name,
            "size": 8 if name == "checkout" else 32,
            "in_use": 8 if name == "checkout" else 5 + _number(index, 11),
            "waiting": 41 if name == "checkout" else 0,
            "acquire_ms_p50": 1 + _number(index, 4),
            "acquire_ms_p99": 4980 if name == "checkout" else 12 + _number(index, 30),
            "last_error": "timeout after 5000 ms" if name == "checkout" else None,
        }
        for index, name in enumerate(_SERVICES)
    ]
    return json.dumps({"taken_at": "2026-03-04T09:20:11Z", "pools": pools}, indent=1)


def _pods() -> str:
    def row(index: int) -> str:
        service = _SERVICES[index % len(_SERVICES)]
        name = f"{service}-{0x5C9F0 + _number(index, 40000):x}-{_number(index, 90000) + 10000:x}"
        restarts = 7 if service == "checkout" else 0
        address = f"10.42.{index % 3}.{20 + _number(index, 200)}"
        return f"{name}   1/1   Running   {restarts}   {2 + index % 5}h   {address}   node-{index % 3}"

    return "NAME   READY   STATUS   RESTARTS   AGE   IP   NODE\n" + _rows(12, row)


def _diff() -> str:
    return """\
diff --git a/config/pool.yaml b/config/pool.yaml
--- a/config/pool.yaml
+++ b/config/pool.yaml
@@ -3,9 +3,9 @@ pool:
   host: payments-db.internal
   port: 5432
-  size: 32
+  size: 8
   acquire_timeout_ms: 5000
-  recycle_after_s: 1800
+  recycle_after_s: 30
   statement_cache: 256
diff --git a/pool.py b/pool.py
--- a/pool.py
+++ b/pool.py
@@ -41,12 +41,11 @@ class Pool:
     async def acquire(self) -> Connection:
-        async with self._gate:
-            connection = await self._idle.get()
+        connection = await self._idle.get()
         if connection.age_s > self._recycle_after_s:
             await connection.close()
             connection = await self._connect()
+            self._opened += 1
         return connection

     async def release(self, connection: Connection) -> None:
-        self._idle.put_nowait(connection)
+        if connection.healthy:
+            self._idle.put_nowait(connection)
"""


def _tests() -> str:
    return """\
FAILED tests/pool/test_pool.py::test_release_of_unhealthy_connection_frees_a_slot
    await pool.release(first)
>   third = await asyncio.wait_for(pool.acquire(), 0.5)
E   TimeoutError: no connection within 500 ms; size=2 idle=0 opened=2
1 failed, 5 passed in 1.87s
What is the cause, and what should be changed first?"""
