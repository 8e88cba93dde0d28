"""What a measurement of many workers is made of, what it means, and a small run of it."""

import asyncio
import json
import os
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvloop.bench import scale_need
from kvloop.bench.records import keep_record
from kvloop.bench.router_traffic import Played, Talk, talk
from kvloop.bench.scale import AXES, Effort, Players, Spent, cpu_s, growth, per_second, per_turn, slopes
from kvloop.bench.scale_need import Assumed, Measured, million, needs
from kvloop.bench.scale_picture import draw, sheet_of
from kvloop.bench.scale_report import figure, markdown, table
from kvloop.cli.bench.scale import Axes, complaints_of, make_command, measure
from kvloop.cli.errors import CommandFailed


def point(workers: int, router_ms: float, **changes: Any) -> dict[str, Any]:
    """Return a point as a run has it."""
    made: dict[str, Any] = {
        "workers": workers,
        "conversations": 10 * workers,
        "routers": 1,
        "shape": {"prompt_tokens": 500, "output_tokens": 8},
        "chunks_per_turn": 8.0,
        "turn": {
            "router_cpu_ms": router_ms,
            "store_cpu_us": 100.0,
            "store_requests": 3.0,
            "store_received_bytes": 1500,
            "store_sent_bytes": 500,
        },
        "idle": {
            "router_cpu_ms": 10.0 * workers,
            "store_cpu_ms": 1.0,
            "store_requests": 100.0,
            "store_received_bytes": 40_000,
            "store_sent_bytes": 10_000,
        },
        "verdicts": {"direct": 0, "readback": 100, "recompute": 0},
        "steps_ms": {"place": 0.01},
        "lookup_us": {"p50": 80.0, "p99": 200.0},
        "bytes_per_conversation": 3000,
        "router_rss_mb": 100.0,
    }
    return made | changes


def test_another_process_is_charged_what_it_spends() -> None:
    before = cpu_s(os.getpid())
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    assert 0.02 <= cpu_s(os.getpid()) - before < 5


def test_what_goes_on_anyway_is_taken_off_a_turn() -> None:
    quiet = Spent(at=2.0, router_s=0.2, store_s=0.02, requests=20, received=200, sent=2000)
    busy = Spent(at=10.0, router_s=3.0, store_s=0.2, requests=400, received=51_000, sent=11_000)
    cost = per_turn(busy, quiet, 100)
    assert cost["router_cpu_ms"] == pytest.approx(20.0)
    assert cost["router_cpu_ms_gross"] == pytest.approx(30.0)
    assert cost["store_cpu_us"] == pytest.approx(1000.0)
    assert (cost["store_requests"], cost["store_received_bytes"], cost["store_sent_bytes"]) == (3.0, 500, 10)
    # More in the quiet than in the busy time: a turn's share was not measured, it is not nothing.
    assert per_turn(quiet, busy, 100)["store_requests"] is None
    each = per_second(quiet, 2)
    assert (each["router_cpu_ms"], each["store_cpu_ms"], each["store_requests"]) == (50.0, 10.0, 10.0)
    assert busy.since(quiet).received == 50_800


@pytest.mark.parametrize(
    ("costs", "flat_to", "ratio"),
    [([1.0, 1.25, 1.2], 100, 1.2), ([1.0, 1.26, 1.0], 1, 1.0), ([1.0, 1.1, 4.0], 10, 4.0), ([2.0], 1, 1.0)],
)
def test_flat_is_what_does_not_grow_by_more_than_a_quarter(
    costs: list[float], flat_to: int, ratio: float
) -> None:
    points = [point(10**power, cost) for power, cost in enumerate(costs)]
    found = growth(points, "workers")["turn.router_cpu_ms"]
    assert (found["flat_to"], found["ratio"], found["values"]) == (flat_to, ratio, costs)


def test_what_was_not_measured_has_no_growth() -> None:
    bare = point(1, 1.0, steps_ms={}, lookup_us=None)
    assert not {"steps_ms.place", "lookup_us.p50"} & growth([bare, bare], "workers").keys()


