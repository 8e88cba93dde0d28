"""The command itself: help without heavy imports, unknown commands, failures told in a sentence."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvloop.cli.main import app

HEAVY = ("torch", "vllm", "transformers", "grpc", "redis")


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("command", [[], ["serve"], ["up"], ["chat"], ["explain"], ["demo"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    arguments = [*command, "--help"]
    code = (
        "import sys\n"
        "from kvloop.cli.main import app\n"
        "try:\n"
        f"    app({arguments!r})\n"
        "except SystemExit as error:\n"
        "    assert not error.code, error.code\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("HEAVY []"), done.stdout


def test_help_lists_the_commands() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    for name in ("up", "serve", "chat", "leases", "demo", "model"):
        assert name in output


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(app, ["serf"])
    assert result.exit_code == 2
    assert "serf" in result.output


def test_leases_without_a_worker_is_a_sentence(closed_port: int) -> None:
    result = CliRunner().invoke(app, ["leases", "--decode", f"127.0.0.1:{closed_port}"])
    assert result.exit_code == 1
    assert "--decode" in result.output
    assert "Traceback" not in result.output


def test_leases_as_json_names_the_unreachable(closed_port: int) -> None:
    endpoint = f"127.0.0.1:{closed_port}"
    result = CliRunner().invoke(app, ["leases", "--json", "--decode", endpoint])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"leases": [], "unreachable": [endpoint]}


@pytest.mark.parametrize("command", [["up"], ["demo"]])
def test_a_model_that_was_not_fetched_is_a_sentence(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_settings_around: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "kvloop model fetch smollm2" in result.output
