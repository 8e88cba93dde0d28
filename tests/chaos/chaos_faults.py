"""The faults of a chaos run, one after the other under traffic."""

import asyncio
import random
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from chaos_fleet import POLL_S, Arena
from chaos_traffic import Traffic

from kvloop.connector.control import ControlClient, ControlError

KINDS = (
    "kill_decode_mid_stream",
    "kill_decode_mid_read",
    *(f"kill_{role}" for role in ("prefill", "decode", "router", "store")),
    *(f"pause_{role}" for role in ("prefill", "decode", "router", "store")),
    *(f"drain_{role}" for role in ("prefill", "decode", "router")),
    *(f"clock_jump_{role}" for role in ("prefill", "decode", "router")),
    "restart_store_empty",
    "slow_network_decode",
)
_Turn = Mapping[str, Any]
SHOWN_BY: dict[str, Callable[[_Turn], bool]] = {
    "kill_decode_mid_stream": lambda turn: turn["migrated"],
    "kill_decode_mid_read": lambda turn: (
        turn["migrated"] or turn["reason"] == "READ_FAILED" or turn["attempts"] > 1
    ),
}
"""What becomes of a turn that was met where a fault was to meet one."""
TRIES = 3
"""Of a fault that meets nobody; what is looked for is over in milliseconds."""
DOWN_S = 2.0
MIN_READY_S = 3.0
_FIND_S = 60.0


@dataclass
class Fault:
    """One fault, with times in seconds from the run's start."""

    id: int
    kind: str
    target: str
    time: float
    until: float = 0.0


def hit(faults: Iterable[Mapping[str, Any]], turns: Iterable[_Turn]) -> set[str]:
    """Return the kinds of which a fault struck, and met what it was to meet, by the turns' own records."""
    met: dict[int, list[_Turn]] = defaultdict(list)
    for turn in turns:
        for fault in turn["faults"]:
            met[fault].append(turn)
    return {
        fault["kind"]
        for fault in faults
        if fault["kind"] not in SHOWN_BY or any(map(SHOWN_BY[fault["kind"]], met[fault["id"]]))
    }


class NobodyBusy(Exception):
    """No decode worker was met at what a fault is to interrupt."""