def test_a_turn_is_a_sum_of_itself_its_chunks_and_its_prompt() -> None:
    def cost(prompt: int, chunks: int) -> dict[str, Any]:
        shape = {"prompt_tokens": prompt, "output_tokens": chunks}
        spent = 0.5 + 0.02 * chunks + 0.03 * prompt / 1000
        return point(2, spent, shape=shape, chunks_per_turn=float(chunks))

    found = slopes(cost(500, 8), cost(24_000, 9), cost(500, 64))
    assert found["turn_ms"] == pytest.approx(0.5, abs=1e-3)
    assert found["chunk_ms"] == pytest.approx(0.02, abs=1e-4)
    assert found["kilotoken_ms"] == pytest.approx(0.03, abs=1e-4)


def test_parts_that_come_out_below_zero_were_not_measured() -> None:
    base, longer = point(2, 1.0), point(2, 1.5, shape={"prompt_tokens": 24_000, "output_tokens": 8})
    wordier = point(2, 0.9, chunks_per_turn=64.0)
    assert slopes(base, longer, wordier) == {"turn_ms": None, "chunk_ms": None, "kilotoken_ms": None}
    cheaper = point(2, 0.5, shape={"prompt_tokens": 24_000, "output_tokens": 8})
    found = slopes(base, cheaper, point(2, 1.56, chunks_per_turn=64.0))
    assert found == {"turn_ms": None, "chunk_ms": 0.01, "kilotoken_ms": None}
    assert slopes(base, point(2, 1.0, turn={"router_cpu_ms": None}), wordier)["turn_ms"] is None


MEASURED = Measured(
    turn_ms=1.0,
    turn_workers=1000,
    chunk_ms=0.01,
    kilotoken_ms=0.1,
    router_idle_ms=100.0,
    store_turn_us=100.0,
    store_turn_requests=3.0,
    store_turn_bytes=2000.0,
    store_idle_ms=scale_need.Background(20.0, 10.0),
    store_idle_requests=scale_need.Background(500.0, 2.0),
    store_idle_bytes=scale_need.Background(300_000.0, 700_000.0),
    bytes_per_conversation=3000.0,
    workers=1000,
)


def test_the_needs_follow_from_the_formulas() -> None:
    assumed = Assumed(prompt_tokens=10_000, chunks=100, chunk_bytes=50, used=0.6)
    found = needs(MEASURED, assumed, 100.0)
    assert found["turns_per_s"] == 10_000
    assert found["router_cpu_ms_per_turn"] == pytest.approx(1 + 1 + 1)
    # 30 cores' work, half of each router's left for it.
    assert found["routers"] == 60
    assert found["router_gbit_per_s"] == pytest.approx(8 * 10_000 * 130_000 / 1e9)
    assert found["store_gb"] == 3.0
    assert found["store_requests_per_s_of_turns"] == 30_000
    assert found["store_requests_per_s"] == 30_000 + 500 + 60 * 2
    assert found["store_cores_of_turns"] == 1.0
    assert found["store_cores"] == pytest.approx(1.0 + 0.02 + 60 * 0.01)
    assert found["store_gbit_per_s_of_turns"] == pytest.approx(8 * 10_000 * 2000 / 1e9)
    assert found["store_gbit_per_s"] == pytest.approx(0.16 + 8 * (300_000 + 60 * 700_000) / 1e9, abs=0.01)
    assert needs(MEASURED, assumed, 200.0)["routers"] == 30
    assert needs(MEASURED, Assumed(used=0.05), 100.0)["routers"] == float("inf")


def test_what_follows_from_nothing_measured_is_not_measured() -> None:
    found = needs(replace(MEASURED, store_idle_requests=None), Assumed(), 100.0)
    assert (found["store_requests_per_s"], found["store_requests_per_s_of_turns"]) == (None, 30_000)
    found = needs(replace(MEASURED, chunk_ms=None), Assumed(), 100.0)
    assert {name for name, value in found.items() if value is None} == {
        "router_cpu_ms_per_turn",
        "routers",
        "store_requests_per_s",
        "store_cores",
        "store_gbit_per_s",
    }
    found = needs(replace(MEASURED, store_turn_us=None, store_turn_bytes=None), Assumed(), 100.0)
    assert (found["store_cores"], found["store_gbit_per_s_of_turns"]) == (None, None)


