"""A whole deployment as `kvloop up` starts it, and what clients made of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvloop.engine.settings import smollm2_dir

STARTED = "Ctrl-C stops it."
MODEL = "smollm2"
START_S = 280
# A busy machine must not decide what is reused.
PATIENT = {
    "directory_timeout_ms": 2000.0,
    "prefill_timeout_s": 600.0,
    "first_chunk_timeout_s": 600.0,
    "chunk_timeout_s": 600.0,
}
STOP_S = 60
SIMULATED = "simulated"

SYSTEM = (
    "You keep the books of a warehouse. "
    "Crate A12 has forty copper valves, crate B03 has nine brass fittings, and crate C27 has two pumps. "
    "Whoever takes something out writes down the crate, the name of the thing and the hour of the day. "
    "The gate is open from six in the morning until nine in the evening, and the dog Max sleeps beside it. "
    "Answer in one short sentence, name the crate, and never make up a number that is not written here."
)
QUESTIONS = (
    "What is in crate A12?",
    "And what is in crate B03?",
    "Where are the pumps?",
    "When does the gate close, and who sleeps there?",
)
REUSED = ("readback", "direct")


@dataclass
class Told:
    """What one client met with."""

    requests: int = 0
    errors: list[str] = field(default_factory=list)
    later_turns: int = 0
    """Turns of a conversation after its first."""
    reused: int = 0
    """Of these, turns whose history came from a decode worker."""

    def turn(self, number: int, verdict: str) -> None:
        """Take an answered turn of a conversation, the first being 0."""
        self.requests += 1
        if number:
            self.later_turns += 1
            self.reused += verdict in REUSED

    @property
    def share(self) -> float:
        """Return the share of later turns that reused."""
        return self.reused / self.later_turns if self.later_turns else 0.0

    def summary(self) -> dict[str, object]:
        """Return what out/surface.json says of the client."""
        return {
            "requests": self.requests,
            "errors": len(self.errors),
            "later_turns_reused_share": round(self.share, 4),
        }


class Up:
    """`kvloop up` as a process; its log and those of its parts are in the folder."""

    def __init__(self, folder: Path, engine: str) -> None:
        """Start it and wait until it serves."""
        self.engine = engine
        self.log = folder / "up.log"
        self._logs = folder / "logs"
        command = [sys.executable, "-m", "kvloop.cli.main", "up", "--logs", str(self._logs)]
        command += ["--listen", "127.0.0.1:0", "--gateway-listen", "127.0.0.1:0"]
        command += ["--chat-listen", "127.0.0.1:0"]
        # What a decode worker gives back must not be hidden by what the prefill worker remembers.
        command += ["--no-prefix-caching-on-prefill"]
        patient = folder / "router.yaml"
        patient.write_text(json.dumps(PATIENT))
        command += ["--router-config", str(patient)]
        if engine == SIMULATED:
            # An answer that ends with its first token is empty, which vLLM's benchmark takes for a failure.
            told = json.dumps({"tokenizer": str(smollm2_dir()), "eos_every": 1_000_000})
            command += ["--engine", SIMULATED, "--extra-engine-args", told, "--max-model-len", "8192"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "PYTHONWARNINGS": "ignore"}
            )
        limit = time.monotonic() + START_S
        while STARTED not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < limit, self.log.read_text()[-3000:]
            time.sleep(0.05)
        self.gateway = self.endpoint("gateway-0")
        self.router = self.endpoint("router-0")

    @property
    def url(self) -> str:
        """Return the gateway's base URL, without /v1."""
        return f"http://{self.gateway}"

    def endpoint(self, part: str) -> str:
        """Return a part's host:port."""
        return str(json.loads((self._logs / f"{part}.ready").read_text())["endpoint"])

    def stop(self) -> int:
        """End it as Ctrl-C does; return its exit status."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()

    def turns(self) -> dict[str, int]:
        """Return the turns that the gateway has ended so far, by verdict."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        counted: dict[str, int] = {}
        for verdict, value in re.findall(
            r'^kvloop_gateway_turns_total\{.*verdict="(\w+)".*\} (\S+)$', text, re.M
        ):
            counted[verdict] = counted.get(verdict, 0) + int(float(value))
        return counted


def run(command: Sequence[str], *, cwd: Path, timeout_s: float = 240) -> str:
    """Return what a client program prints, its log included; it must end well."""
    done = subprocess.run(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout
