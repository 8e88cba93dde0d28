"""Store, prefill, decode, router and gateway processes as one context.

    async with Fleet(FleetPlan(workers={"engine": "simulated"}), folder) as fleet:
        channel = open_channel(fleet.endpoint("router-0"))
        await fleet.kill("decode-0")
        await fleet.restart("decode-0")

Workers start together; routers start once they know the workers' endpoints, gateways once they know the
routers'. Leaving the context, however it
is left, stops everything in reverse, each stage within a bound. Should this process be killed, the kernel
ends the parts.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from kvloop.cli.supervisor import gpus
from kvloop.cli.supervisor.part import STOP_GRACE_S, Command, Part, PartFailed
from kvloop.cli.supervisor.plan import (
    STORE,
    FleetPlan,
    SettingsFiles,
    is_gateway,
    is_router,
    part_environment,
    role_of,
)
from kvloop.cli.supervisor.programs import STORE_PASSWORD, serve_program, store_program

HOST = "127.0.0.1"
# Nobody comes back to a fleet that ends: its leases need not be served to their deadlines.
_DRAIN_LIMIT_S = 2.0
# Stand-ins for what is known only once it runs, to check settings ahead.
_ANY_PEERS = {"prefill": ("127.0.0.1:1",), "decode": ("127.0.0.1:2",), "router": ("127.0.0.1:3",)}
_ANY_STORE = "redis://127.0.0.1:1"
_WORKERS = ("prefill", "decode")

State = Callable[[str, str], None]


class Fleet:
    """The processes of a plan. Parts are named store, prefill-0, decode-0, router-0 and so on."""

    def __init__(self, plan: FleetPlan, folder: Path, on_state: State | None = None) -> None:
        """Prepare; nothing runs yet.

        folder: gets logs, settings and ready files. on_state: told (part, "starting" | "ready" |
        "stopping" | "stopped").
        """
        self.plan = plan
        self.folder = folder
        self.parts: dict[str, Part] = {}
        self._settings = plan.settings()
        self._files = SettingsFiles(folder)
        # One password through restarts of the store: its clients keep the URL.
        self._store_password = secrets.token_urlsafe(24)
        self._tell = on_state or (lambda _name, _state: None)
        names = list(self._settings)
        if plan.store_url is None:
            names.insert(0, STORE)
        for name in names:
            self.parts[name] = Part(name, folder)

    async def __aenter__(self) -> Self:
        """Start everything. Raises PartFailed or ConfigError, with nothing left running."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, devices in gpus.deal(self.plan, gpus.here()).items():
            self._settings[name]["visible_devices"] = devices
        for name, values in self._settings.items():
            self._files.check(name, values, self._links(name, _ANY_PEERS, _ANY_STORE))
        try:
            await self._together(self.start(name) for name in self.names(STORE))
            await self._together(self.start(name) for name in self.names("prefill", "decode"))
            await self._together(self.start(name) for name in self.names("router"))
            await self._together(self.start(name) for name in self.names("gateway"))
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        await self.stop()

    def names(self, *roles: str) -> list[str]:
        """Return the names of the parts of some roles ("store", "prefill", "decode", "router", "gateway")."""
        return [name for name in self.parts if (role_of(name) or name) in roles]

    def endpoint(self, name: str) -> str:
        """Return a part's host:port."""
        endpoint = self.parts[name].endpoint
        if endpoint is None:
            raise RuntimeError(f"{name} has not been ready yet")
        return endpoint

    def endpoints(self, role: str) -> list[str]:
        """Return the endpoints of a role, in order."""
        return [self.endpoint(name) for name in self.names(role)]

    @property
    def store_url(self) -> str:
        """Return the store's redis:// URL, password included."""
        return self.plan.store_url or str(self.parts[STORE].facts["url"])

    async def start(self, name: str, **settings: Any) -> str:
        """Start a part that does not run and return its endpoint; settings go on top of the plan's.

        A part that has run before comes back on the same port. Raises PartFailed, ConfigError.
        """
        part = self.parts[name]
        if name != STORE:
            self._settings[name] |= settings
        self._tell(name, "starting")
        await part.spawn(self._command(part))
        endpoint = await part.wait_ready(self.plan.ready_timeout_s)
        self._tell(name, "ready")
        return endpoint

    async def restart(self, name: str, **settings: Any) -> str:
        """Stop a part if it runs, and start it on the same port with settings on top of the former ones."""
        await self._stop_part(name)
        return await self.start(name, **settings)

    async def kill(self, name: str) -> None:
        """SIGKILL a part; what it started is left to itself, as after a crash."""
        await self.parts[name].kill()
        self._tell(name, "stopped")

    async def watch(self) -> None:
        """Wait until a part ends that nobody asked to; raise its PartFailed."""
        parts = [part for part in self.parts.values() if part.running]
        waiting = {asyncio.create_task(part.wait_ended()): part for part in parts}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    part = waiting.pop(task)
                    if not part.expected_to_end:
                        raise part.failure()
        finally:
            for task in waiting:
                task.cancel()

    async def stop(self) -> None:
        """Stop all parts: gateways first, the store last. Idempotent."""
        failures: list[BaseException] = []
        for roles in (("gateway",), ("router",), ("prefill", "decode"), (STORE,)):
            stops = (self._stop_part(name) for name in self.names(*roles))
            results = await asyncio.gather(*stops, return_exceptions=True)
            failures += [result for result in results if isinstance(result, BaseException)]
        # One part's trouble does not keep the others from being stopped.
        if failures:
            raise failures[0]

    async def _stop_part(self, name: str) -> None:
        part = self.parts[name]
        if part.running:
            self._tell(name, "stopping")
        await part.stop(STOP_GRACE_S)
        if part.exit_code is not None:
            self._tell(name, "stopped")

    def _command(self, part: Part) -> Command:
        if part.name == STORE:
            port = _port(part.endpoint) or self.plan.store_port
            environment = part_environment({STORE_PASSWORD: self._store_password}, ())
            return Command(store_program(port, part.ready_path), environment)
        values = dict(self._settings[part.name])
        listen = str(values.get("listen", HOST))
        # A port that was asked for stays; the endpoint may be another one, by which others reach it.
        if not _port(listen) and (port := _port(part.endpoint)):
            host = listen.rpartition(":")[0] or HOST
            values["listen"] = f"{host}:{port}"
        if chat := part.facts.get("chat"):
            values["chat_listen"] = chat
        peers = self._peers(part.name)
        file = self._files.write(part.name, values, self._links(part.name, peers, self.store_url))
        names = list(yaml.safe_load(file.read_text(encoding="utf-8")))
        environment = part_environment(self.plan.environment, names)
        return Command(serve_program(role_of(part.name), file, part.ready_path), environment)

    def _peers(self, name: str) -> dict[str, list[str]]:
        """Return the endpoints that a part is told, by role."""
        if is_router(name):
            return {role: self.endpoints(role) for role in _WORKERS}
        return {"router": self.endpoints("router")} if is_gateway(name) else {}

    def _links(self, name: str, peers: Mapping[str, Sequence[str]], store_url: str) -> dict[str, Any]:
        """Return what ties a part to the others; each takes the settings that it knows."""
        links: dict[str, Any] = {
            "listen": f"{HOST}:0",
            "directory_url": store_url,
            "drain_limit_s": _DRAIN_LIMIT_S,
            "chat_listen": f"{HOST}:0",
            "worker_id": name,
            "router_id": name,
        }
        if is_router(name):
            links |= {f"{role}_endpoints": list(peers[role]) for role in _WORKERS}
            # A store of our own knows our workers only: it tells of load and drains, and of later ones. A
            # router that the plan gives workers of its own keeps to them.
            named = self._settings[name].keys() & {f"{role}_endpoints" for role in _WORKERS}
            links["discover"] = self.plan.store_url is None and not named
        if is_gateway(name):
            links["router"] = ",".join(peers["router"])
        return links

    async def _together(self, starts: Iterable[Coroutine[Any, Any, str]]) -> None:
        """Run starts at once; the first failure ends the others and is raised."""
        tasks = [asyncio.create_task(start) for start in starts]
        if not tasks:
            return
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _port(endpoint: str | None) -> int:
    """Return an endpoint's port; 0, which takes any, without one."""
    return int(endpoint.rpartition(":")[2]) if endpoint and ":" in endpoint else 0


__all__ = ["Fleet", "FleetPlan", "PartFailed"]
