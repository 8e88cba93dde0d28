"""Reads between operating system processes."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from sim_rig import SMALL, Rig, prefill, say, some_ids

from kvloop.engine.port import ReadGrant
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.runtime.errors import Failure


async def test_a_read_from_another_process_and_from_a_killed_one(rig: Rig) -> None:
    script = Path(__file__).parent / "sim_holder.py"
    holder = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=asyncio.subprocess.PIPE)
    p = SimulatedEngine(SimulatedSettings(**SMALL), "prefill")
    await p.start()
    try:
        assert holder.stdout is not None
        told = json.loads(await holder.stdout.readline())
        prompt = some_ids(40) + told["ids"]
        first, second = (ReadGrant("r", handle, 44, 60.0) for handle in told["handles"])
        outcome = await prefill(p, prompt, first)
        assert outcome.sources.external == 44
        assert (await say(p, prompt)).ids == await rig.cold(prompt)
        holder.kill()
        await holder.wait()
        await p.release_prefill("p")
        other = SimulatedEngine(SimulatedSettings(**SMALL), "prefill")
        await other.start()
        with pytest.raises(Failure) as caught:
            await prefill(other, prompt, second)
        await other.stop()
        assert caught.value.metadata["refused"] == "transfer"
    finally:
        if holder.returncode is None:
            holder.kill()
        await holder.communicate()
        await p.stop()
