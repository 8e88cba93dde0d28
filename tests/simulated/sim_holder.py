"""A decode engine in a process of its own: holds one turn, prints a handle to it, serves until killed."""

import asyncio
import json

from sim_rig import SMALL, say, some_ids, terms

from kvloop.engine.simulated.engine import SimulatedEngine
from kvloop.engine.simulated.settings import SimulatedSettings


async def main() -> None:
    engine = SimulatedEngine(SimulatedSettings(**SMALL), "decode")
    await engine.start()
    said = await say(engine, some_ids(40), hold=terms("a"))
    grants = [await engine.begin_read("a", 44, 60.0) for _ in range(2)]
    print(json.dumps({"ids": said.ids, "handles": [grant.handle_json for grant in grants]}), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
