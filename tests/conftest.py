"""What all tests share: which of them `make test-fast` leaves out, and how long one may take."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Whole fleets of processes, stores from Debian or in trouble, and what takes its time.
SLOW_FILES = {
    "bench/test_bench_sweep.py",
    "cli/test_cli_chat.py",
    "cli/test_cli_demo.py",
    "cli/test_cli_fleet.py",
    "cli/test_cli_up.py",
    "client/test_client_fleet.py",
    "client/test_client_go.py",
    "client/test_client_readme.py",
    "metastore/test_directory_model.py",
    "metastore/test_outages.py",
    "metastore/test_store_faults.py",
    "client/test_client_sim.py",
    "ops/test_fleet.py",
    "router/test_sessions_over_time.py",
}
SLOW_FOLDERS = {"cases"}
# The first test of a room waits for up to three engines to start, which import and compile on two cores.
ENGINE_TIMEOUT_S = 480
SLOW_STORES = {"redis", "acl", "tls", "sentinel", "cluster"}


def _is_slow(item: pytest.Item) -> bool:
    if HERE not in item.path.parents:
        return False
    place = item.path.relative_to(HERE)
    if place.parts[0] in SLOW_FOLDERS or place.as_posix() in SLOW_FILES:
        return True
    call = getattr(item, "callspec", None)
    return call is not None and call.params.get("backing") in SLOW_STORES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_slow(item):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))
