"""The README's snippets for agents, run as they stand but for the router's address."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from client_go import ROOT, Go

from kvloop.cli.supervisor.fleet import Fleet

ROUTER = "127.0.0.1:7600"
MOST_LINES = 11

GO_PROGRAM = """package main

import (
	"context"
	"fmt"
	"log"

	"kvloop/clients/go/kvloop"
)

func agent(ctx context.Context) error {
%s
	return err
}

func main() {
	if err := agent(context.Background()); err != nil {
		log.Fatal(err)
	}
}
"""


def snippet(language: str, containing: str) -> str:
    """Return the README's one block of a language that contains something."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in found if containing in block]
    assert len(block.splitlines()) <= MOST_LINES
    assert ROUTER in block
    return block


def test_python(shared_fleet: Fleet, tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        snippet("python", "kvloop.client").replace(ROUTER, shared_fleet.endpoint("router-0")),
        encoding="utf-8",
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "verdict: VERDICT_RECOMPUTE" in ended.stdout
    assert ended.stderr == ""


# Compiling gRPC takes its time where nothing is cached.
@pytest.mark.timeout(900)
def test_go(shared_fleet: Fleet, tmp_path: Path) -> None:
    block = snippet("go", "kvloop.Dial").replace(ROUTER, shared_fleet.endpoint("router-1"))
    program = tmp_path / "snippet" / "main.go"
    program.parent.mkdir()
    program.write_text(GO_PROGRAM % block, encoding="utf-8")
    go = Go(tmp_path / "go")
    told = go.run("go", "run", str(program), folder=program.parent)
    assert "VERDICT_RECOMPUTE" in told
    assert told.rstrip().endswith("<nil>")
