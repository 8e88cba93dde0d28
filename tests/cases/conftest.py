"""Fleets for the cases: the same cases on real vLLM and, in seconds, on the simulated engine."""

import inspect
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "engine"))

from cases_fleet import open_stack
from cases_kit import Case, Stack
from catalogue import IDS

OUT = Path(os.environ.get("KVLOOP_CASES_OUT", "out/cases.json"))
RESTARTING = {"test_elsewhere", "test_faults", "test_identity", "test_reload", "test_guards"}
"""These restart parts of the fleet, so they come last."""
_records: list[dict[str, Any]] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "case(id, expected): a row of the catalogue of never-wrong cases")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents and item.path.stem in RESTARTING)
    for item in items:
        if here in item.path.parents and isinstance(item, pytest.Function) and _is_async(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def _is_async(item: pytest.Function) -> bool:
    return inspect.iscoroutinefunction(item.obj)


@pytest.fixture(scope="session", params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(engine: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with open_stack(engine, tmp_path_factory.mktemp("fleet")) as opened:
        yield opened


@pytest.fixture(params=["main", "bare"])
def router(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def case(request: pytest.FixtureRequest, stack: Stack, engine: str, router: str) -> AsyncIterator[Case]:
    marker = request.node.get_closest_marker("case")
    started = time.monotonic()
    running = Case(marker.args[0], marker.args[1], stack, router)
    await running.begin()
    yield running
    if not request.node.stash.get(_passed, False):
        await running.close()
        return
    await running.finish()
    assert running.id not in IDS or "mechanism_ok" in running.record, "the case says nothing of the mechanism"
    if engine == "vllm" and running.id in IDS:
        took = {"ms": (time.monotonic() - started) * 1000}
        about = {"id": running.id, "expected": running.expected, "router": running.router}
        _records.append({**about, **running.record, **took})
        _write_records((await stack.info("d1")).engine_version)


_passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


def _write_records(version: str) -> None:
    """Write what there is, after each case: a run that is cut short keeps it."""
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"vllm": version, "cases": _records}, indent=1), encoding="utf-8")


FACTS = (
    "You assist on the night shift of a warehouse. Inventory of aisle seven: crate A12 holds "
    "forty copper valves, crate B03 holds nine brass fittings, crate C77 holds two spare pumps and a manual. "
    "The forklift is called Greta and her battery lasts six hours. Deliveries arrive at five in the morning "
    "from the northern gate; the driver is Max and his dog is called Bob. Alarms are logged by sensor and by "
    "minute. At 02:14 sensor nineteen reported a cold draught near the dock; at 02:31 it was closed again. "
)


@pytest.fixture
def history(stack: Stack, request: pytest.FixtureRequest) -> list[int]:
    """Six to eight blocks of text, its first words the test's own, so that no cache knows it."""
    ids = stack.ids_of(f"{request.node.nodeid}. {FACTS}{FACTS}")
    length = 6 * stack.block_size + 11
    return ids[:length]


@pytest.fixture
def suffix(stack: Stack) -> list[int]:
    return stack.ids_of(" The dog of the driver is called")


@pytest.fixture
def question(stack: Stack, request: pytest.FixtureRequest) -> list[int]:
    """A chat turn that a model ends by itself."""
    return stack.ids_of(
        f"<|im_start|>system\n{request.node.nodeid}. {FACTS}<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France? Answer in one short sentence.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
