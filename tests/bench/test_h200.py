"""The kit of deploy/h200 without its GPUs: what it refuses, what it calls, and what it keeps of failures."""

import importlib.util
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from bench_fakes import FakeTarget

from kvloop.bench.target import TargetFailed

KIT = Path(__file__).parents[2] / "deploy" / "h200"

# Stands for every Python that the script starts; what serves stays until it is ended.
PYTHON = """#!/bin/bash
echo "$*" >>"$CALLS"
stay() { exec sleep 100; }
argument() { while [ "$1" != "$name" ]; do shift; done; echo "$2"; }
case "$*" in
  *" up "*)
    logs=$(name=--logs argument "$@")
    mkdir -p "$logs"
    for part in router-0 prefill-0 decode-0; do echo '{}' >"$logs/$part.ready"; done
    stay ;;
  *" serve "*) touch "$(name=--ready-file argument "$@")"; stay ;;
  *watch.py*) stay ;;
  -c*) echo 100 ;;
esac
"""


def measure(folder: Path, what: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script with a Python that does nothing; return how it ended, and what it called."""
    calls, python = folder / "calls", folder / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    calls.touch()
    ended = subprocess.run(
        ["/bin/bash", str(KIT / "measure.sh"), what, str(folder), str(folder / "out")],
        env={"PATH": f"{python.parent}:{os.environ['PATH']}", "CALLS": str(calls), "DRY": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended, calls.read_text().splitlines()


@pytest.mark.parametrize("what", ["smoke,hot", "load,sweep", "sweep,load,streams", "hot,load"])
def test_what_wants_a_fleet_of_its_own_is_refused_in_a_list(what: str, tmp_path: Path) -> None:
    ended, calls = measure(tmp_path, what)
    assert (ended.returncode, calls) == (2, [])
    assert ended.stderr.startswith(f"{what}: hot and load")


def test_both_runs_of_a_load_have_the_leg_that_they_are_compared_by(tmp_path: Path) -> None:
    ended, calls = measure(tmp_path, "load")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    loads = [call.split() for call in calls if " bench load " in call]
    assert [call[call.index("--name") + 1] for call in loads] == ["load", "load"]
    assert ["--no-reuse" in call for call in loads] == [True, False]
    assert [Path(call[call.index("--out") + 1]).name for call in loads] == ["load-off", "load-on"]


@pytest.mark.parametrize("what", ["sweep", "hot"])
def test_a_sweep_is_told_a_worker_whose_facts_are_recorded(what: str, tmp_path: Path) -> None:
    ended, calls = measure(tmp_path, what)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (sweep,) = [call.split() for call in calls if " bench sweep " in call]
    assert sweep[sweep.index("--prefill-worker") + 1]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("h200_streams", KIT / "streams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"EVERY_S": 0.0, "AFTER_S": 0.0, "LENGTH": 4, "STREAMS": 2, "PROMPT": 8}.items():
        monkeypatch.setattr(module, name, value)
    return module


class Streaming:
    """A client whose streams have two tokens each; some fail before the first."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.failing = failing
        self.begun = 0

    async def turn(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.begun += 1
        if self.begun in self.failing:
            raise TargetFailed("no stream")
        for token in (1, 2):
            yield SimpleNamespace(token_ids=[token])

    async def close(self) -> None:
        return None


def played(streams: ModuleType, out: Path, client: Streaming, **failing: int) -> dict[str, Any]:
    """Play all legs; failing tells which request of a leg fails. Return what was written."""
    bench_of = streams.Bench

    def made(*arguments: Any) -> Any:
        bench = bench_of(*arguments)
        bench._targets = {leg: FakeTarget(leg, failing.get(leg.replace("-", "_"))) for leg in streams.LEGS}
        bench._client = client
        return bench

    streams.Bench = made  # type: ignore[attr-defined]
    arguments = ["127.0.0.1:1", "127.0.0.1:2", "32000", str(out), "400"]
    if failing or client.failing:
        with pytest.raises(SystemExit, match="1"):
            streams.main(arguments)
    else:
        streams.main(arguments)
    return dict(json.loads(out.read_text()))


def test_streams_keep_what_came_beside_a_turn_that_failed(streams: ModuleType, tmp_path: Path) -> None:
    legs = played(streams, tmp_path / "streams.json", Streaming(), readback=4, off_cold=1)
    assert legs["readback"]["failed"] == ["turn: no answer"]
    assert [turn["verdict"] for turn in legs["readback"]["turns"]] == ["READBACK"]
    assert legs["off-cold"]["failed"] == ["first turn: no answer"]
    assert len(legs["off-cold"]["turns"]) == 1
    assert (legs["direct"]["failed"], len(legs["direct"]["turns"])) == ([], 2)
    assert all(len(leg["tpot_ms_by_stream"]) == 2 for leg in legs.values())


def test_a_leg_without_any_stream_is_told_and_the_others_count(streams: ModuleType, tmp_path: Path) -> None:
    # Two streams twice per leg: those that count are the second pair.
    legs = played(streams, tmp_path / "streams.json", Streaming(failing=(3, 4, 7)))
    assert (legs["alone"]["tpot_ms"], legs["alone"]["failed"]) == (None, ["stream: no stream"] * 2)
    assert len(legs["off-cold"]["tpot_ms_by_stream"]) == 1
    assert legs["direct"]["failed"] == []


def test_streams_that_all_came_end_well(streams: ModuleType, tmp_path: Path) -> None:
    assert not any(leg["failed"] for leg in played(streams, tmp_path / "s.json", Streaming()).values())
