"""Decode legs: the stream, the lease it leaves, and every way it can end."""

from worker_kit import Pair, prompt


async def test_a_turn_leaves_a_published_lease(pair: Pair) -> None:
    one = await pair.play(prompt(100))
    assert one.verdict == "RECOMPUTE"
    assert one.summary.lease.num_tokens == 100 + len(one.ids) - 1
    entry = await pair.entry()
    assert entry is not None
    assert entry.lease_id == one.summary.lease.lease_id
    assert entry.decode_endpoint == pair.decode_app.endpoint
    two = await pair.play([*prompt(100), *one.ids, *prompt(20, 9)])
    assert (two.verdict, two.reason) == ("READBACK", "PROVEN")
    assert two.ids == (await pair.cold([*prompt(100), *one.ids, *prompt(20, 9)])).ids
