"""Block pools and counters of a P and a D, once a second, until ended.

python watch.py PREFILL DECODE OUT.jsonl
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from google.protobuf.json_format import MessageToDict

from kvloop.runtime.channels import open_channel
from kvloop.v1alpha1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
)

EVERY_S = 1.0
LATE_S = 30.0


async def watch(prefill: str, decode: str, file: TextIO) -> None:
    """Write a line per look."""
    async with open_channel(prefill) as at_prefill, open_channel(decode) as at_decode:
        p: Any = prefill_service_pb2_grpc.PrefillServiceStub(at_prefill)
        d: Any = decode_service_pb2_grpc.DecodeServiceStub(at_decode)
        ask_p = prefill_service_pb2.PrefillServiceGetInfoRequest()
        ask_d = decode_service_pb2.DecodeServiceGetInfoRequest()
        while True:
            facts = {
                "prefill": await p.GetInfo(ask_p, timeout=LATE_S),
                "decode": await d.GetInfo(ask_d, timeout=LATE_S),
            }
            line: dict[str, Any] = {"time": time.time()}
            for role, answer in facts.items():
                told = MessageToDict(answer.info, preserving_proto_field_name=True)
                line[role] = {name: told.get(name) for name in ("pool", "counters")}
            file.write(json.dumps(line) + "\n")
            file.flush()
            await asyncio.sleep(EVERY_S)


def main(prefill: str, decode: str, out: str) -> None:
    """Watch until ended."""
    with Path(out).open("w", encoding="utf-8") as file:
        asyncio.run(watch(prefill, decode, file))


if __name__ == "__main__":
    main(*sys.argv[1:])
