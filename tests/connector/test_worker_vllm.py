"""The worker side without an engine: reads under fake clocks, notices and handles that must not end it."""

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.connector.clocks import Moment, PeerClocks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


class Host:
    def __init__(self) -> None:
        self.counter = self.unseen = 0.0

    def __call__(self) -> Moment:
        return Moment(self.counter, self.counter + self.unseen, self.counter + self.unseen)


class Nixl:
    """Transfers that end when told to."""

    def __init__(self) -> None:
        self.state = "PROC"

    def check_xfer_state(self, _handle: int) -> str:
        return self.state

    def get_xfer_telemetry(self, _handle: int) -> Any:
        return SimpleNamespace(xferDuration=1000, totalBytes=64, descCount=1)

    def release_xfer_handle(self, _handle: int) -> None:
        pass


class Executor:
    """Does work when told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, work: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work(*args))
            except OSError as error:
                future.set_exception(error)

        self.waiting.append(run)
        return future

    def run(self) -> int:
        waiting, self.waiting = self.waiting, []
        for work in waiting:
            work()
        return len(waiting)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture(scope="module")
def worker_class() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of itself
        from kvloop.connector.worker import KvloopWorker
    return KvloopWorker


@pytest.fixture
def worker(worker_class: Any, host: Host) -> Iterator[Any]:
    made: Any = worker_class.__new__(worker_class)
    made._init_reads()
    made._clocks = PeerClocks(host)
    made._clocks.compare("e", 0.0, host())
    made._shaken["e"] = ("host", 1, 1, "e")
    made._handshake_lock = threading.RLock()
    made._handshake_futures = {}
    made._handshake_initiation_executor = Executor()
    made._engine_last_active = {}
    made._partial_notices = {}
    made._start_margin_s = 2.0
    made._remote_agents = {}
    made._recving_metadata = {}
    made._invalid_block_ids = SimpleNamespace(put=lambda _blocks: None)
    made.nixl_wrapper = Nixl()
    made.xfer_stats = SimpleNamespace(record_transfer=lambda _: None, record_failed_transfer=lambda: None)
    yield made
    del made._handshake_initiation_executor  # there is nothing to shut down


def vllms_own(worker: Any) -> Any:
    from kvloop.connector.handshakes import Handshakes

    (base,) = Handshakes.__bases__
    assert isinstance(worker, base)
    return base


def begin(worker: Any, host: Host, expiry: float) -> dict[str, list[int]]:
    remote = SimpleNamespace(engine_id="e", blocks_expiry_time=expiry)
    worker._recving_metadata["r"] = SimpleNamespace(remote=remote, local_block_ids=[[1, 2]])
    worker._began["r"] = host()
    return {"r": [1]}


@pytest.mark.parametrize(
    ("awake", "unseen", "counts"),
    [
        (29.9, 0.0, True),
        (30.0, 0.0, False),
        (1.0, 0.4, True),
        (1.0, 0.6, False),
        (1.0, 3600.0, False),
        (29.5, 0.4, True),
        (29.8, 0.4, False),
    ],
)
def test_a_read_counts_only_while_its_blocks_were_held(
    worker: Any, host: Host, awake: float, unseen: float, counts: bool
) -> None:
    transfers = begin(worker, host, expiry=30.0)
    assert worker._poll(transfers) == (set(), set())
    host.counter, host.unseen = awake, unseen
    worker.nixl_wrapper.state = "DONE"
    done, failed = worker._poll(transfers)
    assert (done, failed) == (({"r"}, set()) if counts else (set(), {"r"}))
    assert worker.take_report().failed == ({} if counts else {"r": "deadline"})
    assert not worker._began


def test_a_handshake_that_fails_fails_its_read_alone(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def shake(_self: Any, _req_id: str, _meta: Any) -> None:
        raise OSError("no route to host")

    refused: list[str] = []
    monkeypatch.setattr(vllms_own(worker), "_read_blocks_for_req", shake)
    monkeypatch.setattr(worker, "_refuse", refused.append)
    worker._read_blocks_for_req("r", SimpleNamespace(remote=SimpleNamespace(engine_id="unknown")))
    assert refused == ["r"]
    assert worker.take_report().failed == {"r": "transfer"}


@pytest.mark.parametrize(
    ("took_s", "offset", "asked"),
    [([0.2], 7.1, 1), ([60.0, 0.4], 7.2, 2), ([9.0, 9.0, 4.0], 9.0, 3)],
)
def test_a_pause_in_a_handshake_does_not_stay_in_the_offset(
    worker: Any,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    took_s: list[float],
    offset: float,
    asked: int,
) -> None:
    calls = 0

    def shake(_self: Any, *_args: Any) -> tuple[dict[Any, str], float]:
        nonlocal calls
        host.counter += took_s[calls]
        calls += 1
        return {(0, 0): "agent"}, 7.0

    monkeypatch.setattr(vllms_own(worker), "_nixl_handshake", shake)
    agents, found = worker._nixl_handshake("host", 1, 1, "e")
    assert agents == {(0, 0): "agent"}
    assert found == pytest.approx(offset)
    assert calls == asked
    assert worker._clocks.deadline("e", 1000.0) == pytest.approx(1000.0 - offset, abs=0.01)


class Peer:
    """Another engine, whose clock can stand still; handshakes and begun reads are counted."""

    def __init__(self, worker: Any, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker, self.host = worker, host
        self.behind = 0.0
        self.asked: list[tuple[Any, ...]] = []
        self.begun: list[str] = []
        self.away = False
        worker._remote_agents["e"] = {(0, 0): "agent"}
        worker._guards_off = frozenset({"counts"})
        monkeypatch.setattr(worker, "_refuse", lambda _req_id: None)

        def shake(_self: Any, *args: Any) -> tuple[dict[Any, str], float]:
            self.asked.append(args)
            if self.away:
                raise OSError("no route to host")
            return {(0, 0): "agent"}, -self.behind

        def read(_self: Any, req_id: str, _meta: Any) -> None:
            self.begun.append(req_id)

        monkeypatch.setattr(vllms_own(worker), "_nixl_handshake", shake)
        monkeypatch.setattr(vllms_own(worker), "_read_blocks_for_req", read)

    def read(self, req_id: str, *, held_s: float = 30.0) -> None:
        """Have a read begin of blocks that this peer has just promised to hold."""
        expiry = self.host.counter - self.behind + held_s
        remote = SimpleNamespace(engine_id="e", blocks_expiry_time=expiry)
        self.worker._read_blocks_for_req(req_id, SimpleNamespace(remote=remote))

    def compared(self) -> int:
        """Let the background work be done; how much there was."""
        return int(self.worker._handshake_initiation_executor.run())


@pytest.fixture
def peer(worker: Any, host: Host, monkeypatch: pytest.MonkeyPatch) -> Peer:
    return Peer(worker, host, monkeypatch)


def test_after_a_peer_stood_still_one_read_is_refused_and_the_next_is_not(peer: Peer, host: Host) -> None:
    peer.read("before")
    peer.behind = 60.0
    peer.read("refused")
    assert peer.begun == ["before"]
    assert peer.worker.take_report().failed == {"refused": "deadline"}
    assert not peer.asked  # the engine's own thread goes on
    assert peer.compared() == 1
    assert peer.asked == [("host", 1, 1, "e")]
    peer.read("after")
    assert peer.begun == ["before", "after"]
    assert not peer.worker._handshake_futures
    assert peer.worker._engine_last_active == {"e": host.counter}


def test_a_read_that_is_refused_in_flight_has_the_clock_compared_too(peer: Peer, host: Host) -> None:
    transfers = begin(peer.worker, host, expiry=30.0)
    host.counter = 31.0
    peer.worker._poll(transfers)
    peer.worker._poll(transfers)
    assert peer.compared() == 1


def test_clocks_are_compared_anew_now_and_then_and_only_once_at_a_time(peer: Peer, host: Host) -> None:
    def late() -> int:
        peer.read("late", held_s=0.0)
        return peer.compared()

    peer.read("late", held_s=0.0)
    assert late() == 1
    assert late() == 0
    host.counter += 29.0
    assert late() == 0
    host.counter += 2.0
    peer.away = True
    assert late() == 1
    assert not peer.worker._handshake_futures
    host.counter += 31.0
    peer.away = False
    assert late() == 1
    del peer.worker._remote_agents["e"]
    host.counter += 31.0
    peer.worker._doubt_clock("e")
    assert peer.compared() == 0


@pytest.mark.parametrize("count", ["1" * 5000, "", "-1", "x", "1.5"])
def test_a_notice_that_is_none(worker: Any, count: str) -> None:
    worker._take_notice(f"lease#pin:{count}".encode())
    assert worker.take_report() is None


def test_memory_in_which_blocks_can_t_be_copied_refuses_the_start(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(self: Any, kv_caches: Any) -> None:
        self.device_kv_caches = kv_caches

    monkeypatch.setattr(vllms_own(worker), "register_kv_caches", register)
    worker._physical_blocks_per_logical_kv_block = 1
    worker.engine_id, worker.tp_rank = "e", 0
    worker.kv_caches_base_addr = {"e": [[4096]]}
    worker.block_len_per_layer = worker.block_stride_per_layer = [64]
    worker._copies = True
    with pytest.raises(ValueError, match="other memory"):
        worker.register_kv_caches({})
    worker._copies = False
    worker.register_kv_caches({})
