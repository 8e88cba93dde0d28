"""F1, F2 in a fleet with other workers: who dies in the middle of a read costs a cold turn, no failure."""

import asyncio

import pytest
from cases_hooks import hooks, pinned
from cases_kit import Case

from kvloop.v1alpha1 import turn_pb2

pytestmark = pytest.mark.parametrize("router", ["pair"])

PART_OF_ENGINE = {"decode-0": "d1", "decode-1": "d2"}


@pytest.mark.parametrize("victim", ["decode", "prefill"])
@pytest.mark.case("F1 F2", "cold elsewhere")
async def test_killed_mid_read(case: Case, history: list[int], suffix: list[int], victim: str) -> None:
    case.id = {"decode": "F1", "prefill": "F2"}[victim]
    stack = case.stack
    # Its P's prefix cache has the history, so what is read is the answer.
    one = await case.turn(history, max_tokens=3 * stack.block_size)
    lease = one.summary.lease
    prompt = [*history, *one.ids, *suffix]
    async with hooks(stack, "p1") as first, hooks(stack, "p2") as second:
        readers = {"prefill-0": first, "prefill-1": second}
        for reader in readers.values():
            await reader.stall("end")
        turn = asyncio.create_task(case.turn(prompt, check=False))
        await pinned(stack, PART_OF_ENGINE[lease.decode_worker], lease.lease_id)
        doomed = lease.decode_worker if victim == "decode" else await reading(case)
        await stack.fleet.kill(doomed)
        for part, reader in readers.items():
            if part != doomed:
                await reader.stall(None)
        two = await turn
    if two.summary.reuse.verdict == turn_pb2.VERDICT_READBACK:
        # The read was over by then, and P told the first token before D was missed.
        case.expect(two, "READBACK", "PROVEN")
        assert two.summary.migrated
    else:
        case.expect(two, "RECOMPUTE", "READ_FAILED", 0)
        assert two.summary.migrated or two.summary.reuse.retried
    assert two.summary.decode_worker != doomed
    assert two.summary.prefill_worker != doomed
    await stack.fleet.start(doomed)
    await stack.ready()
    await case.compare(two, prompt)


async def reading(case: Case) -> str:
    """Return the part of the P that has blocks in use."""
    free = await case.stack.free_blocks()
    (busy,) = [name for name in ("p1", "p2") if free[name] < case.free_before[name]]
    return case.stack.parts[busy]
