"""`kvloop leases advise`: hold time and budget from measured pauses."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from ops_fleet import play, watched_fleet

from kvloop.cli.advice import FEW, advise, told
from kvloop.runtime.catalogue import GAP_S


def measured(pauses: dict[float, int], **endings: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the series of pauses (seconds -> how many) and of leases that ended (reason -> how many)."""
    name = "kvloop_turn_gap_seconds"
    series: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for bound in (*GAP_S, float("inf")):
        label = "+Inf" if bound == float("inf") else str(bound)
        count = sum(n for seconds, n in pauses.items() if seconds <= bound)
        series[f"{name}_bucket", frozenset({("le", label)})] = count
    series[f"{name}_count", frozenset()] = sum(pauses.values())
    for reason, count in endings.items():
        series["kvloop_leases_ended_total", frozenset({("reason", reason)})] = count
    return series


@pytest.mark.parametrize(
    ("pauses", "endings", "hold_s", "suggested", "why"),
    [
        # Too little is known.
        ({4: FEW - 1}, {"superseded": 100}, 480, None, "are needed"),
        # Short pauses, and nothing is held for nobody.
        ({4: 100}, {"superseded": 100}, 480, None, "fits"),
        # Short pauses, and much is.
        ({4: 100}, {"superseded": 60, "expired": 40}, 480, 30, "for nobody"),
        # Pauses up to the hold time: there are longer ones, which nobody sees.
        ({100: 90, 470: 10}, {"superseded": 90, "expired": 30}, 480, 960, "not seen"),
        # The same, but nothing expires: what is there is all there is.
        ({100: 90, 190: 10}, {"superseded": 100}, 200, 240, "little to spare"),
    ],
)
def test_hold_time(
    pauses: dict[float, int], endings: dict[str, int], hold_s: float, suggested: float | None, why: str
) -> None:
    advice = advise(measured(pauses, **endings), hold_s, 0.2)
    assert advice.suggested_hold_s == suggested, advice
    assert why in " ".join(advice.why)


@pytest.mark.parametrize(
    ("evicted", "held", "suggested"),
    [(0, 0.5, None), (2, 0.5, None), (3, 0.5, 0.55), (50, 0.3, 0.65), (80, 0.5, 0.8)],
)
def test_budget(evicted: int, held: float, suggested: float | None) -> None:
    advice = advise(measured({4: 100}, superseded=100 - evicted, evicted=evicted), 480, held)
    assert advice.suggested_hold_share == suggested
    assert any("add decode workers" in reason for reason in advice.why) == (evicted == 80)


@pytest.mark.parametrize(
    ("in_force", "evicted", "suggested"),
    # Leases hold a tenth of the pool at this moment.
    [(0.5, 2, None), (0.5, 3, 0.55), (0.5, 40, 0.8), (0.75, 3, 0.8), (0.8, 3, None), (0.9, 40, None)],
)
def test_a_budget_is_never_cut_for_want_of_blocks(
    in_force: float, evicted: int, suggested: float | None
) -> None:
    series = measured({4: 100}, superseded=100 - evicted, evicted=evicted)
    # Of two workers together.
    series |= {
        ("kvloop_pool_blocks", frozenset({("state", "total")})): 2000.0,
        ("kvloop_pool_hold_limit_blocks", frozenset()): 2000 * in_force,
    }
    advice = advise(series, 480, 0.1)
    assert advice.hold_share == in_force
    assert advice.suggested_hold_share == suggested
    assert any("add decode workers" in reason for reason in advice.why) == (
        evicted > 2 and in_force / (1 - evicted / 100) > 0.8
    )


def test_a_longer_hold_time_names_its_bound() -> None:
    advice = advise(measured({100: 90, 470: 10}, superseded=90, expired=30), 480, 0.2)
    assert "max_ttl_s must be 960 or more as well" in advice.why
    shorter = advise(measured({4: 100}, superseded=60, expired=40), 480, 0.2)
    assert "max_ttl_s" not in " ".join(shorter.why)


def test_what_is_said() -> None:
    text = "\n".join(told(advise(measured({4: 100}, superseded=60, expired=40), 480, 0.2)))
    assert "100 measured" in text
    assert "decoder_kv_blocks_ttl is 480 s: set 30" in text
    assert "leave hold_share" in text


@pytest.mark.slow
async def test_over_a_fleet(tmp_path: Path) -> None:
    async with watched_fleet(tmp_path) as fleet:
        await play(fleet, "c", turns=4)
        places = []
        for name in fleet.names("decode"):
            places += ["--decode", fleet.endpoint(name), "--metrics", str(fleet.parts[name].facts["metrics"])]
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "kvloop.cli.main", "leases", "advise", "--json", *places],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    advice = json.loads(done.stdout)
    # Each turn but the last left something that the next one read.
    assert advice["pauses"] == 3
    assert advice["hold_s"] == 480
    assert advice["hold_share"] == 0.5
    assert "are needed" in advice["why"][0]
