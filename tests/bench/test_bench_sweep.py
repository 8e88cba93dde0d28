"""The sweep's order and records, its summary and pictures, on a target in memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import FakeTarget
from click.testing import CliRunner

from kvloop.bench import compare as comparing
from kvloop.bench import pictures, report, statistics
from kvloop.bench.article import GLM_5_FP8, QWEN3_32B
from kvloop.bench.records import REQUESTS, BadRecords, Record, RecordFile, digest, read
from kvloop.bench.sweep import (
    DIRECT,
    OFF_COLD,
    OFF_HOT,
    OFF_MOVED,
    READBACK,
    READBACK_EVICTED,
    Sweep,
    SweepPlan,
    stray,
)
from kvloop.bench.workload.lengths import LengthSweep
from kvloop.bench.workload.words import WordEncoder
from kvloop.cli.bench.compare import make_command as make_compare
from kvloop.cli.bench.report import make_command as make_report
from kvloop.cli.bench.sweep import plan_of

PLAN = SweepPlan(
    legs=(OFF_COLD, OFF_HOT, READBACK, DIRECT),
    lengths=(64, 128),
    samples=4,
    shape=LengthSweep(suffix_tokens=16, answer_tokens=4),
    output_tokens=6,
    warm_up=1,
)


async def play(plan: SweepPlan = PLAN, **targets: FakeTarget) -> tuple[dict[str, FakeTarget], list[Record]]:
    routes = {name: FakeTarget(name) for name in ("cold", "hot", "direct")} | targets
    records: list[Record] = []
    await Sweep(plan, routes, WordEncoder(32_000), records.append).play()
    return routes, records


async def test_every_leg_plays_identical_prompts_of_exactly_the_nominal_length() -> None:
    _, records = await play()
    assert len(records) == PLAN.requests
    measured = [record for record in records if record.measured]
    assert len(measured) == 4 * 2 * 4
    assert all(record.turn == 2 for record in measured)
    assert all(record.input_num_tokens == record.nominal_tokens for record in measured)
    for length in PLAN.lengths:
        for repetition in range(PLAN.samples):
            group = [r for r in measured if (r.nominal_tokens, r.repetition) == (length, repetition)]
            assert sorted(record.leg for record in group) == ["direct", "off-cold", "off-hot", "readback"]
            assert len({record.prompt_digest for record in group}) == 1
    assert len({record.prompt_digest for record in measured}) == 8


async def test_legs_take_turns_at_coming_first() -> None:
    _, records = await play(replace(PLAN, samples=12))
    seconds = [record for record in records if record.measured]
    assert len({record.leg for record in seconds[::4]}) == 4


async def test_turns_of_a_leg_follow_each_other_and_share_nothing_with_others() -> None:
    targets, records = await play()
    for first, second in zip(records[::2], records[1::2], strict=True):
        assert (first.turn, second.turn) == (1, 2)
        assert first.conversation_id == second.conversation_id
    asked = [request for target in targets.values() for request in target.asked]
    assert len({request.cache_salt for request in asked}) == len(asked) // 2
    for first, second in zip(targets["cold"].asked[::2], targets["cold"].asked[1::2], strict=True):
        assert list(second.prompt[: len(first.prompt)]) == list(first.prompt)
        assert first.max_tokens == 4
        assert second.max_tokens == 6


async def test_only_legs_that_reuse_hold_and_let_go() -> None:
    targets, _ = await play()
    assert not targets["hot"].ended
    assert not any(request.reuse for request in targets["hot"].asked)
    reusing = [request for request in targets["cold"].asked if request.reuse]
    assert len(reusing) == len(targets["cold"].asked) // 2
    assert {name for name, _ in targets["cold"].ended} == {request.conversation_id for request in reusing}


async def test_a_turn_can_meet_another_p_or_overrun_caches() -> None:
    plan = replace(PLAN, legs=(OFF_MOVED, READBACK_EVICTED), filler_tokens=300, samples=1, warm_up=0)
    targets, records = await play(plan, other=FakeTarget("other"))
    assert len(records) == plan.requests == 2 * (2 + 2 + 3)
    assert [record.measured for record in records if record.leg == "off-moved"] == [False, True] * 2
    assert len(targets["other"].asked) == 2
    evicted = [record for record in records if record.leg == "readback-evicted"][:5]
    assert [record.measured for record in evicted] == [False] * 4 + [True]
    assert sum(record.input_num_tokens for record in evicted[1:4]) == 300
    salts = {request.cache_salt for request in targets["hot"].asked}
    assert len(salts) == 2 + 2 + 2


async def test_warm_up_is_at_the_shortest_length_unless_all_are_wanted() -> None:
    _, records = await play()
    assert {r.nominal_tokens for r in records if r.turn == 2 and not r.measured} == {64}
    plan = replace(PLAN, warm_up_all=True)
    _, records = await play(plan)
    assert len(records) == plan.requests
    assert {r.nominal_tokens for r in records if r.turn == 2 and not r.measured} == {64, 128}


async def test_a_failed_turn_is_a_record_and_the_sweep_goes_on() -> None:
    _, records = await play(hot=FakeTarget(fails_at=3))
    (failed,) = [record for record in records if record.error]
    assert (failed.leg, failed.turn) == ("off-hot", 1)
    assert len(records) == PLAN.requests - 1
    summary = report.summarise(records, {}, complete=True)
    assert summary["failures"] == {"count": 1, "first": "no answer"}


async def test_records_survive_their_file(tmp_path: Path) -> None:
    _, records = await play(replace(PLAN, samples=1))
    with RecordFile(tmp_path / "deep" / REQUESTS) as file:
        for record in records:
            file.add(record)
            # Not only once the file is closed: a run may end at any time.
            assert read(tmp_path / "deep")[-1] == record
    assert read(tmp_path / "deep" / REQUESTS) == records
    line = json.loads((tmp_path / "deep" / REQUESTS).read_text().splitlines()[-1])
    wanted = "leg nominal_tokens conversation_id turn ttft_ms tpot_ms latency_ms input_num_tokens"
    wanted += " output_num_tokens verdict tokens prefill_ms transfer_ms bytes descriptors"
    assert line.keys() >= set(wanted.split())


def test_a_sweep_has_samples_enough_for_an_interval_by_default() -> None:
    assert plan_of({}).samples == statistics.ENOUGH


def test_records_tell_no_tokens() -> None:
    assert digest([1, 2]) != digest([2, 1])
    assert digest([1, 2]) == digest((1, 2))


def test_a_bad_file_of_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRecords, match="No such file"):
        read(tmp_path)
    (tmp_path / REQUESTS).write_text('{"leg": "a", "nominal_tokens": 1}\n')
    with pytest.raises(BadRecords, match="line 1"):
        read(tmp_path)


async def test_a_summary_says_what_the_records_say() -> None:
    _, records = await play()
    summary = report.summarise(records, {"engine": "simulated"}, complete=True)
    assert list(summary["legs"]) == ["off-cold", "off-hot", "readback", "direct"]
    cell = summary["legs"]["readback"]["128"]
    assert cell["ttft_ms"] == {"value": 100.0, "range_low": 100.0, "range_high": 100.0, "n": 4}
    assert cell["verdicts"] == {"READBACK": 4}
    assert cell["tokens"]["readback"] == 64
    assert (cell["transfer_ms"]["value"], cell["bytes"], cell["descriptors"]) == (20.0, 4096, 3)
    assert summary["speedup"]["readback"]["128"]["value"] == pytest.approx(10)
    assert "off-cold" not in summary["speedup"]
    assert summary["identical_prompts"] == {"samples": 8, "identical": 8}
    assert summary["identical_answers"] == {"samples": 8, "identical": 8}
    text = report.markdown(summary)
    assert "| 128 | 1000.0 (range 1000.0 to 1000.0) |" in text
    assert "median and range (least to most)" in text
    assert "**x10.0**" in text
    assert "no" not in summary["failures"]["first"]
    assert "not from a measurement" in text
    assert QWEN3_32B.label in text
    assert GLM_5_FP8.label in text


def change(records: list[Record], leg: str, length: int, how_many: int, **changes: Any) -> None:
    """Change a leg's first measured turns at a length."""
    places = [
        place
        for place, record in enumerate(records)
        if record.measured and (record.leg, record.nominal_tokens) == (leg, length)
    ]
    for place in places[:how_many]:
        records[place] = replace(records[place], **changes)


