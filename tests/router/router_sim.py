"""Routers over prefill and decode workers with simulated engines: real gRPC, a real or a memory store."""

import asyncio
import dataclasses
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from router_fakes import SECRET, Answer, Client, FlakyDirectory, collect

from kvloop.decode.app import DecodeApp
from kvloop.decode.settings import DecodeSettings
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.fabric import Fabric
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.metastore.factory import Store, StoreOptions, open_store
from kvloop.prefill.app import PrefillApp
from kvloop.prefill.settings import PrefillSettings
from kvloop.router.app import RouterApp
from kvloop.router.settings import RouterSettings
from kvloop.runtime import tokens
from kvloop.v1alpha1 import router_service_pb2, sampling_pb2

BLOCK = 16
MAX_LEN = 4096
VOCAB = 32_000
THRESHOLD = 32
_serial = itertools.count()


@dataclass
class Node:
    """One worker and its engine."""

    app: PrefillApp | DecodeApp
    engine: SimulatedEngine

    @property
    def endpoint(self) -> str:
        return self.app.endpoint

    @property
    def name(self) -> str:
        return self.app.worker_id


def ids(count: int, seed: int = 0) -> list[int]:
    """Return ordinary token ids."""
    dice = random.Random(seed)
    return [dice.randrange(3, VOCAB) for _ in range(count)]


def ask(
    prompt: Sequence[int], conversation: str = "c", *, max_tokens: int = 16, **fields: Any
) -> router_service_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    sampling.MergeFrom(fields.pop("sampling", sampling_pb2.SamplingParams()))
    return router_service_pb2.GenerateRequest(
        conversation_id=conversation, prompt_token_ids=tokens.pack(prompt), sampling=sampling, **fields
    )


@dataclass
class SimFleet:
    """Everything of one test."""

    store: Store
    stack: AsyncExitStack
    engine: dict[str, Any]
    decode: dict[str, Any]
    prefills: list[Node] = field(default_factory=list)
    decodes: list[Node] = field(default_factory=list)
    fabric: Fabric = field(default_factory=Fabric)

    @property
    def flaky(self) -> FlakyDirectory:
        assert isinstance(self.store.directory, FlakyDirectory)
        return self.store.directory

    async def add_prefill(self, listen: str = "127.0.0.1:0") -> Node:
        engine = SimulatedEngine(SimulatedSettings(**self.engine), "prefill", fabric=self.fabric)
        settings = PrefillSettings.load(flags=_common(listen, f"p{len(self.prefills)}"))
        app = PrefillApp(settings, engine=engine, store=self.store)
        return await self._added(Node(app, engine), self.prefills)

    async def add_decode(self, listen: str = "127.0.0.1:0") -> Node:
        engine = SimulatedEngine(SimulatedSettings(**self.engine), "decode", fabric=self.fabric)
        flags = {"directory_margin_s": 0.0} | _common(listen, f"d{len(self.decodes)}") | self.decode
        app = DecodeApp(DecodeSettings.load(flags=flags), engine=engine, store=self.store)
        return await self._added(Node(app, engine), self.decodes)

    async def _added(self, node: Node, nodes: list[Node]) -> Node:
        self.stack.push_async_callback(node.app.stop)
        await node.app.start()
        nodes.append(node)
        return node

    async def router(self, store: Store | None = None, **changes: Any) -> RouterApp:
        values: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "prefill_endpoints": tuple(n.endpoint for n in self.prefills),
            "decode_endpoints": tuple(n.endpoint for n in self.decodes),
            "fleet_secret": SECRET,
            "info_interval_s": 0.1,
            "info_timeout_s": 10.0,
            "directory_timeout_ms": 10_000.0,
            # The way that limits leave open, so that a test knows which.
            "direct": False,
            "by_cost": False,
        }
        app = RouterApp(RouterSettings(**(values | changes)), directory=self.store.directory, store=store)
        self.stack.push_async_callback(app.stop)
        await app.start()
        return app

    async def client(self, app: RouterApp | None = None, token: str | None = None) -> "SimClient":
        app = app or await self.router()
        client = SimClient(app.endpoint, token)
        self.stack.push_async_callback(client.channel.close)
        return client

    async def whole(self) -> None:
        """Wait until every block of every living engine is free."""

        async def all_free() -> bool:
            engines = [n.engine for n in [*self.prefills, *self.decodes] if n.engine.alive]
            pools = [await engine.pool() for engine in engines]
            return all(pool.free_blocks == pool.total_blocks for pool in pools)

        await until_async(all_free, "all blocks")

    async def leases(self) -> int:
        """Return how many leases the decode workers hold."""
        return sum([len(await n.engine.holds()) for n in self.decodes if n.engine.alive])


class SimClient(Client):
    """A client that knows what cold means."""

    async def say(self, prompt: Sequence[int], conversation: str = "c", **fields: Any) -> Answer:
        return await collect(self.generate(ask(prompt, conversation, **fields)))

    async def cold(self, prompt: Sequence[int], **fields: Any) -> list[int]:
        """Return the answer of a turn that can reuse nothing and leaves nothing."""
        answer = await self.say(
            prompt,
            "",
            cache_salt=f"cold-{next(_serial)}",
            reuse_policy=router_service_pb2.REUSE_POLICY_FORBID,
            **fields,
        )
        assert answer.reuse.tokens.computed == len(prompt)
        return answer.token_ids

    async def same_as_cold(self, prompt: Sequence[int], conversation: str = "c", **fields: Any) -> Answer:
        """Play a turn and compare it with a cold one; then another of the same prefix, in the same caches."""
        answer = await self.say(prompt, conversation, **fields)
        assert answer.token_ids == await self.cold(prompt)
        other = [*prompt, 11, 12, 13]
        fields = {k: v for k, v in fields.items() if k == "cache_salt"}
        assert (await self.say(other, "", **fields)).token_ids == await self.cold(other)
        return answer

    async def end(self, conversation: str = "c", **fields: Any) -> bool:
        request = router_service_pb2.EndConversationRequest(conversation_id=conversation, **fields)
        response = await self.stub.EndConversation(request, timeout=10, metadata=self.metadata)
        return bool(response.released)


def _common(listen: str, name: str) -> dict[str, Any]:
    return {"engine": "simulated", "listen": listen, "worker_id": name, "stop_grace_s": 0.0}


async def until_async(condition: Callable[[], Awaitable[bool]], what: str, limit_s: float = 20.0) -> None:
    """Wait for a condition."""
    try:
        async with asyncio.timeout(limit_s):
            while not await condition():  # noqa: ASYNC110 - conditions in other tasks have no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None


@asynccontextmanager
async def sim_fleet(
    prefills: int = 1,
    decodes: int = 1,
    *,
    url: str = "memory://",
    engine: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
) -> AsyncIterator[SimFleet]:
    """Open workers; P has no prefix cache unless told so: what it does not compute, it has read."""
    store = open_store(url, options=StoreOptions(deadline_s=10.0, connect_s=10.0))
    if url.startswith("memory"):
        store = dataclasses.replace(store, directory=FlakyDirectory())
    settings = {
        "block_size": BLOCK,
        "max_model_len": MAX_LEN,
        "num_blocks": 1024,
        "kv_recompute_threshold": THRESHOLD,
        "enable_prefix_caching": False,
    }
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        fleet = SimFleet(store, stack, settings | (engine or {}), decode or {})
        for _ in range(prefills):
            await fleet.add_prefill()
        for _ in range(decodes):
            await fleet.add_decode()
        yield fleet
