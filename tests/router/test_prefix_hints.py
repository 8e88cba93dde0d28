"""Leases that a prompt's beginning leads to, through real routers and workers on simulated engines.

P has no prefix cache here: what is not read back is computed. Every answer is compared with a cold one.
"""

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from router_fakes import SECRET, Answer
from router_sim import SimClient, SimFleet, ids, sim_fleet, until_async

from kvloop.metastore.hints import SHORTEST, hint_lengths
from kvloop.router.auth import hash_token
from kvloop.router.identity import Identities, Owner
from kvloop.runtime import tokens
from kvloop.runtime.digests import hint_group, prefix_digests
from kvloop.v1alpha1 import router_service_pb2, turn_pb2

HELD = {"retention": turn_pb2.Retention(hold=True)}
NOT_HELD = {"retention": turn_pb2.Retention(hold=False)}


IDENTITIES = Identities(SECRET.encode())
OWNER = Owner("default", "simulated", "", "", "")


def _scope(conversation: str) -> bytes:
    return IDENTITIES.scope(OWNER, conversation)


def name() -> str:
    return secrets.token_hex(4)


async def play(client: SimClient, prompt: Sequence[int], conversation: str, **fields: Any) -> Answer:
    """Play a turn whose answer must be the cold one."""
    answer = await client.say(prompt, conversation, **fields)
    assert answer.token_ids == await client.cold(prompt)
    return answer


def held(answer: Answer) -> int:
    assert answer.summary is not None
    return int(answer.summary.lease.num_tokens)


async def test_who_comes_back_under_another_name_reuses(store_url: str) -> None:
    async with sim_fleet(decodes=2, url=store_url) as fleet:
        routers = [await fleet.client(await fleet.router()) for _ in range(2)]
        one, two = name(), name()
        first = await play(routers[0], ids(200), one)
        history = [*ids(200), *first.token_ids, *ids(20, seed=1)]
        second = await play(routers[1], history, two)
        assert second.way == ("READBACK", "PROVEN")
        assert second.reuse.tokens.readback == held(first)
        # The former name's lease is still its own.
        assert (await play(routers[0], history, one)).reuse.tokens.readback > 0
        assert await routers[0].end(one)
        assert await routers[0].end(two)
        await fleet.whole()


async def test_forks_without_a_parent_s_name_reuse_what_they_share(store_url: str) -> None:
    async with sim_fleet(prefills=2, decodes=2, url=store_url) as fleet:
        client = await fleet.client()
        trunk = name()
        first = await play(client, ids(300), trunk)
        history = [*ids(300), *first.token_ids]
        names = [name() for _ in range(5)]
        prompts = [[*history, *ids(10, seed=number)] for number in range(1, 6)]
        answers = await asyncio.gather(*map(client.say, prompts, names))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == await client.cold(prompt)
            assert answer.way == ("READBACK", "PROVEN")
            assert answer.reuse.tokens.readback >= held(first)
        for conversation in (trunk, *names):
            assert await client.end(conversation)
        await fleet.whole()


async def test_who_never_names_a_conversation_reuses_and_leaves_one_lease(store_url: str) -> None:
    async with sim_fleet(decodes=2, url=store_url) as fleet:
        routers = [await fleet.client(await fleet.router(hold_unnamed=True)) for _ in range(2)]
        history, before = ids(150, seed=secrets.randbits(32)), 0
        for turn in range(5):
            answer = await play(routers[turn % 2], history, "")
            assert answer.way == (("READBACK", "PROVEN") if turn else ("RECOMPUTE", "NO_CONVERSATION"))
            assert answer.reuse.tokens.readback == before
            before = held(answer)
            history += [*answer.token_ids, *ids(20, seed=turn)]

        async def one_lease() -> bool:
            return await fleet.leases() == 1

        await until_async(one_lease, "a single lease")


