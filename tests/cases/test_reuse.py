"""A: what of a history may be read back, and what must be computed anew."""

import pytest
from cases_kit import Answer, Case


async def first(case: Case, history: list[int], max_tokens: int = 40) -> Answer:
    answer = await case.turn(history, max_tokens=max_tokens, check=False)
    case.expect(answer, "RECOMPUTE", "NOT_FOUND", 0)
    return answer


def held(history: list[int], answer: Answer) -> list[int]:
    """Return the tokens that the lease covers: all but the last one generated."""
    return [*history, *answer.ids][:-1]


@pytest.mark.case("A1", "READBACK, bytes = proven blocks")
async def test_history_and_suffix(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await first(case, history)
    assert one.summary.lease.num_tokens == len(held(history, one))
    two = await case.turn([*history, *one.ids, *suffix])
    case.expect(two, "READBACK", "PROVEN", len(held(history, one)) - two.sources.p_local)
    three = await case.turn([*history, *one.ids, *suffix, *two.ids, *suffix])
    case.expect(three, "READBACK", "PROVEN")


@pytest.mark.case("A2", "RECOMPUTE (diverged), 0 bytes")
async def test_first_token_changed(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await first(case, history)
    changed = [history[0] + 1, *history[1:], *one.ids, *suffix]
    case.expect(await case.turn(changed), "RECOMPUTE", "DIVERGED", 0)


@pytest.mark.case("A3", "READBACK of the blocks before it only")
async def test_middle_token_changed(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await first(case, history)
    size = case.stack.block_size
    at = 4 * size + 5
    changed = [*history[:at], history[at] + 1, *history[at + 1 :], *one.ids, *suffix]
    two = await case.turn(changed)
    if case.router == "bare":
        case.expect(two, "READBACK", "PROVEN", 4 * size)
    else:  # P holds those blocks itself
        case.expect(two, "RECOMPUTE", "LOCAL", 0)


@pytest.mark.case("A4", "READBACK up to the last proven block")
async def test_last_token_changed(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await first(case, history)
    tokens = held(history, one)
    tokens[-1] += 1
    two = await case.turn([*tokens, *suffix])
    proven = (len(tokens) - 1) // case.stack.block_size * case.stack.block_size
    case.expect(two, "READBACK", "PROVEN", proven - two.sources.p_local)


@pytest.mark.parametrize("past_border", [0, -1, 1])
@pytest.mark.case("A5 A6 A7", "READBACK of the leading blocks")
async def test_regenerate(case: Case, history: list[int], past_border: int) -> None:
    case.id = {0: "A5", -1: "A6", 1: "A7"}[past_border]
    await first(case, history)
    cut = 4 * case.stack.block_size + past_border
    two = await case.turn(history[:cut])
    if case.router == "bare":
        assert 0 < cut - two.sources.readback <= case.stack.block_size
        case.expect(two, "READBACK", "PROVEN", two.sources.readback)
    else:
        case.expect(two, "RECOMPUTE", ("LOCAL", "BELOW_THRESHOLD"), 0)


@pytest.mark.case("A8", "reuse, at least one token computed")
async def test_same_prompt_again(case: Case, history: list[int]) -> None:
    one = await first(case, history)
    two = await case.turn(history)
    assert two.ids == one.ids[: len(two.ids)]
    assert two.sources.computed >= 1
    if case.router == "bare":
        case.expect(two, "READBACK", "PROVEN", two.sources.readback)
        assert two.sources.readback >= len(history) - case.stack.block_size
    else:
        case.expect(two, "RECOMPUTE", ("LOCAL", "BELOW_THRESHOLD"), 0)
        assert two.sources.p_local >= len(history) - case.stack.block_size


@pytest.mark.case("A9", "READBACK up to the drift")
async def test_answer_tokenizes_otherwise(case: Case, history: list[int], suffix: list[int]) -> None:
    size = case.stack.block_size
    one = await case.turn(history, max_tokens=3 * size)
    drift = one.ids.copy()
    drift[size : size + 2] = [drift[size + 1], drift[size], drift[size]]  # one token more, as after a split
    two = await case.turn([*history, *drift, *suffix])
    kept = (len(history) + size) // size * size
    case.expect(two, "READBACK", "PROVEN", kept - two.sources.p_local)


@pytest.mark.case("A10", "local + READBACK of the rest only")
async def test_part_local_part_remote(case: Case, history: list[int], suffix: list[int]) -> None:
    size = case.stack.block_size
    one = await case.turn(history, max_tokens=3 * size)
    two = await case.turn([*history, *one.ids, *suffix])
    local = len(history) // size * size if case.router == "main" else 0
    assert two.sources.p_local == local
    case.expect(two, "READBACK", "PROVEN", len(held(history, one)) - local)


@pytest.mark.parametrize("router", ["main"])
@pytest.mark.case("A11", "0 bytes; lease stays LIVE")
async def test_everything_local(case: Case, history: list[int]) -> None:
    one = await first(case, history)
    fork = case.name("fork")
    two = await case.turn(history, fork, parent_conversation_id=case.name())
    case.expect(two, "RECOMPUTE", ("LOCAL", "BELOW_THRESHOLD"), 0)
    leases = {lease.lease_id: lease for lease in await case.stack.leases()}
    assert leases[one.summary.lease.lease_id].pins == 0


@pytest.mark.case("A12", "RECOMPUTE (below threshold), 0 bytes; lease stays LIVE")
async def test_below_threshold(case: Case, history: list[int], suffix: list[int]) -> None:
    short = history[: case.stack.threshold - 12]
    one = await first(case, short, max_tokens=4)
    fork = case.name("fork")
    two = await case.turn([*short, *one.ids, *suffix], fork, parent_conversation_id=case.name())
    case.expect(two, "RECOMPUTE", "BELOW_THRESHOLD", 0)
    assert one.summary.lease.lease_id in {lease.lease_id for lease in await case.stack.leases()}
