"""Which GPUs the workers of a fleet on one host get."""

from pathlib import Path
from typing import Any

import pytest

from kvloop.cli.supervisor import gpus
from kvloop.cli.supervisor.fleet import Fleet
from kvloop.cli.supervisor.plan import FleetPlan
from kvloop.runtime.config import ConfigError


def plan(prefills: int = 1, decodes: int = 1, **workers: Any) -> FleetPlan:
    return FleetPlan(prefill=[{}] * prefills, decode=[{}] * decodes, workers=workers)


@pytest.mark.parametrize(
    ("given", "there", "dealt"),
    [
        (plan(), ["0", "1"], {"prefill-0": "0", "decode-0": "1"}),
        (plan(2), ["0", "1", "2", "3"], {"prefill-0": "0", "prefill-1": "1", "decode-0": "2"}),
        (plan(tensor_parallel_size=2), ["0", "1", "2", "3"], {"prefill-0": "0,1", "decode-0": "2,3"}),
        (plan(visible_devices="5, 7"), ["0", "1"], {"prefill-0": "5", "decode-0": "7"}),
        (plan(), [], {}),
        (plan(engine="simulated"), ["0"], {}),
        (plan(device="cpu"), ["0"], {}),
        # Whose memory is named may stand beside others.
        (plan(gpu_memory_utilization=0.4), ["0"], {}),
        (FleetPlan(prefill=[{"visible_devices": "3"}]), ["0"], {"decode-0": "0"}),
    ],
)
def test_each_worker_has_its_own(given: FleetPlan, there: list[str], dealt: dict[str, str]) -> None:
    assert gpus.deal(given, there) == dealt


def test_too_few_are_said() -> None:
    with pytest.raises(ConfigError, match=r"prefill-0, prefill-1, decode-0 need 3 GPUs, 2 are there"):
        gpus.deal(plan(2), ["0", "1"])


@pytest.mark.parametrize(
    ("chosen", "found"),
    [(None, ["0", "1", "2"]), ("2,0", ["2", "0"]), ("GPU-1a, GPU-2b", ["GPU-1a", "GPU-2b"])],
)
def test_what_this_process_may_use_is_there(
    chosen: str | None, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in ("0000:18:00.0", "0000:2a:00.0", "0000:3a:00.0"):
        (tmp_path / address).mkdir()
    monkeypatch.setattr(gpus, "gpu_present", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert gpus.here(tmp_path) == found


async def test_a_fleet_that_needs_more_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "here", lambda: ["0"])
    with pytest.raises(ConfigError, match="need 2 GPUs"):
        async with Fleet(plan(), tmp_path):
            pass
