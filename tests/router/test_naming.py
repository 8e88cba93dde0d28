"""Names in the settings that several workers are behind: each is a worker, and they come and go."""

from typing import Any

import grpc
import pytest
from router_fakes import Client, FakeFleet, expected_answer, fake_fleet, make_info, until

from kvloop.metastore.registry import Worker as Announced
from kvloop.router.app import RouterApp
from kvloop.router.discovery import Discovery
from kvloop.router.naming import Names
from kvloop.router.settings import RouterSettings
from kvloop.router.worker import AnyWorker
from kvloop.router.workers import WorkerPool
from kvloop.runtime import tokens
from kvloop.runtime.clock import SystemClock
from kvloop.runtime.security import Security
from kvloop.v1alpha1 import worker_pb2

LONG = list(range(100))
ANSWER = expected_answer(tokens.pack(LONG), 4)
NAME = "workers.example:9"
ONE, TWO, THREE = (f"127.0.0.{number}:9" for number in (1, 2, 3))


class Resolver:
    """Answers for the names of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[str, tuple[str, ...]] = {}
        self.asked: set[str] = set()
        monkeypatch.setattr("kvloop.router.naming.behind", self.behind)

    async def behind(self, endpoint: str) -> tuple[str, ...]:
        self.asked.add(endpoint)
        return self.found.get(endpoint, ())


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    return Resolver(monkeypatch)


def pool_of(*decodes: str, security: Security | None = None) -> WorkerPool:
    settings = RouterSettings(
        prefill_endpoints=("127.0.0.1:8",),
        decode_endpoints=decodes,
        info_timeout_s=0.2,
        info_interval_s=60.0,
    )
    return WorkerPool(settings, SystemClock(), security=security or Security())


def decodes(pool: WorkerPool) -> dict[str, AnyWorker]:
    return {worker.endpoint: worker for worker in pool.decode}


def meet(worker: AnyWorker) -> None:
    worker.learned(make_info(worker_pb2.WORKER_ROLE_DECODE, worker.endpoint))


async def test_every_address_is_a_worker_while_it_is_there(resolver: Resolver) -> None:
    pool = pool_of(NAME)
    names, itself = Names(pool), pool.decode[0]
    # One address is as good as the name.
    resolver.found[NAME] = (ONE,)
    await names.look()
    assert pool.decode == [itself]
    resolver.found[NAME] = (ONE, TWO)
    await names.look()
    former = decodes(pool)
    assert former.keys() == {ONE, TWO}
    # From now on they are told apart, though only one may be left.
    resolver.found[NAME] = (TWO,)
    await names.look()
    assert decodes(pool) == {TWO: former[TWO]}
    resolver.found[NAME] = (THREE, TWO)
    await names.look()
    assert decodes(pool).keys() == {TWO, THREE}
    assert decodes(pool)[TWO] is former[TWO]
    resolver.found.clear()
    await names.look()
    assert decodes(pool).keys() == {TWO, THREE}
    await pool.stop()


async def test_an_address_that_goes_gets_no_turns_and_is_read_from(resolver: Resolver) -> None:
    pool = pool_of(NAME)
    names = Names(pool)
    resolver.found[NAME] = (ONE, TWO)
    await names.look()
    gone = decodes(pool)[ONE]
    meet(gone)
    resolver.found[NAME] = (TWO,)
    await names.look()
    assert (gone.reachable, gone.ready) == (True, False)
    resolver.found[NAME] = (ONE, TWO)
    await names.look()
    assert decodes(pool)[ONE] is gone
    assert gone.ready
    resolver.found[NAME] = (TWO,)
    gone.in_flight = 1
    gone.not_answered(slow=False)
    await names.look()
    assert gone in pool.decode
    gone.in_flight = 0
    await names.look()
    assert gone not in pool.decode
    await pool.stop()


async def test_the_name_itself_ends_its_turns_first(resolver: Resolver) -> None:
    pool = pool_of(NAME)
    names, itself = Names(pool), pool.decode[0]
    meet(itself)
    itself.places = 1
    resolver.found[NAME] = (ONE, TWO)
    await names.look()
    assert (itself in pool.decode, itself.ready) == (True, False)
    # Its channel led to another life, of which nobody said that it drains.
    meet(itself)
    await names.look()
    assert not itself.ready
    itself.places = 0
    await names.look()
    assert decodes(pool).keys() == {ONE, TWO}
    await pool.stop()


async def test_addresses_are_not_looked_up(resolver: Resolver) -> None:
    pool = pool_of(ONE, "[::1]:9", NAME)
    await Names(pool).look()
    assert resolver.asked == {NAME}
    await pool.stop()


async def test_what_the_registry_leads_to_is_no_name_s(resolver: Resolver) -> None:
    pool = pool_of(NAME)
    names = Names(pool)
    discovery = Discovery(pool, names.workers)
    known = Announced(worker_id="d", role="decode", endpoint=ONE, epoch="e")
    await discovery.apply({"d": known})
    announced = decodes(pool)[ONE]
    resolver.found[NAME] = (ONE, TWO)
    await names.look()
    assert [worker.endpoint for worker in pool.decode] == [ONE, TWO]
    # Each is forgotten by whoever brought it.
    resolver.found[NAME] = (TWO, THREE)
    await names.look()
    assert not announced.leaving
    await discovery.apply({})
    assert decodes(pool).keys() == {TWO, THREE}
    await pool.stop()


async def test_the_certificate_is_the_name_s(resolver: Resolver) -> None:
    dialled: list[tuple[str, str]] = []

    class Noted(Security):
        def channel(self, endpoint: str, name: str = "") -> grpc.aio.Channel:
            dialled.append((endpoint, name))
            return super().channel(endpoint, name)

    pool = pool_of(NAME, security=Noted())
    resolver.found[NAME] = (ONE, TWO)
    await Names(pool).look()
    assert dialled[-2:] == [(ONE, "workers.example"), (TWO, "workers.example")]
    await pool.stop()


async def behind_a_name(
    fleet: FakeFleet, resolver: Resolver, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[RouterApp, Client, str]:
    monkeypatch.setattr("kvloop.router.naming.RESOLVE_EVERY_S", 0.01)
    name = f"localhost:{fleet.decodes[0].host.port}"
    resolver.found[name] = tuple(decode.host.endpoint for decode in fleet.decodes)
    app = await fleet.router(decode_endpoints=(name,), **settings)
    return app, await fleet.client(app), name


async def test_turns_go_to_everybody_behind_a_name(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_fleet(decodes=2) as fleet:
        app, client, name = await behind_a_name(fleet, resolver, monkeypatch)
        both = {decode.host.endpoint for decode in fleet.decodes}
        await until(lambda: decodes(app.pool).keys() == both, "both addresses")
        for number in range(40):
            assert (await client.say(LONG, f"c{number}")).token_ids == ANSWER
        assert all(decode.requests for decode in fleet.decodes)
        resolver.found[name] = (fleet.decodes[1].host.endpoint,)
        gone = decodes(app.pool)[fleet.decodes[0].host.endpoint]
        await until(lambda: gone.unlisted, "one address gone")
        before = len(fleet.decodes[0].requests)
        for number in range(10):
            assert (await client.say(LONG, f"d{number}")).token_ids == ANSWER
        assert len(fleet.decodes[0].requests) == before
        await fleet.decodes[0].host.kill()
        await until(lambda: len(app.pool.decode) == 1, "it is forgotten")
