"""C: whose KV it is."""

import pytest
from cases_kit import Case


@pytest.mark.parametrize("router", ["main", "bare"])
@pytest.mark.case("C1", "RECOMPUTE (not found), 0 bytes")
async def test_other_tenant(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    two = await case.turn([*history, *one.ids, *suffix], tenant="beta")
    case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)
    assert two.sources.computed == len(history) + len(one.ids) + len(suffix)


# A P with a prefix cache would have what the last turn is to read.
@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("C4", "RECOMPUTE (not found), 0 bytes")
async def test_other_salt(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history, cache_salt="one")
    two = await case.turn([*history, *one.ids, *suffix], cache_salt="two")
    case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)
    assert two.sources.computed == len(history) + len(one.ids) + len(suffix)
    again = await case.turn([*history, *one.ids, *suffix], cache_salt="one")
    case.expect(again, "READBACK", "PROVEN")
