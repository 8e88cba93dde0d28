"""A gateway as a process, and how to wait for it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_START_S = 240


class Gateway:
    """A gateway process; its logs go to a file in the folder."""

    def __init__(self, settings: dict[str, object], folder: Path, **environment: str) -> None:
        config, ready, self.log = folder / "gateway.yaml", folder / "ready", folder / "log"
        config.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "kvloop.cli.main", "serve", "gateway", "--log-level", "warning"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--config", str(config), "--ready-file", str(ready)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
            )
        wait_until(lambda: ready.exists() or self.process.poll() is not None, _START_S)
        assert ready.exists(), self.log.read_text()[-2000:]
        facts = json.loads(ready.read_text())
        self.url = f"http://{facts['endpoint']}"
        self.chat = str(facts["chat"])
        """host:port of ChatService."""

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
