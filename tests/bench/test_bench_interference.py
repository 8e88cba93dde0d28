"""The budget of DIRECT turns, by what it spares the streams beside them. Time is virtual."""

from kvloop.bench.interference import UNBOUNDED, Found, Scene, measure
from kvloop.decode.settings import DecodeSettings
from kvloop.engine.simulated.cost import PRESETS
from kvloop.router.settings import RouterSettings

SCENE = Scene(streams=4, stream_tokens=60, returning=6, bursts=1, history=1024)
COST = PRESETS["qwen3-32b-h200"]


def longest_ms(scene: Scene, turns: int) -> float:
    """Return the longest time between two tokens when so many DIRECT turns share a step with the streams."""
    end = scene.history + scene.suffix
    return 1e3 * (COST.prefill([(scene.history, end)] * turns) + COST.decode(scene.streams + turns))


async def found(budget: int | None) -> Found:
    return await measure(SCENE, budget)


async def test_a_budget_bounds_what_streams_wait_for() -> None:
    quiet, bounded, unbounded = await found(None), await found(1024), await found(UNBOUNDED)
    assert (quiet.direct, quiet.refused) == (0, 0)
    assert quiet.longest_ms == quiet.p50_ms
    assert (bounded.direct, bounded.refused) == (2, 4)
    assert (unbounded.direct, unbounded.refused) == (6, 0)
    assert quiet.p99_ms < bounded.p99_ms < unbounded.p99_ms
    assert bounded.longest_ms < 1.05 * longest_ms(SCENE, 2)
    assert unbounded.longest_ms > longest_ms(SCENE, 4)


async def test_a_turn_that_alone_is_over_the_budget_is_taken_when_nothing_else_is() -> None:
    narrow = await found(SCENE.suffix - 1)
    assert (narrow.direct, narrow.refused) == (1, 5)


def test_routers_offer_no_more_than_a_decode_worker_takes() -> None:
    offered = RouterSettings.model_fields["direct_budget_tokens"].default
    assert offered <= DecodeSettings.model_fields["direct_budget_tokens"].default
    assert RouterSettings.model_fields["direct_max_suffix"].default <= offered
