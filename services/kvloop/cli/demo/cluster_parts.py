"""What stands around a fleet in the cluster demo: gateway, Prometheus, and a terminal to look into."""

import asyncio
import io
import json
import os
import secrets
import shutil
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from kvloop.cli.errors import CommandFailed
from kvloop.cli.places import SMOLLM2
from kvloop.cli.supervisor.part import Command, Part, PartFailed
from kvloop.cli.supervisor.programs import serve_program
from kvloop.runtime.ports import free_port

COLUMNS, LINES = 80, 24
_POLL_S = 0.1
_UP_S = 30.0
_HTTP_S = 5.0
QUERIES = {
    "up": 'sum(up{job=~"router|prefill|decode|gateway"})',
    "turns by router": "sum by (instance) (kvloop_turns_total)",
    "turns by verdict": "sum by (verdict) (kvloop_turns_total)",
    "prompt tokens by source": "sum by (source) (kvloop_prompt_tokens_total)",
    "leases": 'sum(kvloop_leases{state="live"})',
    "canary": "sum by (result) (kvloop_canary_total)",
    "alerts": 'ALERTS{alertstate="firing"}',
}


class Gateway:
    """A gateway in front of routers. A context."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], ready_s: float) -> None:
        self.part = Part("gateway", folder)
        self.endpoint = ""
        self._settings = {"listen": "127.0.0.1:0", "chat_listen": "127.0.0.1:0", "model": SMOLLM2, **settings}
        self._file = folder / "gateway.yaml"
        self._ready_s = ready_s

    async def __aenter__(self) -> Self:
        """Start. Raises PartFailed."""
        self._file.write_text(yaml.safe_dump(self._settings), encoding="utf-8")
        program = serve_program("gateway", self._file, self.part.ready_path)
        await self.part.spawn(Command(program, os.environ))
        try:
            self.endpoint = await self.part.wait_ready(self._ready_s)
        except BaseException:
            await self.part.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.part.stop()


class Prometheus:
    """Prometheus over some targets by job. A context."""

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]], rules: Path) -> None:
        self.part = Part("prometheus", folder)
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._targets = sum(len(endpoints) for endpoints in targets.values())
        self._folder = folder
        self._config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(endpoints)}]}
                for job, endpoints in targets.items()
            ],
        }

    async def __aenter__(self) -> Self:
        """Start, and wait until every target was scraped. Raises PartFailed, CommandFailed."""
        program = shutil.which("prometheus")
        if program is None:
            raise CommandFailed(
                "prometheus is missing: run `make debian`, or install the Debian package prometheus"
            )
        file = self._folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(self._config), encoding="utf-8")
        arguments = [
            *(program, f"--config.file={file}", f"--storage.tsdb.path={self._folder / 'tsdb'}"),
            *(f"--web.listen-address={self.endpoint}", "--log.level=warn"),
        ]
        await self.part.spawn(Command(arguments, os.environ))
        try:
            await self._until("up", lambda found: _sum(found) >= self._targets)
        except BaseException:
            await self.part.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.part.stop()

    async def answers(self, *, expected_turns: int) -> dict[str, dict[str, float]]:
        """Return what Prometheus says, once it has seen the turns. Raises PartFailed."""
        await self._until("turns by verdict", lambda found: _sum(found) >= expected_turns)
        return {name: _by_label(await self._query(query)) for name, query in QUERIES.items()}

    async def _until(self, name: str, enough: Any) -> None:
        deadline = asyncio.get_running_loop().time() + _UP_S
        while True:
            found: list[dict[str, Any]] = []
            try:
                found = await self._query(QUERIES[name])
            except (OSError, TimeoutError, ValueError):
                if not self.part.running:
                    raise self.part.failure() from None
            if enough(found):
                return
            if asyncio.get_running_loop().time() > deadline:
                raise PartFailed("prometheus", f"did not see all of: {name}", self.part.log_tail())
            await asyncio.sleep(_POLL_S)

    async def _query(self, query: str) -> list[dict[str, Any]]:
        body = await _get(self.endpoint, f"/api/v1/query?query={urllib.parse.quote(query)}")
        found: list[dict[str, Any]] = json.loads(body)["data"]["result"]
        return found


async def _get(endpoint: str, path: str) -> bytes:
    host, _, port = endpoint.rpartition(":")
    async with asyncio.timeout(_HTTP_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {endpoint}\r\n\r\n".encode())
            return (await reader.read()).partition(b"\r\n\r\n")[2]
        finally:
            writer.close()


def _sum(found: list[dict[str, Any]]) -> float:
    return sum(float(one["value"][1]) for one in found)


def _by_label(found: list[dict[str, Any]]) -> dict[str, float]:
    return {
        " ".join(v for k, v in sorted(one["metric"].items()) if k != "__name__"): float(one["value"][1])
        for one in found
    }


async def picture(command: Sequence[str], file: Path, *, await_text: str) -> str:
    """Run `kvloop COMMAND` in a terminal of 80 by 24, draw it as SVG once a text shows, return its text.

    Raises CommandFailed.
    """
    from rich.console import Console
    from rich.text import Text

    if shutil.which("tmux") is None:
        raise CommandFailed("tmux is missing: run `make debian`, or install the Debian package tmux")
    # A server of our own: nobody's settings, and nobody's sessions.
    tmux = ["tmux", "-L", f"kvloop-{secrets.token_hex(4)}", "-f", "/dev/null"]
    program = [sys.executable, "-m", "kvloop.cli.main", *command]
    size = ("-x", str(COLUMNS), "-y", str(LINES))
    await _run([*tmux, "new-session", "-d", *size, "-s", "top", "--", *program])
    try:
        deadline = asyncio.get_running_loop().time() + _UP_S
        while await_text not in (shown := await _run([*tmux, "capture-pane", "-p", "-e", "-t", "top"])):
            if asyncio.get_running_loop().time() > deadline:
                raise CommandFailed(f"kvloop top never showed {await_text}:\n{shown}")
            await asyncio.sleep(_POLL_S)
    finally:
        await _run([*tmux, "kill-server"])
    text = Text.from_ansi(shown.rstrip("\n"))
    console = Console(record=True, width=COLUMNS, height=LINES, file=io.StringIO(), force_terminal=True)
    console.print(text)
    file.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(file), title="kvloop top")
    return text.plain


async def _run(command: Sequence[str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, error = await process.communicate()
    if process.returncode:
        raise CommandFailed(f"{command[0]}: {error.decode().strip()}")
    return out.decode()
