"""`kvloop bench` as a process, on simulated engines."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvloop.cli.supervisor.fleet import Fleet, FleetPlan

pytestmark = pytest.mark.slow

SIMULATED = ("--engine", "simulated", "--model", "smollm2-135m-cpu")
FAST = ("--extra-engine-args", "{time_scale: 0.01}")
WAIT_S = 90.0


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "kvloop.cli.main", "bench", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=WAIT_S, check=False)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a small sweep and return its folder."""
    out = tmp_path_factory.mktemp("sweep")
    shape = ("--lengths", "512,1024", "--samples", "2", "--warm-up", "0")
    ended = bench("sweep", *SIMULATED, *FAST, *shape, "--out", str(out))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "x" in ended.stdout
    return out


def test_a_sweep_leaves_everything_that_was_promised(sweep: Path) -> None:
    names = {
        "requests.jsonl",
        "summary.json",
        "summary.md",
        "ttft.png",
        "ttft.svg",
        "prefill.png",
        "prefill.svg",
    }
    assert {file.name for file in sweep.iterdir()} == names
    summary = json.loads((sweep / "summary.json").read_text())
    assert summary["complete"]
    assert summary["failures"]["count"] == 0
    assert summary["settings"]["engine"] == "simulated"
    assert summary["identical_prompts"] == {"samples": 4, "identical": 4}
    assert summary["identical_answers"] == {"samples": 4, "identical": 4}


def test_every_leg_comes_by_its_kv_in_its_own_way(sweep: Path) -> None:
    legs = json.loads((sweep / "summary.json").read_text())["legs"]
    for length in ("512", "1024"):
        cold, hot, read, direct = (legs[leg][length] for leg in ("off-cold", "off-hot", "readback", "direct"))
        assert cold["verdicts"] == {"RECOMPUTE": 2}
        assert cold["tokens"]["computed"] == int(length)
        assert hot["verdicts"] == {"RECOMPUTE": 2}
        assert hot["tokens"]["p_local"] >= int(length) / 2
        assert read["verdicts"] == {"READBACK": 2}
        assert direct["verdicts"] == {"DIRECT": 2}
        assert direct["prefill_ms"]["value"] == 0
        assert direct["tokens"]["d_local"] >= int(length) / 2
        # The answer's last token was never computed on D.
        assert read["tokens"] == {
            "p_local": 0,
            "readback": int(length) - 161,
            "d_local": 0,
            "computed": 161,
        }
        assert read["bytes"] > 0
        assert read["transfer_ms"]["value"] > 0


def test_a_sweep_does_not_differ_from_itself(sweep: Path) -> None:
    ended = bench("compare", str(sweep), str(sweep))
    assert ended.returncode == 0, ended.stderr
    # Two samples at each of two lengths can't prove anything, whatever they say.
    assert ended.stdout.count("too few samples") == 4
    assert "only where the runs' samples are apart" in ended.stdout


def test_a_slower_run_can_fail_a_build(sweep: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (sweep / "requests.jsonl").read_text().splitlines()]
    for factor, name in ((1, "a"), (2, "b")):
        many = [line | {"ttft_ms": line["ttft_ms"] * factor} for line in lines * 3]
        (tmp_path / name).write_text("\n".join(json.dumps(line) for line in many))
    ended = bench("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-on-slower")
    assert ended.returncode == 1
    assert "slower" in ended.stdout


def test_a_report_is_written_anew(sweep: Path, tmp_path: Path) -> None:
    ended = bench("report", str(sweep), "--out", str(tmp_path / "again"))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "again" / "summary.md").read_text() == (sweep / "summary.md").read_text()


def test_an_interrupted_sweep_keeps_what_was_measured(tmp_path: Path) -> None:
    shape = ("--legs", "readback", "--lengths", "512", "--samples", "1000", "--warm-up", "0")
    program = [sys.executable, "-m", "kvloop.cli.main", "bench", "sweep", *SIMULATED, *FAST, *shape]
    records = tmp_path / "requests.jsonl"
    with subprocess.Popen([*program, "--out", str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + WAIT_S
        while not records.exists() or records.read_text().count("\n") < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not summary["complete"]
    assert summary["measured"] >= 2
    assert (tmp_path / "ttft.png").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("sweep", *SIMULATED, "--lengths", "100"), "leaves no history"),
        (("sweep", *SIMULATED, "--lengths", "many"), "--lengths"),
        (("sweep", *SIMULATED, "--legs", "sideways"), "choose from"),
        (("sweep", "--router", "127.0.0.1:1", "--legs", "off-hot"), "nothing here offers it"),
        (("sweep", "--router-hot", "127.0.0.1:1", "--legs", "off-evicted"), "--filler-tokens"),
        (("sweep", "--router", "127.0.0.1:1", "--prefill-worker", "127.0.0.1:1"), "--prefill-worker"),
        (("compare", "nowhere", "nowhere"), "nowhere"),
        (("load", "--clients", "2", "--rate", "1"), "give one of them"),
        (("load", "nothing"), "no kind of workload"),
        (("report", "nowhere"), "holds no sweep"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    ended = bench(*arguments)
    assert ended.returncode in (1, 2)
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_workload_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    ended = bench("workload", str(file), "--kind", "agentic", "--sessions", "3", "--scale", "0.01")
    assert ended.returncode == 0, ended.stderr
    assert len([entry for entry in json.loads(file.read_text()) if "parent" not in entry["kvloop"]]) == 3


async def test_of_what_runs_already_is_recorded_what_it_says_itself(tmp_path: Path) -> None:
    plan = FleetPlan(
        workers={"engine": "simulated", "model": "smollm2-135m-cpu", "block_size": 16},
        prefill=({"enable_prefix_caching": False},),
        decode=({},),
        routers=({"direct": False, "by_cost": False},),
    )
    async with Fleet(plan, tmp_path / "fleet") as fleet:
        running = ("--router", fleet.endpoint("router-0"), "--prefill-worker", fleet.endpoint("prefill-0"))
        shape = ("--legs", "off-cold,readback", "--lengths", "256", "--samples", "1", "--warm-up", "0")
        named = ("--title", "somebody's fleet", "--out", str(tmp_path / "out"))
        ended = await asyncio.to_thread(bench, "sweep", *running, *shape, *named)
    assert ended.returncode == 0, ended.stderr
    settings = json.loads((tmp_path / "out" / "summary.json").read_text())["settings"]
    assert not {"machine", "versions"} & settings.keys()
    assert settings["client"].keys() == {"machine", "versions"}
    assert (settings["engine"], settings["model"], settings["block_size"]) == (
        "simulated",
        "smollm2-135m-cpu",
        16,
    )
    assert "<!-- somebody's fleet" in (tmp_path / "out" / "ttft.svg").read_text()
