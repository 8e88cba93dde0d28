"""The Go client: its own tests, those against a fleet of processes, its example, and its stubs."""

import re
import subprocess
from pathlib import Path

import pytest
from client_go import ROOT, Go

from kvloop.cli.supervisor.fleet import Fleet

# Compiling gRPC takes its time where nothing is cached.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Go:
    return Go(tmp_path_factory.mktemp("go"))


def routers(fleet: Fleet) -> str:
    return ",".join(fleet.endpoints("router"))


def test_the_code_is_formatted_and_vetted(go: Go) -> None:
    assert go.run("gofmt", "-l", "kvloop", "examples") == ""
    go.run("go", "vet", "-tags", "fleet", "./...")


def test_the_stubs_are_fresh() -> None:
    ended = subprocess.run(
        [ROOT / "tools" / "stubs-go.sh", "--check"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_package_on_scripted_and_on_real_routers(go: Go, shared_fleet: Fleet) -> None:
    told = go.run(
        "go", "test", "-count=1", "-v", "-tags", "fleet", "./kvloop", KVLOOP_ROUTERS=routers(shared_fleet)
    )
    assert "--- PASS: TestAConversationOnAFleet" in told
    assert "--- SKIP" not in told


def test_the_example_agent_reuses_its_history(go: Go, shared_fleet: Fleet, tmp_path: Path) -> None:
    go.run("go", "build", "-o", str(tmp_path / "agent"), "./examples/agent")
    told = go.run(str(tmp_path / "agent"), "-routers", routers(shared_fleet), "-turns", "4")
    reused = [int(count) for count in re.findall(r"(\d+) of \d+ prompt tokens reused", told)]
    assert len(reused) == 4, told
    assert reused[0] == 0
    assert reused == sorted(set(reused))
    assert told.endswith("closed, released: true\n")