async def test_unnamed_forks_all_keep_what_they_left(store_url: str) -> None:
    async with sim_fleet(decodes=1, url=store_url) as fleet:
        client = await fleet.client()
        start = ids(300, seed=secrets.randbits(32))
        first = await play(client, start, "", **HELD)
        history = [*start, *first.token_ids]
        prompts = [[*history, *ids(200, seed=number)] for number in range(1, 4)]
        answers = await asyncio.gather(*(client.say(prompt, "", **HELD) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == await client.cold(prompt)
            assert answer.reuse.tokens.readback >= 256
            again = await play(client, [*prompt, *answer.token_ids, 5], "", **NOT_HELD)
            assert again.reuse.tokens.readback == held(answer)


async def test_unnamed_turns_are_held_only_where_that_is_asked_for() -> None:
    async with sim_fleet() as fleet:
        plain, holding = await fleet.client(), await fleet.client(await fleet.router(hold_unnamed=True))
        assert not held(await plain.say(ids(100), ""))
        assert not held(await holding.say(ids(100), "", **NOT_HELD))
        assert await fleet.leases() == 0
        assert held(await plain.say(ids(100), "", **HELD)) == 115
        assert held(await holding.say(ids(100, seed=1), "")) == 115
        no_hints = await fleet.client(await fleet.router(prefix_hints=False, hold_unnamed=True))
        assert not held(await no_hints.say(ids(100, seed=2), ""))


@pytest.mark.parametrize("tokens_held", [SHORTEST - 1, SHORTEST])
async def test_only_what_reaches_the_shortest_hint_is_found(tokens_held: int) -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(ids(40), "a", max_tokens=tokens_held - 39)
        assert held(first) == tokens_held
        prompt = [*ids(40), *first.token_ids, *ids(20, seed=1)]
        answer = await play(client, prompt, "b")
        found = tokens_held >= SHORTEST
        assert answer.way == (("READBACK", "PROVEN") if found else ("RECOMPUTE", "NOT_FOUND"))


async def test_one_directory_lookup_per_turn() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        for number, (conversation, fields) in enumerate(
            [("a", {}), ("b", {}), ("c", {"parent_conversation_id": "a"}), ("", {}), ("a", {})], start=1
        ):
            await client.say(ids(100 + number), conversation, **fields)
            assert fleet.flaky.lookups == number
        # Too short to be hinted at, and no name.
        await client.say(ids(SHORTEST - 1), "")
        assert fleet.flaky.lookups == 5


async def test_explained_as_found_by_prefix() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(ids(100), "a")
        for conversation, by_prefix in (("a", False), ("b", True)):
            answer = await client.say([*ids(100), *first.token_ids, 7], conversation)
            assert answer.summary is not None
            request = router_service_pb2.ExplainTurnRequest(request_id=answer.summary.request_id)
            explained = await client.stub.ExplainTurn(request, timeout=5)
            assert explained.found_by_prefix == by_prefix
            assert answer.summary.router


async def test_hints_stay_within_tenant_and_salt(tmp_path: Path, store_url: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{hash_token('a')} acme\n{hash_token('b')} beta\n")
    async with sim_fleet(url=store_url, engine={"enable_prefix_caching": True}) as fleet:
        app = await fleet.router(tokens_file=file)
        acme, beta = await fleet.client(app, "a"), await fleet.client(app, "b")
        start = ids(200, seed=secrets.randbits(32))
        first = await acme.say(start, name(), max_tokens=80)
        prompt = [*start, *first.token_ids]
        strangers: list[tuple[SimClient, dict[str, Any]]] = [(beta, {}), (acme, {"cache_salt": "another"})]
        for client, fields in strangers:
            for conversation in (name(), ""):
                answer = await client.say(prompt, conversation, **NOT_HELD, **fields)
                assert answer.way[0] == "RECOMPUTE"
                assert answer.reuse.reason in {
                    turn_pb2.REUSE_REASON_NOT_FOUND,
                    turn_pb2.REUSE_REASON_NO_CONVERSATION,
                }
        assert (await acme.say(prompt, name(), **NOT_HELD)).way[0] == "READBACK"


async def test_forbidden_or_switched_off_means_not_found() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(ids(100), "a")
        prompt = [*ids(100), *first.token_ids, 7]
        forbid = router_service_pb2.REUSE_POLICY_FORBID
        assert (await client.say(prompt, "", reuse_policy=forbid)).way == ("RECOMPUTE", "DISABLED")
        off = await fleet.client(await fleet.router(prefix_hints=False))
        assert (await off.say(prompt, "")).way == ("RECOMPUTE", "NO_CONVERSATION")
        assert (await off.say(prompt, "b")).way == ("RECOMPUTE", "NOT_FOUND")
    async with sim_fleet(decode={"prefix_hints": False}) as fleet:
        client = await fleet.client()
        first = await client.say(ids(100), "a")
        prompt = [*ids(100), *first.token_ids, 7]
        assert (await client.say(prompt, "b")).way == ("RECOMPUTE", "NOT_FOUND")


async def forge(fleet: SimFleet, prompt: Sequence[int], conversation: str) -> None:
    """Have all hints of a prompt lead to a conversation that begins otherwise."""
    key = IDENTITIES.digest_key(OWNER)
    digests = prefix_digests(key, tokens.pack(prompt), hint_lengths(len(prompt)))
    scope = _scope(conversation)
    assert (await fleet.store.directory.lookup(scope)).entry is not None
    await fleet.store.directory.publish_hints(hint_group(key), digests, scope, 60)
    found = await fleet.store.directory.find_by_prefix(hint_group(key), digests)
    assert found.scope == scope


async def test_a_hint_at_other_tokens_is_a_cold_turn(store_url: str) -> None:
    async with sim_fleet(url=store_url) as fleet:
        client = await fleet.client()
        other = name()
        await client.say(ids(200, seed=1), other)
        prompt = ids(200, seed=secrets.randbits(32))
        await forge(fleet, prompt, other)
        for conversation in ("", name()):
            answer = await play(client, prompt, conversation, **NOT_HELD)
            assert answer.way == ("RECOMPUTE", "DIVERGED")
            assert answer.reuse.tokens.computed == len(prompt)


async def test_a_hint_at_a_lease_whose_holder_restarted_is_a_cold_turn() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        first = await client.say(ids(100), "a")
        stale = await fleet.store.directory.lookup(_scope("a"))
        assert stale.entry is not None
        old = fleet.decodes.pop()
        old.engine.faults.kill()
        await old.app.stop()
        await fleet.add_decode(old.endpoint)
        # As after a SIGKILL: what it published stands.
        await fleet.store.directory.publish(_scope("a"), stale.entry, 60)
        prompt = [*ids(100), *first.token_ids, 7]

        async def served() -> bool:
            try:
                answer = await client.say(prompt, "", **NOT_HELD)
                cold = await client.cold(prompt)
            except grpc.aio.AioRpcError:
                return False
            assert answer.token_ids == cold
            return answer.way == ("RECOMPUTE", "EPOCH")

        await until_async(served, "the new worker")


async def test_alike_beginnings_do_not_draw_all_conversations_to_one_worker() -> None:
    async with sim_fleet(decodes=2) as fleet:
        client = await fleet.client()
        common = ids(100)
        workers, reused = set(), 0
        for number in range(8):
            answer = await play(client, [*common, *ids(300, seed=number + 1)], f"c{number}")
            assert answer.summary is not None
            workers.add(answer.summary.decode_worker)
            reused += answer.reuse.tokens.readback >= 96
        assert reused
        assert len(workers) == 2


async def test_turns_go_on_while_hints_can_t_be_looked_up() -> None:
    async with sim_fleet() as fleet:
        client = await fleet.client()
        fleet.flaky.down = True
        for conversation in ("", "a"):
            answer = await play(client, ids(100), conversation, **NOT_HELD)
            assert answer.way == ("RECOMPUTE", "DIRECTORY_UNAVAILABLE")