class Faults:
    """Strikes one fault after the other."""

    def __init__(self, arena: Arena, traffic: Traffic, *, seed: int) -> None:
        self.arena = arena
        self.traffic = traffic
        self.struck: list[Fault] = []
        self._dice = random.Random(seed)
        self._start = time.monotonic()

    async def run(self, kinds: list[str], *, gap_s: tuple[float, float]) -> None:
        """Strike the given kinds in their order; those that met nobody again."""
        for _ in range(TRIES):
            for kind in kinds:
                await asyncio.sleep(self._dice.uniform(*gap_s))
                # A fleet has one of everything to spare, not two.
                await self.arena.settled()
                with suppress(NobodyBusy):
                    await self._strike(kind)
            for fault in self.struck:
                await self.traffic.ended(fault.id)
            met = hit(self.as_json(), map(asdict, self.traffic.records))
            kinds = [kind for kind in kinds if kind not in met]

    async def roll(self) -> None:
        """Restart every router and worker by SIGTERM, one after the other."""
        for target in self.arena.fleet.names("router", "prefill", "decode"):
            await self._restart(target)
            await self.arena.settled()
            await self.traffic.routers.ready()
            # As minReadySeconds: a turn that was refused just now must not meet the next one's end.
            await asyncio.sleep(MIN_READY_S)

    async def _strike(self, kind: str) -> None:
        special: dict[str, Callable[[], Awaitable[None]]] = {
            "kill_decode_mid_stream": self._kill_mid_stream,
            "kill_decode_mid_read": self._kill_mid_read,
            "pause_store": self._pause_store,
            "restart_store_empty": self._restart_store,
            "slow_network_decode": self._slow_network,
        }
        if kind in special:
            await special[kind]()
            return
        act, _, role = kind.rpartition("_")
        acts = {"kill": self._kill, "pause": self._pause, "drain": self._drain, "clock_jump": self._jump}
        await acts[act](role)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the faults as they are written."""
        return [asdict(fault) for fault in self.struck]

    @asynccontextmanager
    async def _fault(self, kind: str, target: str) -> AsyncIterator[None]:
        fault = Fault(len(self.struck), kind, target, self._now())
        self.struck.append(fault)
        self.traffic.struck(fault.id)
        try:
            yield
        finally:
            fault.until = self._now()
            self.traffic.active.discard(fault.id)

    def _now(self) -> float:
        return round(time.monotonic() - self._start, 2)

    def _target(self, role: str) -> str:
        return self._dice.choice(self.arena.fleet.names(role))

    async def _kill(self, role: str) -> None:
        target = self._target(role)
        async with self._fault(f"kill_{role}", target):
            await self.arena.fleet.kill(target)
            await self._revive(target)

    async def _kill_mid_stream(self) -> None:
        target = await self._busy(self._generates())
        async with self._fault("kill_decode_mid_stream", target):
            await self.arena.fleet.kill(target)
            await self._revive(target)

    async def _kill_mid_read(self) -> None:
        async with AsyncExitStack() as stalled:
            # Reads that have a pin but can't go on yet: otherwise they are over before one of them is seen.
            await self._stall_reads(stalled)
            target = await self._busy(self._is_read())
            async with self._fault("kill_decode_mid_read", target):
                await self.arena.fleet.kill(target)
                await stalled.aclose()
                await self._revive(target)

    def _generates(self) -> Callable[[str], Awaitable[bool]]:
        """Return what tells whether a decode worker has come by tokens since it was last asked of it."""
        grows = self._grows("kvloop_engine_generated_tokens_total", forget=True)

        async def generates(name: str) -> bool:
            # Legs alone may still wait for their KV.
            return await grows(name) and await self.arena.metric(name, "kvloop_legs_in_flight") > 0

        return generates

    def _is_read(self) -> Callable[[str], Awaitable[bool]]:
        """Return what tells whether a read has begun at a decode worker since it was first asked of it."""
        grows = self._grows("kvloop_reads_granted_total", forget=False)

        async def is_read(name: str) -> bool:
            # Pins alone may be those of DIRECT turns.
            return await grows(name) and await self.arena.metric(name, "kvloop_lease_pins") > 0

        return is_read

    def _grows(self, counter: str, *, forget: bool) -> Callable[[str], Awaitable[bool]]:
        before: dict[str, float] = {}

        async def grows(name: str) -> bool:
            now = await self.arena.metric(name, counter)
            known = before.setdefault(name, now)
            if forget:
                before[name] = now
            return now > known

        return grows

    async def _stall_reads(self, stalled: AsyncExitStack) -> None:
        for name in self.arena.fleet.names("prefill"):
            client = await ControlClient.connect(self.arena.control(name))
            stalled.push_async_callback(client.close)
            await client.stall("start")
            stalled.push_async_callback(_go_on, client)

    async def _revive(self, target: str) -> None:
        await asyncio.sleep(DOWN_S)
        await self.arena.fleet.start(target)

    async def _busy(self, is_busy: Callable[[str], Awaitable[bool]]) -> str:
        """Return a decode worker that is at something right now. Raises NobodyBusy."""
        names = self.arena.fleet.names("decode")
        try:
            async with asyncio.timeout(_FIND_S):
                while True:
                    busy = await asyncio.gather(*map(is_busy, names))
                    if any(busy):
                        return names[busy.index(True)]
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise NobodyBusy from None

    async def _pause(self, role: str) -> None:
        target = self._target(role)
        part = self.arena.fleet.parts[target]
        async with self._fault(f"pause_{role}", target):
            part.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(self.arena.size.pause_s)
            finally:
                part.signal(signal.SIGCONT)

    async def _drain(self, role: str) -> None:
        await self._restart(self._target(role))

    async def _restart(self, target: str) -> None:
        role = target.partition("-")[0]
        part = self.arena.fleet.parts[target]
        async with self._fault(f"drain_{role}", target):
            part.expected_to_end = True
            part.signal(signal.SIGTERM)
            async with asyncio.timeout(_FIND_S):
                code = await part.wait_ended()
            if code != 0:
                raise AssertionError(f"{target} ended with exit code {code} after its drain")
            await self.arena.fleet.start(target)

    async def _jump(self, role: str) -> None:
        target = self._target(role)
        async with self._fault(f"clock_jump_{role}", target):
            for seconds in (3600.0, -3600.0, 0.0):
                self.arena.move_clock(target, seconds)
                await asyncio.sleep(DOWN_S)

    async def _slow_network(self) -> None:
        async with self._fault("slow_network_decode", self.arena.slowed):
            self.arena.proxy.delay_s = 0.15
            try:
                await asyncio.sleep(self.arena.size.pause_s)
            finally:
                self.arena.proxy.delay_s = 0.0

    async def _restart_store(self) -> None:
        async with self._fault("restart_store_empty", "store"):
            await self.arena.fleet.restart("store")

    async def _pause_store(self) -> None:
        async with self._fault("pause_store", "store"):
            server = psutil.Process(self.arena.fleet.parts["store"].facts["server_pid"])
            server.suspend()
            try:
                await asyncio.sleep(self.arena.size.pause_s / 2)
            finally:
                server.resume()


async def _go_on(client: ControlClient) -> None:
    with suppress(ControlError):  # the worker is gone, and what it stalled with it
        await client.stall(None)
