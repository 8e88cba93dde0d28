"""C2, C3: other weights, and other adapters on the same weights, never share a conversation's KV.

P with a prefix cache and the small D come back with another revision and four adapters. The rest of the fleet
stays as it is, so both revisions are served at once.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from cases_kit import Case, Stack, same
from engine_adapters import write_adapter

PARTS = ("prefill-0", "decode-1")
ADAPTERS = {"chef": 0, "poet": 1, "smith": 2, "mason": 2}
"""Name -> seed of its weights."""


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def adapters(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = {name: write_adapter(folder / name, stack.model, seed) for name, seed in ADAPTERS.items()}
    await stack.restart(PARTS, revision="two", adapters=paths)
    await stack.ready("small-direct", "bare")
    yield folder
    await stack.restart(PARTS, revision=None, adapters={})
    await stack.ready()


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("C2", "RECOMPUTE (not found), 0 bytes")
async def test_other_revision(case: Case, history: list[int], suffix: list[int]) -> None:
    one = await case.turn(history)
    prompt = [*history, *one.ids, *suffix]
    two = await case.turn(prompt, router="small-direct")
    case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)
    assert two.sources.computed == len(prompt)
    # The first revision's lease is untouched.
    three = await case.turn(prompt)
    case.expect(three, "READBACK", "PROVEN", len(history) + len(one.ids) - 1)
    case.tell(two)
    await case.stack.end(case.name(), router="small-direct")


@pytest.mark.parametrize("router", ["small-direct"])
@pytest.mark.case("C3", "RECOMPUTE (not found), 0 bytes")
async def test_other_adapter(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    one = await case.turn(history, adapter="chef")
    plain = await stack.cold(history, router="small-direct")
    assert not same(plain, one), "the adapter changes nothing"
    prompt = [*history, *one.ids, *suffix]
    for other in ("poet", ""):
        two = await case.turn(prompt, adapter=other)
        case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)
        assert two.sources.computed == len(prompt)
    three = await case.turn(prompt, adapter="chef")
    case.expect(three, "DIRECT", "PROVEN", 0)
    held = one.summary.lease.num_tokens
    assert three.sources.d_local in (held, held // stack.block_size * stack.block_size)
    case.tell(two)
    for adapter in ("chef", "poet"):
        await stack.end(case.name(), adapter=adapter, router="small-direct")


@pytest.mark.parametrize("router", ["small-direct"])
@pytest.mark.case("C3", "RECOMPUTE (not found), 0 bytes")
async def test_files_replaced_before_their_first_use(
    case: Case, history: list[int], suffix: list[int], adapters: Path
) -> None:
    stack = case.stack
    write_adapter(adapters / "smith", stack.model, seed=3)
    one = await case.turn(history, adapter="smith")
    if stack.model is not None:
        # What smith's files were when the workers started, mason's still are.
        assert same(one, await stack.cold(history, adapter="mason", router="small-direct"))
    prompt = [*history, *one.ids, *suffix]
    two = await case.turn(prompt, adapter="mason")
    case.expect(two, "RECOMPUTE", "NOT_FOUND", 0)
    three = await case.turn(prompt, adapter="smith")
    case.expect(three, "DIRECT", "PROVEN", 0)
    case.tell(two)
    for adapter in ("smith", "mason"):
        await stack.end(case.name(), adapter=adapter, router="small-direct")
