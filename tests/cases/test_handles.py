"""F8, F9, F11, F12: a decode worker's plugin gives out handles that lie. The reader finds out."""

import socket

import pytest
from cases_hooks import hooks
from cases_kit import Answer, Case, until

from kvloop.v1alpha1 import turn_pb2

ELSEWHERE = "127.0.0.9"

pytestmark = pytest.mark.parametrize("router", ["small"])


@pytest.mark.parametrize("lie", ["short", "twice", "range", "other", "elsewhere"])
@pytest.mark.case("F8 F9 F11 F12", "refused before the worker; engine alive")
async def test_handles_that_lie(case: Case, history: list[int], suffix: list[int], lie: str) -> None:
    case.id = {"short": "F8", "twice": "F8", "range": "F9", "other": "F11", "elsewhere": "F12"}[lie]
    one = await case.turn(history)
    prompt = [*history, *one.ids, *suffix]
    port = int((await case.stack.info("d2")).side_channel.rpartition(":")[2])
    # Where a handle points that names another host.
    with socket.create_server((ELSEWHERE, port)) as elsewhere:
        elsewhere.setblocking(False)
        async with hooks(case.stack, "d2") as holder:
            await holder.spoil(lie)  # type: ignore[arg-type]  # one of its literals
            two = await case.turn(prompt)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
    case.expect(two, "RECOMPUTE", "READ_FAILED", 0)
    assert two.summary.reuse.retried

    async def read_again() -> Answer | None:
        # After a failed read, the router leaves this pair alone for a moment.
        three = await case.turn(
            [*prompt, *two.ids, *suffix], check=False, retention=turn_pb2.Retention(hold=False)
        )
        return three if three.verdict == "READBACK" else None

    three = await until(read_again)
    assert three is not None, "the pair is never used again"
    await case.compare(three, [*prompt, *two.ids, *suffix])
    case.expect(three, "READBACK", "PROVEN", len(prompt) + len(two.ids) - 1)
    case.tell(two)
