"""The embedded store: real, private, and gone with whoever started it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from store_servers import poll

from kvloop.metastore import embedded
from kvloop.metastore.embedded import EmbeddedStore, EmbeddedUnavailable
from kvloop.metastore.factory import open_directory


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_it_is_fit_and_leaves_nothing_behind() -> None:
    with EmbeddedStore() as store:
        directory = open_directory(store.url)
        report = await directory.check()
        assert report.fit
        assert report.findings == ()
        assert report.eviction_policy == "volatile-ttl"
        await directory.close()
        pid, folder = store.pid, store._folder
        assert _runs(pid)
        assert folder is not None
        assert folder.stat().st_mode & 0o077 == 0
    assert not _runs(pid)
    assert not folder.exists()
    assert store.pid == 0
    store.stop()


def test_it_asks_for_the_password_and_listens_on_loopback_only() -> None:
    with EmbeddedStore() as store:
        stranger = redis.Redis(port=store.port, protocol=2)
        with pytest.raises(redis.exceptions.AuthenticationError):
            stranger.ping()
        stranger.close()
        owner = redis.Redis.from_url(store.url)
        assert owner.config_get("bind")["bind"] == "127.0.0.1"
        assert owner.config_get("save")["save"] == ""
        owner.close()


def test_it_dies_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "from kvloop.metastore.embedded import EmbeddedStore\n"
        "import threading\n"
        "store = EmbeddedStore()\n"
        "starter = threading.Thread(target=store.start)\n"
        "starter.start(); starter.join()\n"
        "print(store.pid, store._folder, flush=True)\n"
        "threading.Event().wait()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().split()[0])
    # The thread that started it has ended; it lives on with the process.
    assert _runs(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    poll(lambda: not _runs(pid), "the store to die with its parent")


def test_a_taken_port_is_told() -> None:
    with EmbeddedStore() as first, pytest.raises(EmbeddedUnavailable, match="did not start"):
        EmbeddedStore(port=first.port).start()


def test_without_the_wheel_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EmbeddedUnavailable, match=r"kvloop\[embedded\]"):
        EmbeddedStore()