async def test_turns_that_went_another_way_are_told_and_do_not_count() -> None:
    _, records = await play()
    change(records, "readback", 128, 1, verdict="DIRECT", ttft_ms=1.0)
    change(records, "readback", 64, 1, retried=True, ttft_ms=1e6)
    change(records, "direct", 64, 9, verdict="RECOMPUTE", reason="EXPIRED")
    summary = report.summarise(records, {}, complete=True)
    assert summary["legs"]["readback"]["128"]["verdicts"] == {"READBACK": 3}
    for length in ("64", "128"):
        assert summary["legs"]["readback"][length]["ttft_ms"]["value"] == 100.0
        assert summary["legs"]["readback"][length]["ttft_ms"]["n"] == 3
    assert list(summary["legs"]["direct"]) == list(summary["speedup"]["direct"]) == ["128"]
    assert summary["left_out"] == {
        "direct": {"64": {"RECOMPUTE, EXPIRED": 4}},
        "readback": {"64": {"READBACK, PROVEN, retried": 1}, "128": {"DIRECT, PROVEN": 1}},
    }
    assert summary["measured"] == 4 * 2 * 4 - 6
    assert report.lacking(summary) == [
        "direct at 64 tokens: none of its 4 turns counts (RECOMPUTE, EXPIRED x4)"
    ]
    assert "- left out of readback at 128 tokens, not what the leg is: DIRECT, PROVEN x1" in report.markdown(
        summary
    )
    assert comparing.samples_of(records, "ttft_ms")["readback", 128] == [100.0] * 3


