"""The worker side without an engine: reads under fake clocks, notices and handles that must not end it."""

import warnings
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
def worker(worker_class: Any, host: Host) -> Any:
    made: Any = worker_class.__new__(worker_class)
    made._init_reads()
    made._clocks = PeerClocks(host)
    made._partial_notices = {}
    made._start_margin_s = 2.0
    made._engine_clock_offset = {"e": 0.0}
    made._remote_agents = {}
    made._recving_metadata = {}
    made._invalid_block_ids = SimpleNamespace(put=lambda _blocks: None)
    made.nixl_wrapper = Nixl()
    made.xfer_stats = SimpleNamespace(record_transfer=lambda _: None, record_failed_transfer=lambda: None)
    return made


def begin(worker: Any, host: Host, expiry: float) -> dict[str, list[int]]:
    remote = SimpleNamespace(engine_id="e", blocks_expiry_time=expiry)
    worker._recving_metadata["r"] = SimpleNamespace(remote=remote, local_block_ids=[[1, 2]])
    worker._began["r"] = host()
    worker._deadline(worker._recving_metadata["r"])
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

    base = type(worker).__mro__[3]
    refused: list[str] = []
    monkeypatch.setattr(base, "_read_blocks_for_req", shake)
    monkeypatch.setattr(worker, "_refuse", refused.append)
    worker._read_blocks_for_req("r", SimpleNamespace(remote=SimpleNamespace(engine_id="unknown")))
    assert refused == ["r"]
    assert worker.take_report().failed == {"r": "transfer"}


@pytest.mark.parametrize(
    ("took_s", "offset", "asked"),
    [([0.2], 7.1, 1), ([60.0, 0.4], 7.2, 2), ([9.0, 9.0, 4.0], 9.0, 3)],
)
def test_a_pause_in_a_handshake_does_not_stay_in_the_offset(
    worker: Any, monkeypatch: pytest.MonkeyPatch, took_s: list[float], offset: float, asked: int
) -> None:
    from kvloop.connector import worker as module

    now, calls = 0.0, 0

    def shake(_self: Any, *_args: Any) -> tuple[dict[Any, str], float]:
        nonlocal now, calls
        now += took_s[calls]
        calls += 1
        return {(0, 0): "agent"}, 7.0

    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    monkeypatch.setattr(type(worker).__mro__[3], "_nixl_handshake", shake)
    agents, found = worker._nixl_handshake("host", 1, 1, "e")
    assert agents == {(0, 0): "agent"}
    assert found == pytest.approx(offset)
    assert calls == asked


@pytest.mark.parametrize("count", ["1" * 5000, "", "-1", "x", "1.5"])
def test_a_notice_that_is_none(worker: Any, count: str) -> None:
    worker._take_notice(f"lease#pin:{count}".encode())
    assert worker.take_report() is None


def test_memory_in_which_blocks_can_t_be_copied_refuses_the_start(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(self: Any, kv_caches: Any) -> None:
        self.device_kv_caches = kv_caches

    base = type(worker).__mro__[3]
    monkeypatch.setattr(base, "register_kv_caches", register)
    worker._physical_blocks_per_logical_kv_block = 1
    worker.engine_id, worker.tp_rank = "e", 0
    worker.kv_caches_base_addr = {"e": [[4096]]}
    worker.block_len_per_layer = worker.block_stride_per_layer = [64]
    worker._copies = True
    with pytest.raises(ValueError, match="other memory"):
        worker.register_kv_caches({})
    worker._copies = False
    worker.register_kv_caches({})
