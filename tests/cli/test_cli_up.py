"""`kvloop up` as people run it: it starts, it stops, and nothing remains, however it ends."""

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

Start = Callable[..., Any]
UP = ("up", "--engine", "simulated", "--listen", "127.0.0.1:0")
STARTED = "Ctrl-C stops it."
LISTENS = "0A"
"""A socket's state in /proc/net/tcp."""


def endpoints_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S+-\d|store) +(127\.0\.0\.1:\d+) +pid \d+$", text, re.MULTILINE))


def pid_of(text: str, part: str) -> int:
    found = re.search(rf"^{part} .* pid (\d+)$", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def sockets_of(endpoints: dict[str, str]) -> set[str]:
    """Return the sockets that listen on these ports, by inode: who listens there later has another one."""
    ports = {int(endpoint.rpartition(":")[2]) for endpoint in endpoints.values()}
    # gRPC takes a socket of IPv6 for an address of IPv4 too.
    tables = (Path("/proc/net/tcp").read_text(), Path("/proc/net/tcp6").read_text())
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {row[9] for row in rows if row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) in ports}


def test_ctrl_c_stops_everything_in_order(kvloop: Start) -> None:
    up = kvloop(*UP, "--decode", "2")
    up.wait_for(STARTED)
    endpoints = endpoints_of(up.text())
    assert set(endpoints) == {"store", "prefill-0", "decode-0", "decode-1", "router-0"}
    sockets = sockets_of(endpoints)
    assert len(sockets) == len(endpoints)
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    up.assert_nothing_remains()
    assert not sockets & sockets_of(endpoints)
    stopped = re.findall(r"^(\S+) stopped$", up.text(), re.MULTILINE)
    assert stopped[0] == "router-0"
    assert stopped[-1] == "store"
    assert set(stopped) == set(endpoints)


def test_killing_the_supervisor_takes_everything_along(kvloop: Start) -> None:
    up = kvloop(*UP)
    up.wait_for(STARTED)
    endpoints = endpoints_of(up.text())
    sockets = sockets_of(endpoints)
    assert len(sockets) == len(endpoints)
    up.signal(signal.SIGKILL)
    assert up.wait() == -signal.SIGKILL
    up.assert_nothing_remains()
    assert not sockets & sockets_of(endpoints)


@pytest.mark.parametrize("moment", ["store starting", "prefill-0 starting"])
def test_interrupted_while_starting(kvloop: Start, moment: str) -> None:
    up = kvloop(*UP)
    up.wait_for(moment)
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    up.assert_nothing_remains()
    assert STARTED not in up.text()


def test_a_crash_is_told_and_ends_everything(kvloop: Start) -> None:
    part = "decode-0"
    up = kvloop(*UP)
    up.wait_for(STARTED)
    psutil.Process(pid_of(up.text(), part)).kill()
    assert up.wait() == 1
    up.assert_nothing_remains()
    assert f"{part} was ended by SIGKILL; its last log lines:" in up.text()
    assert '"event": "ready"' in up.text()
    logs = re.search(r"all logs are in (\S+)", up.text())
    assert logs is not None
    assert (Path(logs[1]) / f"{part}.log").is_file()


def test_a_part_that_can_not_start_is_told(kvloop: Start, tmp_path: Path) -> None:
    file = tmp_path / "prefill.yaml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file.write_text(f"listen: 127.0.0.1:{port}\n")
        up = kvloop(*UP, "--prefill-config", str(file))
        assert up.wait() == 1
    assert "prefill-0 ended with exit code 1" in up.text()
    assert f"can't listen on 127.0.0.1:{port}" in up.text()
    assert "Traceback" not in up.text()


def test_refused_settings_are_told_before_anything_starts(kvloop: Start, tmp_path: Path) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text("blok_size: 16\n")
    up = kvloop(*UP, "--decode-config", str(file))
    assert up.wait() == 2
    assert "decode-0: no such setting: blok_size" in up.text()
    assert "starting" not in up.text()


def test_logs_go_where_they_are_wanted(kvloop: Start, tmp_path: Path) -> None:
    up = kvloop(*UP, "--logs", str(tmp_path / "logs"))
    up.wait_for(STARTED)
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    for part in ("store", "prefill-0", "decode-0", "router-0"):
        assert '"event": "ready"' in (tmp_path / "logs" / f"{part}.log").read_text()
    # Secrets are for their owner alone.
    assert (tmp_path / "logs" / "router-0.yaml").stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_in_order_also_when_nobody_reads_any_more(kvloop: Start, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    up = kvloop(*UP, "--logs", str(logs), piped=True)
    up.wait_until((logs / "router-0.ready").is_file, "the router to be ready")
    up.process.stdout.close()
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    up.assert_nothing_remains()
    # Each part was asked to end and took its ready file along; killed ones leave it.
    assert not list(logs.glob("*.ready"))
