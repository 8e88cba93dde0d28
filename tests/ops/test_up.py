"""`kvloop up`, and the doctor as it says to call it: nothing is wrong."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

KVLOOP = (sys.executable, "-m", "kvloop.cli.main")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[str]:
    """Return what `kvloop up` says once it is ready."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVLOOP_")}
    # The store and D of a busy machine are slower than a turn would wait for.
    patient = {"KVLOOP_DIRECTORY_TIMEOUT_MS": "2000", "KVLOOP_BEGIN_READ_TIMEOUT_S": "5"}
    out = tmp_path / "out"
    with out.open("w") as output:
        process = subprocess.Popen(
            [*KVLOOP, "up", "--engine", "simulated", "--listen", "127.0.0.1:0", "--decode", "2"],
            env={**inherited, **patient, "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    limit = time.monotonic() + 100
    try:
        while "Ctrl-C stops it." not in out.read_text():
            assert process.poll() is None, out.read_text()
            assert time.monotonic() < limit, out.read_text()
            time.sleep(0.05)
        yield out.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_the_doctor_finds_nothing(up: str) -> None:
    command = re.search(r"^Is it well: +kvloop (doctor .*)$", up, re.MULTILINE)
    assert command is not None, up
    done = subprocess.run(
        [*KVLOOP, *shlex.split(command[1]), "--json"], capture_output=True, text=True, check=False, timeout=60
    )
    document = json.loads(done.stdout)
    wrong = [finding for finding in document["findings"] if finding["status"] != "ok"]
    assert (done.returncode, document["healthy"], wrong) == (0, True, [])
    assert {"live-read", "kv-layout", "store", "registry"} <= {f["name"] for f in document["findings"]}
