"""A gateway as a process, and how to wait for it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_MAIN = """
import asyncio, json, os, sys
from kvloop.gateway.app import GatewayApp
from kvloop.gateway.settings import GatewaySettings
from kvloop.runtime.server import run_until_signal

class Announced(GatewayApp):
    async def start(self):
        await super().start()
        with open(sys.argv[2] + ".part", "w") as file:
            file.write(self.endpoint)
        os.rename(sys.argv[2] + ".part", sys.argv[2])

asyncio.run(run_until_signal(Announced(GatewaySettings(**json.loads(sys.argv[1])))))
"""
_START_S = 240


class Gateway:
    """A gateway process; its logs go to a file in the folder."""

    def __init__(self, settings: dict[str, object], folder: Path) -> None:
        ready, self.log = folder / "endpoint", folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, json.dumps(settings), str(ready)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )
        wait_until(lambda: ready.exists() or self.process.poll() is not None, _START_S)
        assert ready.exists(), self.log.read_text()[-2000:]
        self.url = f"http://{ready.read_text()}"

    def stop(self) -> int:
        """End the process; return its exit status."""
        self.process.terminate()
        return self.process.wait(timeout=60)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll until a condition holds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the condition never held"
        time.sleep(0.01)
