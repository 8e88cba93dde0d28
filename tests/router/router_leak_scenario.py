"""Plays good and failing turns with marked content, then prints every status that a client saw.

Run by test_bad_input.py in a process of its own; argument: "json" or "console".
"""

import asyncio
import sys
from typing import Any

import grpc
from router_fakes import expected_answer, fake_fleet, make_request

from kvloop.runtime import logs, tokens
from kvloop.runtime.errors import Failure, Reason
from kvloop.v1alpha1 import sampling_pb2

MARK = "XyZZyMARKxYzzY"


async def fail(*_: int) -> None:
    raise RuntimeError("a bug")


async def refuse(*_: int) -> None:
    raise Failure(Reason.ERROR_REASON_KV_READ_FAILED, "no")


async def play() -> list[grpc.aio.AioRpcError]:
    seen: list[grpc.aio.AioRpcError] = []
    ids = [900 + n for n in range(40)]
    async with fake_fleet(prefills=2, decodes=2) as fleet:
        client = await fleet.client()
        sampling = sampling_pb2.SamplingParams(
            max_tokens=4, stop=[MARK], extra_args_json=f'{{"a": "{MARK}"}}'
        )
        request = make_request(ids, MARK, sampling=sampling, cache_salt=MARK)
        answer = await client.turn(request)
        assert answer.token_ids == expected_answer(tokens.pack(ids), 4)
        request.prompt_token_ids += tokens.pack(answer.token_ids)
        assert (await client.turn(request)).way == ("READBACK", "PROVEN")

        async def refused(request: Any) -> None:
            try:
                await client.turn(request)
            except grpc.aio.AioRpcError as error:
                seen.append(error)
            else:
                raise AssertionError("not refused")

        for trouble in (fail, refuse):
            for leg, workers in (("on_prefill", fleet.prefills), ("on_chunk", fleet.decodes)):
                for worker in workers:
                    setattr(worker, leg, trouble)
                await refused(request)
                for worker in workers:
                    setattr(worker, leg, None)
        request.sampling.extra_args_json = f'{{"kv_transfer_params": {{"remote_host": "{MARK}"}}}}'
        await refused(request)
        # A fault of the router's own, with the turn in the frames of the traceback.
        fleet.directory.on_lookup = lambda: 1 / 0
        request.sampling.extra_args_json = "{}"
        await refused(request)
    return seen


def main() -> None:
    logs.configure("debug", as_json=sys.argv[1] == "json")
    errors = asyncio.run(play())
    sys.stdout.buffer.write(b"statuses:\n")
    for error in errors:
        metadata = [*(error.initial_metadata() or ()), *(error.trailing_metadata() or ())]
        values = [v.encode() if isinstance(v, str) else bytes(v) for _, v in metadata]
        sys.stdout.buffer.write(
            b"\n".join([str(error.code()).encode(), str(error.details()).encode(), *values])
        )


if __name__ == "__main__":
    main()