def idling(workers: int, routers: int, requests: float, sent: int) -> dict[str, Any]:
    """Return a point with so much going on at the store without turns."""
    made = point(workers, 1.0, routers=routers)
    made["idle"] |= {"store_requests": requests, "store_received_bytes": 1_000, "store_sent_bytes": sent}
    made["idle"]["store_cpu_ms"] = 20.0 + 6.0 * routers
    return made


def test_the_background_is_a_line_over_routers_with_most_workers() -> None:
    made = record()
    made["points"]["workers"][-1] = idling(1000, 1, 500.0, 742_000)
    made["points"]["routers"] = [idling(100, 1, 30.0, 76_000), idling(100, 4, 40.0, 306_000)]
    made["all"] = idling(1000, 4, 430.0, 2_860_000)
    found = million(made)["measured"]
    assert found["store_idle_ms"] == {"workers": pytest.approx(20.0), "router": pytest.approx(6.0)}
    assert found["store_idle_bytes"] == {"workers": pytest.approx(37_000), "router": pytest.approx(706_000)}
    # Fewer with more routers is noise: it says nothing of a router.
    assert found["store_idle_requests"] is None
    made["all"] = made["points"]["workers"][-1]
    assert million(made)["measured"]["store_idle_bytes"] is None


def record() -> dict[str, Any]:
    """Return a run's record."""
    points = {
        "workers": [point(2, 1.0), point(1000, 1.5)],
        "conversations": [point(2, 1.0), point(2, 1.0, conversations=100_000)],
        "routers": [point(100, 1.0)],
    }
    made: dict[str, Any] = {
        "when": "now",
        "machine": "2 cores",
        "load_average": [1.0, 2.0],
        "points": points,
        "shapes": {"longer": point(2, 1.7, shape={"prompt_tokens": 24_000, "output_tokens": 8})},
        "all": point(1000, 1.5, routers=4),
        "growth": {axis: growth(found, axis) for axis, found in points.items()},
        "router_cpu": {"turn_ms": 0.5, "chunk_ms": 0.02, "kilotoken_ms": 0.03},
    }
    made["million_conversations"] = million(made)
    return made


def test_a_million_is_reckoned_from_what_turns_cost_with_most_workers_and_routers() -> None:
    made = record()
    made["all"] = point(1000, 3.0, routers=4)
    made["all"]["turn"] |= {"store_cpu_us": 150.0, "store_requests": 2.4, "store_sent_bytes": 0}
    made["points"]["workers"][0]["turn"] |= {"store_cpu_us": 350.0, "store_requests": 4.0}
    found = million(made)["measured"]
    # 1.5 ms less 8 chunks and half a thousand tokens; 0.5 ms with two workers.
    assert found["turn_ms"] == pytest.approx(1.5 - 8 * 0.02 - 0.5 * 0.03)
    assert (found["routers"], found["routers_factor"]) == (4, 2.0)
    assert found["turn_workers"] == 1000
    # With a thousand workers they are differences of large figures.
    assert (found["store_turn_us"], found["store_turn_requests"], found["store_turn_bytes"]) == (
        350.0,
        4.0,
        2000,
    )
    assumed = Assumed(prompt_tokens=500, chunks=8)
    assert million(made, assumed)["needs"][0]["router_cpu_ms_per_turn"] == pytest.approx(3.0)
    # The dearest that was measured counts, and the record says which that was.
    made["all"] = point(1000, 0.5, routers=4)
    found = million(made)["measured"]
    assert (found["routers"], found["routers_factor"]) == (1, 1.0)
    made["points"]["workers"][-1] = point(1000, 0.5)
    found = million(made)["measured"]
    assert (found["turn_workers"], found["turn_ms"]) == (2, 0.5)
    made["points"]["workers"][-1]["turn"]["router_cpu_ms"] = None
    assert million(made)["needs"][0]["routers"] is None