async def test_a_leg_that_never_was_what_it_is_named_for_ends_a_report_with_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, records = await play(replace(PLAN, legs=(OFF_COLD, READBACK), samples=1))
    for length in PLAN.lengths:
        change(records, "readback", length, 1, verdict="DIRECT")
    with RecordFile(tmp_path / REQUESTS) as file:
        for record in records:
            file.add(record)
    # Of an older version: it has counted whatever came.
    (tmp_path / "summary.json").write_text(json.dumps({"settings": {}, "complete": True}))
    result = CliRunner().invoke(make_report(), [str(tmp_path)])
    assert result.exit_code == 1
    assert (
        "readback at 128 tokens: none of its 1 turns counts (DIRECT, PROVEN x1)"
        in capsys.readouterr().err + (result.output)
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["legs"]["readback"], summary["speedup"]) == ({}, {})
    assert "| 128 | 1000.0 |  |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "ttft.png").is_file()


async def write_sweep(folder: Path, legs: Any, settings: dict[str, Any]) -> str:
    _, records = await play(replace(PLAN, legs=legs, lengths=(64,), samples=1))
    with RecordFile(folder / REQUESTS) as file:
        for record in records:
            file.add(record)
    (folder / "summary.json").write_text(json.dumps({"settings": settings, "complete": True}))
    return str(folder)


SETTINGS: dict[str, Any] = {
    "date": "a day",
    "engine": "vllm",
    "machine": "a machine",
    "versions": {"vllm": "0.26.0", "numpy": "2.5"},
    "seed": 0,
}
OTHERS: dict[str, Any] = {
    "date": "another day",
    "machine": "another machine",
    "versions": {"vllm": "0.29.0", "numpy": "2.6"},
    "block_size": 16,
    "seed": 0,
}


