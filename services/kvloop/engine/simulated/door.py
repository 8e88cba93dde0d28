"""The simulated engine's control socket: the hooks of the connector's, in its own words, for tests of fleets.

JSON lines over a unix socket: {"id": n, "op": name, ...} is answered by {"id": n, "ok": result} or
{"id": n, "error": code}. The operations are those of kvloop.connector.control that tests of both engines
need, so that its client serves here too.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvloop.engine.simulated.core import Core
from kvloop.engine.simulated.faults import Faults


class Door:
    """Serves one engine's hooks."""

    def __init__(self, path: Path, core: Callable[[], Core], faults: Faults) -> None:
        """core: the engine's life; raises Failure without one."""
        self._path = path
        self._core = core
        self._faults = faults
        self._server: asyncio.Server | None = None
        self._operations: dict[str, Callable[[Mapping[str, Any]], object]] = {
            "guard": self._guard,
            "stall": lambda m: self._faults.stall_at(m["where"]),
            "spoil": lambda m: setattr(self._faults, "spoil", m["how"]),
            "evict": lambda m: self._faults.evict(m["lease_id"]),
            "list": self._list,
        }

    async def open(self) -> None:
        """Listen."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        self._path.chmod(0o600)

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                message = json.loads(line)
                try:
                    answer: dict[str, object] = {"ok": self._operations[message["op"]](message)}
                except (KeyError, ValueError, TypeError):
                    answer = {"error": "bad_request"}
                writer.write(json.dumps({"id": message["id"], **answer}).encode() + b"\n")
        writer.close()

    def _guard(self, message: Mapping[str, Any]) -> None:
        guard = self._faults.guard
        if not hasattr(guard, message["name"]):
            raise ValueError
        setattr(guard, message["name"], bool(message["enabled"]))

    def _list(self, _message: Mapping[str, Any]) -> list[dict[str, object]]:
        core = self._core()
        core.reap()
        now = core.clock.monotonic()
        leases = [
            {
                "lease_id": held.lease_id,
                "kind": "decode",
                "num_blocks": len(held.blocks),
                "remaining_s": max(0.0, held.deadline - now),
                "pins": len(held.pins),
                "doomed": held.doomed,
            }
            for held in core.table.all
        ]
        outcomes = [{"lease_id": name, "kind": "prefill", "pins": 0} for name in core.outcomes.names()]
        return leases + outcomes