class FakeBench:
    """Points that can be told apart; one of them may be lost."""

    effort = Effort(turns=40, talks=8, idle_s=0.2)

    def __init__(self, lost: int = 99) -> None:
        self.workers = self.conversations = self.played = 0
        self.lost = lost
        self.efforts: list[Effort] = []

    async def workers_up_to(self, count: int) -> None:
        self.workers = count

    async def conversations_up_to(self, count: int) -> None:
        self.conversations = count

    async def point(self, routers: int, shape: Any = None, effort: Any = None) -> dict[str, Any]:
        self.played += 1
        if self.played == self.lost:
            raise CommandFailed("a point was lost")
        self.efforts.append(effort or self.effort)
        made = point(self.workers, 1.0, routers=routers, conversations=self.conversations)
        if shape is not None:
            made |= {"shape": shape.as_dict(), "chunks_per_turn": 8.0 * shape.output_tokens}
        return made


def measured(bench: FakeBench, out: Path, **axes: tuple[int, ...]) -> dict[str, Any]:
    """Measure on a fake bench and return what is on disk."""
    shape: dict[str, Any] = {"workers": (2, 10), "conversations": (20, 50), "routers": (1, 2)}
    written: dict[str, Any] = {"points": {axis: [] for axis in AXES}, "shapes": {}, "complete": False}
    opening: Any = nullcontext(bench)
    with suppress(CommandFailed):
        asyncio.run(measure(Axes(**shape | axes), opening, written, lambda: keep_record(out, written)))
    keep_record(out.with_suffix(".end"), written)
    return dict(json.loads(out.read_text(encoding="utf-8")))


@pytest.mark.parametrize("routers", [(1, 2), (2, 4), (4,), (1,)])
def test_just_the_routers_that_are_named_are_measured(routers: tuple[int, ...], tmp_path: Path) -> None:
    measured(FakeBench(), tmp_path / "scale.json", routers=routers)
    made = json.loads((tmp_path / "scale.end").read_text(encoding="utf-8"))
    assert [found["routers"] for found in made["points"]["routers"]] == list(routers)
    assert made["growth"]["routers"]["turn.router_cpu_ms"]["at"] == list(routers)
    assert (made["all"]["routers"], made["all"]["workers"]) == (routers[-1], 10)


@pytest.mark.parametrize(("lost", "kept"), [(2, [1, 0, 0]), (4, [2, 1, 0]), (5, [2, 1, 0]), (6, [2, 1, 2])])
def test_what_was_measured_before_a_point_was_lost_is_kept(
    lost: int, kept: list[int], tmp_path: Path
) -> None:
    made = measured(FakeBench(lost), tmp_path / "scale.json")
    points = [len(made["points"][axis]) for axis in ("conversations", "workers", "routers")]
    assert (points, made["complete"]) == (kept, False)
    assert not list(tmp_path.glob("*.part"))


def test_shapes_differ_in_their_shape_alone(tmp_path: Path) -> None:
    bench = FakeBench()
    bench.effort = Effort()
    measured(bench, tmp_path / "scale.json")
    assert {(effort.talks, effort.at_once) for effort in bench.efforts} == {(128, 64)}


def test_turns_that_went_another_way_are_complained_of() -> None:
    made = record()
    assert complaints_of(made) == []
    made["shapes"]["longer"]["verdicts"] = {"direct": 0, "readback": 99, "recompute": 1}
    assert complaints_of(made) == []
    made["shapes"]["longer"]["verdicts"] = {"direct": 0, "readback": 289, "recompute": 11}
    made["shapes"]["again"] = made["shapes"]["longer"]
    assert complaints_of(made) == [
        "2 workers, 20 conversations, 1 routers, 24,000 tokens, 8 to answer:"
        " 11 of 300 later turns not readback: recompute x11"
    ]


