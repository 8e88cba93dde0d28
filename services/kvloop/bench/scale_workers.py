"""Many prefill and decode workers in one process: real services, simulated engines, one link to the store.

    KVLOOP_BENCH_STORE=URL python -m kvloop.bench.scale_workers READY_FILE PREFILLS DECODES [PRESET]

Each has a port, a health service, a life in the registry and its own leases, as a process of its own would
have. Routers tell no difference but for the time that answers take, which nobody measures here.
"""

import asyncio
import gc
import json
import os
import resource
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from kvloop.decode.app import DecodeApp
from kvloop.decode.settings import DecodeSettings
from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.settings import SimulatedSettings
from kvloop.metastore.factory import StoreOptions, open_store
from kvloop.prefill.app import PrefillApp
from kvloop.prefill.settings import PrefillSettings
from kvloop.runtime import logs

STORE_URL = "KVLOOP_BENCH_STORE"
"""Environment: not on a command line, which everybody on the machine can read."""
BLOCK = 128
MAX_LEN = 32_768
BLOCKS = 65_536
"""One D holds all conversations that are played, of 24k tokens too, and half of its blocks are for that."""
_PATIENT = StoreOptions(deadline_s=30.0, connect_s=10.0)
"""One process stands for a thousand: its own slowness must not look like an outage of the store."""
_SLOW = {"begin_read_timeout_s": 30.0, "end_read_timeout_s": 30.0}
_GC_EVERY = 50_000
_AT_ONCE = 50
"""Workers that start at a time."""


async def serve(ready: Path, prefills: int, decodes: int, preset: str = "instant") -> None:
    """Serve until SIGTERM."""
    engine = SimulatedSettings(
        block_size=BLOCK, max_model_len=MAX_LEN, num_blocks=BLOCKS, preset=preset, enable_prefix_caching=False
    )
    async with AsyncExitStack() as stack:
        store = open_store(os.environ[STORE_URL], options=_PATIENT)
        stack.push_async_callback(store.close)
        flags = {"engine": "simulated", "listen": "127.0.0.1:0", "stop_grace_s": 0.0, "drain_limit_s": 0.0}
        p_settings = PrefillSettings.load(flags=flags | _SLOW)
        d_settings = DecodeSettings.load(flags=flags)
        apps: list[PrefillApp | DecodeApp] = [
            PrefillApp(p_settings, engine=SimulatedEngine(engine, "prefill"), store=store)
            for _ in range(prefills)
        ]
        apps += [
            DecodeApp(d_settings, engine=SimulatedEngine(engine, "decode"), store=store)
            for _ in range(decodes)
        ]
        for first in range(0, len(apps), _AT_ONCE):
            await asyncio.gather(*(app.start() for app in apps[first : first + _AT_ONCE]))
        # As `kvloop serve` does: what a thousand workers consist of is not looked through again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_EVERY)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        # Written aside and moved: whoever sees the file sees all of it.
        aside = ready.with_suffix(".new")
        aside.write_text(json.dumps({"endpoint": apps[-1].endpoint, "workers": [a.endpoint for a in apps]}))
        aside.replace(ready)
        await stop.wait()
    # A thousand farewells would take longer than anybody wants to wait; the registry forgets by itself.
    os._exit(0)


def main() -> None:
    """Run the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft < hard else (soft, hard))
    logs.configure("error")
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:5]))


if __name__ == "__main__":
    main()