async def test_sweeps_that_are_not_alike_are_put_together_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await write_sweep(tmp_path / "a", (OFF_COLD,), SETTINGS)
    second = await write_sweep(tmp_path / "b", (OFF_HOT,), OTHERS)
    out = tmp_path / "out"
    result = CliRunner().invoke(make_report(), [first, second, "--out", str(out)])
    said = capsys.readouterr().err + result.output
    assert result.exit_code == 1
    lines = [
        f"{second}: machine: a machine and another machine",
        f"{second}: versions.vllm: 0.26.0 and 0.29.0",
    ]
    assert [line for line in said.splitlines() if line.startswith("not alike")] == [
        f"not alike: {line}" for line in lines
    ]
    assert "--force" in said
    assert not out.exists()
    result = CliRunner().invoke(make_report(), [first, second, "--out", str(out), "--force"])
    assert result.exit_code == 0
    settings = json.loads((out / "summary.json").read_text())["settings"]
    assert (settings["machine"], settings["block_size"], settings["unlike"]) == ("a machine", 16, lines)
    # What one of them does not tell is no difference.
    third = await write_sweep(tmp_path / "c", (READBACK,), {"engine": "vllm"})
    assert CliRunner().invoke(make_report(), [first, third, "--out", str(out)]).exit_code == 0


async def test_a_report_may_be_titled(tmp_path: Path) -> None:
    folder = await write_sweep(tmp_path / "a", (OFF_COLD,), SETTINGS)
    result = CliRunner().invoke(make_report(), [folder, "--title", "a shape, TP1, dummy weights"])
    assert result.exit_code == 0
    assert "<!-- a shape, TP1, dummy weights" in (tmp_path / "a" / "ttft.svg").read_text()
    assert "- title: a shape, TP1, dummy weights" in (tmp_path / "a" / "summary.md").read_text()
    # It stays with the sweep.
    CliRunner().invoke(make_report(), [folder])
    assert "<!-- a shape, TP1, dummy weights" in (tmp_path / "a" / "ttft.svg").read_text()


async def test_a_comparison_says_first_in_what_the_runs_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await write_sweep(tmp_path / "a", (OFF_COLD,), SETTINGS)
    second = await write_sweep(tmp_path / "b", (OFF_COLD,), OTHERS)
    result = CliRunner().invoke(make_compare(), [first, f"{second}/{REQUESTS}"])
    said = capsys.readouterr().err + result.output
    assert result.exit_code == 0
    assert [line for line in said.splitlines() if line.startswith("A and B differ")] == [
        "A and B differ in machine: a machine and another machine",
        "A and B differ in versions.vllm: 0.26.0 and 0.29.0",
        "A and B differ in versions.numpy: 2.5 and 2.6",
    ]
    CliRunner().invoke(make_compare(), [first, first])
    assert "A and B differ" not in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{"workload": "agentic"}, {}])