def test_a_record_makes_a_table_and_a_picture(tmp_path: Path) -> None:
    text = table(record())
    assert "router CPU per turn, ms" in text
    [row] = [line for line in text.splitlines() if line.strip().startswith("a router without turns")][:1]
    assert row.split()[-3:] == ["20", "10,000", "2"]
    page = markdown(record())
    assert "| a router without turns, CPU per second, ms | 20 | 10,000 | 2 |" in page
    assert "| routers | 100 |" not in page
    assert "With 4 routers and 1,000 workers a turn takes 1.5 ms." in page
    draw(tmp_path / "scale.png", record())
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
    for panel in sheet_of(record()).axes:
        low, high = panel.get_ylim()
        assert {0.5, 1, 2} <= {place for place in panel.get_yticks() if low <= place <= high}


def test_what_was_not_measured_is_said_in_its_own_cell() -> None:
    made = record()
    made["points"]["workers"].insert(1, point(10, 1.0, turn={"router_cpu_ms": None}))
    made["growth"]["workers"] = growth(made["points"]["workers"], "workers")
    made["router_cpu"] = dict.fromkeys(made["router_cpu"])
    made["million_conversations"] = million(made)
    page, text = markdown(made), table(made)
    assert "| router CPU per turn, ms | 1 | not measured | 1.5 | 2 |" in page
    assert "| routers, a core each | not measured | not measured | not measured |" in page
    assert "not measured ms per chunk" in page
    [row] = [line for line in text.splitlines() if line.strip().startswith("router CPU per turn")][:1]
    assert row.split()[-5:] == ["1", "not", "measured", "1.5", "2"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (12.34, "12.3"), (1234.5, "1,234"), (2.0, "2")]
)
def test_figures_have_few_digits(value: float, text: str) -> None:
    assert figure(value) == text


async def test_turns_go_through_the_routers_in_turn_one_at_a_time_of_each_conversation() -> None:
    class Fake:
        def __init__(self) -> None:
            self.played = 0

        async def play(self, mine: Talk) -> Played:
            assert mine.conversation_id not in busy
            busy.add(mine.conversation_id)
            self.played += 1
            await asyncio.sleep(0)
            busy.discard(mine.conversation_id)
            return Played(1.0, 8)

        async def close(self) -> None:
            return None

    busy: set[str] = set()
    ways = [Fake(), Fake()]
    players = Players(ways, at_once=4)
    assert await players.play([talk(4, 1, 50) for _ in range(6)], 100) == 100
    assert players.chunks == 800
    assert min(way.played for way in ways) > 30
    assert await players.play([talk(4, 1, 50)], 100, until=0.0) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "10,2"), "--workers takes ascending whole numbers"),
        (("--routers", "one"), "--routers takes ascending whole numbers"),
        (("--workers", "1,10"), "--workers begins with 2 at least"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(make_command(), list(arguments))
    assert result.exit_code != 0
    assert said in result.output


@pytest.mark.slow
def test_a_small_run_leaves_a_record_and_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    arguments = ["--workers", "2,4", "--conversations", "20,50", "--routers", "1,2", "--turns", "40"]
    arguments += ["--idle-s", "0.2", "--preset", "instant", "--out", str(out)]
    result = CliRunner().invoke(make_command(), arguments)
    assert result.exit_code == 0, result.output
    made = json.loads(out.read_text(encoding="utf-8"))
    assert made["complete"]
    along = {axis: [found[axis] for found in points] for axis, points in made["points"].items()}
    assert along == {"workers": [2, 4], "conversations": [20, 50], "routers": [1, 2]}
    for found in (*made["points"]["workers"], *made["points"]["conversations"], made["all"]):
        assert found["turn"]["router_cpu_ms_gross"] > 0
        assert found["turn"]["store_requests"] >= 2
        assert found["registry"]["workers"] == found["workers"]
        assert found["verdicts"]["readback"] > 0
        assert 1000 < found["bytes_per_conversation"] < 10_000
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "conversations, gap in s" in result.output
