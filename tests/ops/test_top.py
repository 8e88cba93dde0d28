"""`kvloop top`: what a screen says, and a whole one over a simulated fleet in a terminal of 80 by 24."""

import io
from datetime import datetime
from pathlib import Path

import pytest
from ops_fleet import play, watched_fleet
from rich.console import Console

from kvloop.cli.doctor.network import open_patient_store
from kvloop.cli.top.collecting import Places, collect, parse
from kvloop.cli.top.samples import Sample, Seen, grown, quantile, summed, total
from kvloop.cli.top.view import screen
from kvloop.v1alpha1 import worker_pb2

NOON = datetime(2026, 11, 30, 12)
EXPOSITION = """\
# TYPE kvloop_turns counter
kvloop_turns_total{verdict="readback",reason="proven"} 80
kvloop_turns_total{verdict="recompute",reason="not_found"} 20
# TYPE kvloop_turn_ttft_seconds histogram
kvloop_turn_ttft_seconds_bucket{verdict="readback",le="0.1"} 40
kvloop_turn_ttft_seconds_bucket{verdict="readback",le="0.2"} 60
kvloop_turn_ttft_seconds_bucket{verdict="readback",le="+Inf"} 80
# TYPE kvloop_prompt_tokens counter
kvloop_prompt_tokens_total{source="readback"} 900
kvloop_prompt_tokens_total{source="computed"} 100
# TYPE other gauge
other 1
"""


def lines(before: Sample | None, now: Sample, height: int = 24) -> list[str]:
    console = Console(width=80, height=height, file=io.StringIO())
    console.print(screen(before, now, NOON))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def worker(role: str, name: str, leases: int = 0, computed: int = 0, epoch: str = "e") -> Seen:
    pool = worker_pb2.PoolState(total_blocks=100, free_blocks=40, held_blocks=30, leases=leases)
    counters = worker_pb2.EngineCounters(computed_tokens=computed)
    return Seen(role, name, worker_pb2.WorkerInfo(epoch=epoch, pool=pool, counters=counters))


def test_quantiles_lie_between_bounds() -> None:
    series = summed(parse(EXPOSITION))
    of = "kvloop_turn_ttft_seconds"
    assert quantile(0.25, series, of, verdict="readback") == pytest.approx(0.05)
    assert quantile(0.5, series, of, verdict="readback") == pytest.approx(0.1)
    assert quantile(0.625, series, of, verdict="readback") == pytest.approx(0.15)
    assert quantile(0.99, series, of, verdict="readback") == pytest.approx(0.2)
    assert quantile(0.5, series, of, verdict="direct") is None
    assert quantile(0.5, {}, of) is None


def test_sums_over_processes_and_growth_through_restarts() -> None:
    twice = summed([*parse(EXPOSITION), *parse(EXPOSITION)])
    assert total(twice, "kvloop_turns_total") == 200
    assert total(twice, "kvloop_turns_total", verdict="readback") == 160
    assert not total(twice, "other")
    assert total(grown(summed(parse(EXPOSITION)), twice), "kvloop_turns_total") == 100
    assert total(grown(twice, summed(parse(EXPOSITION))), "kvloop_turns_total") == 100


def test_a_screen() -> None:
    now = Sample(
        at=10.0,
        workers=[
            worker("prefill", "p0", computed=500),
            worker("decode", "d0", 5),
            Seen("decode", "d1", None),
        ],
        store="ok",
        scraped=1,
        series=summed(parse(EXPOSITION)),
    )
    shown = lines(None, now)
    assert len(shown) <= 24
    assert max(len(line) for line in shown) <= 80
    text = "\n".join(shown)
    assert "prefill 1/1" in text
    assert "decode 1/2" in text
    assert "store ok" in text
    (readback,) = (line for line in shown if line.startswith("READBACK"))
    assert readback.split()[2:] == ["80", "80%", "100", "ms", "200", "ms", "200", "ms"]
    assert "read back 90%" in text
    (decode,) = (line for line in shown if line.startswith("d0"))
    assert decode.split()[1] == "ready"
    assert decode.split()[-4:] == ["60%", "30%", "5", "-"]
    (gone,) = (line for line in shown if line.startswith("d1"))
    assert "gone" in gone


def test_rates_need_two_looks_at_one_life() -> None:
    before = Sample(at=0.0, workers=[worker("prefill", "p0"), worker("decode", "d0", epoch="former")])
    now = Sample(
        at=10.0,
        workers=[worker("prefill", "p0", computed=500), worker("decode", "d0", computed=9, epoch="new")],
        series=summed(parse(EXPOSITION)),
    )
    shown = lines(before, now)
    assert any("10.0/s" in line for line in shown)
    assert [line.split()[-1] for line in shown if line.startswith(("p0", "d0"))] == ["50", "-"]


def test_trouble_shows() -> None:
    series = summed(
        parse(
            EXPOSITION
            + "# TYPE kvloop_store_degraded gauge\nkvloop_store_degraded 1\n"
            + '# TYPE kvloop_canary counter\nkvloop_canary_total{result="mismatch"} 2\n'
            + '# TYPE kvloop_leases_ended counter\nkvloop_leases_ended_total{reason="evicted"} 4\n'
        )
    )
    text = "\n".join(lines(None, Sample(0.0, [], "away (timeout)", 0, ["10.0.0.1:9600"], series)))
    for said in ("away (timeout)", "no metrics: 1", "CANARY 2", "evicted 4"):
        assert said in text
    assert "store ok, cold turns" in "\n".join(lines(None, Sample(0.0, [], "ok", 1, [], series)))


def test_many_workers_do_not_push_the_rest_away() -> None:
    now = Sample(0.0, [worker("decode", f"decode-{n}") for n in range(40)], "ok")
    shown = lines(None, now)
    assert len(shown) <= 24
    assert "and 31 more" in "\n".join(shown)


@pytest.mark.slow
async def test_over_a_fleet(tmp_path: Path) -> None:
    async with watched_fleet(tmp_path) as fleet:
        await play(fleet, "c")
        metrics = [fleet.parts[name].facts["metrics"] for name in fleet.names("router", "decode")]
        store = open_patient_store(fleet.store_url)
        try:
            now = await collect(Places(metrics=(*metrics, "127.0.0.1:1")), store)
        finally:
            await store.close()
    assert now.store == "ok"
    assert now.silent == ["127.0.0.1:1"]
    assert now.scraped == len(metrics)
    assert [w.role for w in now.workers] == ["prefill", "decode", "decode"]
    assert sum(w.info.pool.leases for w in now.workers if w.info) == 1
    text = "\n".join(lines(None, now))
    assert "READBACK" in text
    assert "superseded 2" in text
