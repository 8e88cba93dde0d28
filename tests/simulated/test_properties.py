"""Whatever happens, no block is lost and no token differs from a cold engine's."""

import asyncio
import random
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sim_rig import Rig, audit, free_blocks, greedy, prefill, say, terms

from kvloop.engine.port import DecodeJob, ReadGrant
from kvloop.runtime import digests, tokens
from kvloop.runtime.errors import Failure

T = TypeVar("T")
QUIET = 2_000
TIGHT: dict[str, Any] = {
    "num_blocks": 48,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
}
LONGEST = 100

fresh = st.integers(0, 3)
"""Few suffixes, so that unlike conversations often share a beginning."""


def suffix(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, 32_000) for _ in range(count)]


async def unless(reason: str, awaitable: Awaitable[T]) -> T | None:
    """Return what comes, or None when it fails for that reason."""
    try:
        return await awaitable
    except Failure as failure:
        if failure.reason_name != reason:
            raise
        return None


class Turns(RuleBasedStateMachine):
    """Two prefills and two decodes, little memory, and services that forget half of what they should do."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.rig = Rig()
        self.histories: list[list[int]] = [[]]
        self.leases: list[tuple[int, str, list[int]]] = []
        self.grants: list[tuple[int, str, ReadGrant]] = []
        self.count = 0

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(self.rig.run(coroutine, QUIET))

    @initialize()
    def start(self) -> None:
        async def engines() -> None:
            self.p = [await self.rig.engine("prefill", **TIGHT) for _ in range(2)]
            self.d = [await self.rig.engine("decode", **TIGHT) for _ in range(2)]
            self.oracle = await self.rig.engine(enable_prefix_caching=False)

        self.do(engines())

    def prompt(self, which: int, cut: int, seed: int, length: int) -> list[int]:
        """Go on with a history, rewritten from cut on if that is within it."""
        history = self.histories[which % len(self.histories)]
        return (history[:cut] + suffix(seed, length))[-LONGEST:]

    async def grant(self, prompt: list[int], pick: int) -> ReadGrant | None:
        """Prove and pin as the services do."""
        if not self.leases:
            return None
        at, lease_id, held = self.leases[pick % len(self.leases)]
        lengths = digests.proof_lengths(min(len(held), len(prompt) - 1), 4)
        claimed = digests.prefix_digests(b"k", tokens.pack(prompt), lengths)
        proven = digests.common_prefix(b"k", tokens.pack(held), lengths, claimed)
        if not proven:
            return None
        grant = await unless("LEASE_NOT_FOUND", self.d[at].begin_read(lease_id, proven, 20.0))
        if grant is not None:
            self.grants.append((at, lease_id, grant))
        return grant

    async def turn(self, prompt: list[int], at: int, pick: int | None, length: int, hold: bool) -> list[int]:
        self.count += 1
        lease_id = f"lease{self.count}"
        read = await self.grant(prompt, pick) if pick is not None else None
        outcome = await prefill(self.p[at % 2], prompt, read)
        return await self.decode(prompt, at, lease_id, outcome.handle_json, length, hold)

    async def decode(
        self, prompt: list[int], at: int, lease_id: str, handle: str | None, length: int, hold: bool
    ) -> list[int]:
        said = await say(
            self.d[at // 2 % 2],
            prompt,
            handle_json=handle,
            sampling=greedy(length),
            hold=terms(lease_id, 100.0, tenant=str(at)) if hold else None,
        )
        if said.done.hold is not None:
            held = (prompt + said.ids)[: said.done.hold.num_tokens]
            self.leases.append((at // 2 % 2, lease_id, held))
        sources = said.done.sources
        assert sources.local + sources.external + sources.computed == len(prompt)
        return said.ids

    def check(self, prompt: list[int], said: list[int]) -> None:
        cold = self.do(say(self.oracle, prompt, sampling=greedy(len(said))))
        assert said == cold.ids
        self.histories = [*self.histories[-5:], prompt + said]

    @rule(
        which=st.integers(0, 5),
        cut=st.integers(0, LONGEST),
        seed=fresh,
        length=st.integers(1, 20),
        at=st.integers(0, 3),
        pick=st.none() | st.integers(0, 50),
        answer=st.integers(1, 12),
        hold=st.booleans(),
    )
    def play(
        self, which: int, cut: int, seed: int, length: int, at: int, pick: int | None, answer: int, hold: bool
    ) -> None:
        prompt = self.prompt(which, cut, seed, length)
        self.check(prompt, self.do(self.turn(prompt, at, pick, answer, hold)))

    @rule(which=st.integers(0, 5), seed=fresh, length=st.integers(1, 20), at=st.integers(0, 3))
    def play_direct(self, which: int, seed: int, length: int, at: int) -> None:
        prompt = self.prompt(which, LONGEST, seed, length)
        self.count += 1
        said = self.do(self.decode(prompt, at, f"lease{self.count}", None, 6, True))
        self.check(prompt, said)

    @rule(which=st.integers(0, 5), seed=fresh, picks=st.lists(st.integers(0, 50), min_size=2, max_size=5))
    def play_many_at_once(self, which: int, seed: int, picks: list[int]) -> None:
        prompts = [self.prompt(which, LONGEST, seed + at, 8) for at in range(len(picks))]

        async def all_of_them() -> list[list[int]]:
            turns = (
                self.turn(prompt, at, pick, 6, pick % 2 == 0)
                for at, (prompt, pick) in enumerate(zip(prompts, picks, strict=True))
            )
            return await asyncio.gather(*turns)

        for prompt, said in zip(prompts, self.do(all_of_them()), strict=True):
            self.check(prompt, said)

    @rule(which=st.integers(0, 5), seed=fresh, at=st.integers(0, 3), on_cancel=st.booleans())
    def go_away(self, which: int, seed: int, at: int, on_cancel: bool) -> None:
        prompt = self.prompt(which, LONGEST, seed, 10)
        self.count += 1
        lease_id = f"lease{self.count}"
        engine = self.d[at % 2]

        async def cancelled() -> None:
            outcome = await prefill(self.p[at // 2], prompt)
            job = DecodeJob(
                lease_id,
                tokens.pack(prompt),
                greedy(20),
                handle_json=outcome.handle_json,
                hold=terms(lease_id, 100.0, on_cancel=on_cancel),
            )
            ids: list[int] = []
            stream = engine.decode(job)
            async for delta in stream:
                ids += delta.token_ids
                if len(ids) > 3:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            hold = await engine.settle(lease_id)
            assert on_cancel or hold is None
            if hold is not None:
                assert hold.num_tokens == len(prompt) + len(ids) - 1
                self.leases.append((at % 2, lease_id, (prompt + ids)[: hold.num_tokens]))

        self.do(cancelled())

    @rule(which=st.integers(0, 5), seed=fresh, at=st.integers(0, 1))
    def abandon_a_prefill(self, which: int, seed: int, at: int) -> None:
        self.do(prefill(self.p[at], self.prompt(which, LONGEST, seed, 9)))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 50), evict=st.booleans())
    def end_a_lease(self, pick: int, evict: bool) -> None:
        at, lease_id, _ = self.leases[pick % len(self.leases)]
        if evict:
            self.d[at].faults.evict(lease_id)
        else:
            self.do(self.d[at].release(lease_id))

    @precondition(lambda self: self.grants)
    @rule(pick=st.integers(0, 50))
    def end_a_read(self, pick: int) -> None:
        at, lease_id, grant = self.grants.pop(pick % len(self.grants))
        self.do(self.d[at].end_read(lease_id, grant.read_id))

    @rule(
        pick=st.integers(0, 50),
        at=st.integers(0, 3),
        changed=st.none() | st.integers(0, LONGEST),
        ended=st.booleans(),
        seconds=st.sampled_from([0.0, 10.0, 21.0, 31.0]),
        busy=st.booleans(),
    )
    def read_late_or_wrong(
        self, pick: int, at: int, changed: int | None, ended: bool, seconds: float, busy: bool
    ) -> None:
        p, d = self.p[at % 2], self.d[at // 2]
        self.count += 1
        self.do(self.decode(suffix(self.count, 40), at, f"lease{self.count}", None, 6, True))
        holder, lease_id, held = self.leases[pick % len(self.leases)]
        grant = self.do(unless("LEASE_NOT_FOUND", self.d[holder].begin_read(lease_id, len(held), 20.0)))
        if grant is None:
            return
        if ended:
            self.do(self.d[holder].release(lease_id))
        self.loop.run_until_complete(self.rig.clock.advance(seconds))
        if busy:
            for more in range(2):
                traffic = suffix(1_000 * self.count + more, LONGEST)
                self.do(say(self.d[holder], traffic, sampling=greedy(20)))
        ids = held.copy()
        if changed is not None:
            ids[changed % len(ids)] += 1
        prompt = (ids + suffix(9, 5))[: LONGEST + 5]
        outcome = self.do(unless("KV_READ_FAILED", prefill(p, prompt, grant)))
        if outcome is not None:
            self.check(prompt, self.do(say(d, prompt, handle_json=outcome.handle_json)).ids)
        self.check(prompt, self.do(say(p, prompt)).ids)

    @rule(seconds=st.floats(0.1, 60.0))
    def let_time_pass(self, seconds: float) -> None:
        self.loop.run_until_complete(self.rig.clock.advance(seconds))

    @invariant()
    def accounts_are_right(self) -> None:
        for engine in self.rig.engines:
            audit(engine)

    def teardown(self) -> None:
        try:
            self.loop.run_until_complete(self.all_comes_back())
        finally:
            self.loop.run_until_complete(self.rig.close())
            self.loop.close()

    async def all_comes_back(self) -> None:
        await self.rig.clock.advance(1_000.0)
        for engine in self.rig.engines:
            assert await engine.holds() == []
            assert await free_blocks(engine) == engine.settings.num_blocks


Turns.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTurns = Turns.TestCase


def test_the_machine_can_fail() -> None:
    """With the guards of both prefills off, reading late gives another answer than a cold engine."""

    async def wrong() -> bool:
        rig = Rig()
        p, d = await rig.engine("prefill", **TIGHT), await rig.engine("decode", **TIGHT)
        p.faults.guard.deadline = p.faults.guard.hash = False
        said = await say(d, suffix(0, 40), hold=terms("a"))
        grant = await d.begin_read("a", 40, 20.0)
        await d.end_read("a", grant.read_id)
        await d.release("a")
        for seed in range(4):
            await say(d, suffix(10 + seed, 100))
        prompt = suffix(0, 40) + said.ids
        outcome = await prefill(p, prompt, grant)
        answer = await say(d, prompt, handle_json=outcome.handle_json)
        cold = await rig.cold(prompt)
        await rig.close()
        return answer.ids != cold

    assert asyncio.run(wrong())