def test_a_load_is_not_reported_as_a_sweep(settings: dict[str, Any], tmp_path: Path) -> None:
    with RecordFile(tmp_path / REQUESTS) as file:
        file.add(Record("load", 0, "c", 1, measured=True, ttft_ms=5.0))
    summary = json.dumps({"settings": settings, "complete": True, "measured": 1})
    (tmp_path / "summary.json").write_text(summary)
    result = CliRunner().invoke(make_report(), [str(tmp_path)])
    assert result.exit_code != 0
    assert "holds no sweep but a load" in result.output
    assert [file.name for file in sorted(tmp_path.iterdir())] == [REQUESTS, "summary.json"]
    assert (tmp_path / "summary.json").read_text() == summary


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"leg": "readback", "verdict": "READBACK"}, ""),
        ({"leg": "readback", "verdict": "DIRECT", "reason": "PROVEN"}, "DIRECT, PROVEN"),
        ({"leg": "off-moved", "verdict": "READBACK"}, "READBACK"),
        ({"leg": "direct", "verdict": "DIRECT", "retried": True}, "DIRECT, retried"),
        # Records of earlier versions, and of loads whatever their name.
        ({"leg": "readback"}, ""),
        ({"leg": "readback", "verdict": "DIRECT", "nominal_tokens": 0}, ""),
        ({"leg": "sideways", "verdict": "DIRECT", "retried": True}, ""),
        ({"leg": "off-cold", "verdict": "RECOMPUTE", "tokens": {"p_local": 0}}, ""),
        *(
            ({"leg": leg, "verdict": way, "tokens": {"p_local": 1}}, f"{way}, P's cache had 1 tokens")
            for leg, way in (
                ("off-cold", "RECOMPUTE"),
                ("readback", "READBACK"),
                ("off-moved", "RECOMPUTE"),
                ("readback-moved", "READBACK"),
            )
        ),
        ({"leg": "off-hot", "verdict": "RECOMPUTE", "tokens": {"p_local": 1}}, ""),
        (
            {"leg": "off-hot", "verdict": "RECOMPUTE", "tokens": {"p_local": 0}},
            "RECOMPUTE, P's cache had 0 tokens",
        ),
        # 5% of 1,000 tokens at the most.
        *(
            (evicted | {"tokens": {"p_local": had}, "input_num_tokens": 1000}, why)
            for evicted in (
                {"leg": "off-evicted", "verdict": "RECOMPUTE"},
                {"leg": "readback-evicted", "verdict": "READBACK"},
            )
            for had, why in (
                (0, ""),
                (49, ""),
                (50, ""),
                (51, f"{evicted['verdict']}, P's cache had 51 tokens"),
            )
        ),
        ({"leg": "direct", "verdict": "DIRECT", "tokens": {"p_local": 5}}, ""),
    ],
)
def test_which_turns_are_a_legs(record: dict[str, Any], why: str) -> None:
    blank = {"nominal_tokens": 64, "conversation_id": "c", "turn": 2, "measured": True}
    assert stray(Record(**(blank | record))) == why


def test_a_cache_that_was_not_overrun_is_left_out_of_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(__file__).parents[2] / "docs" / "results" / "2026-11-30-h200-c" / "hot"
    result = CliRunner().invoke(make_report(), [str(folder), "--out", str(tmp_path)])
    said = capsys.readouterr().err + result.output
    assert result.exit_code == 1
    assert (
        "off-evicted at 24,576 tokens: none of its 3 turns counts (RECOMPUTE, DISABLED, P's cache had 24,320"
        " tokens x3)" in said
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {leg: list(cells) for leg, cells in summary["legs"].items()} == {
        "off-hot": ["8192", "24576"],
        "off-evicted": [],
        "readback-evicted": [],
    }


async def test_answers_that_differ_are_counted() -> None:
    _, records = await play(replace(PLAN, samples=1))
    place = next(i for i, r in enumerate(records) if r.measured and r.leg == "readback")
    records[place] = replace(records[place], answer_digest="other")
    summary = report.summarise(records, {}, complete=False)
    assert summary["identical_answers"] == {"samples": 2, "identical": 1}
    assert "ended early" in report.markdown(summary)


@pytest.mark.parametrize("legs", [(READBACK, DIRECT), PLAN.legs])
async def test_pictures_are_drawn_for_any_legs(legs: Any, tmp_path: Path) -> None:
    _, records = await play(replace(PLAN, legs=legs, samples=1))
    summary = report.summarise(records, {}, complete=True)
    files = pictures.draw(tmp_path, summary, "a title")
    assert [file.name for file in files] == ["ttft.png", "ttft.svg", "prefill.png", "prefill.svg"]
    for file in files:
        start = file.read_bytes()[:8]
        assert start == b"\x89PNG\r\n\x1a\n" if file.suffix == ".png" else start.startswith(b"<?xml")


async def test_pictures_of_the_same_records_are_the_same(tmp_path: Path) -> None:
    _, records = await play(replace(PLAN, samples=1))
    summary = report.summarise(records, {}, complete=True)
    (tmp_path / "again").mkdir()
    first = pictures.draw(tmp_path, summary, "a title")
    second = pictures.draw(tmp_path / "again", summary, "a title")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
