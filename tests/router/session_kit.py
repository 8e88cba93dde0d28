"""Opening sessions at real routers over simulated workers."""

import asyncio
import contextlib
from typing import Any

import grpc
from google.protobuf import duration_pb2
from router_sim import SimClient, SimFleet, until_async

from kvloop.runtime.errors import Failure, Reason, from_rpc_error
from kvloop.v1alpha1 import router_service_pb2, turn_pb2

ALIVE_S = 3.0
SHORT = turn_pb2.Retention(ttl=duration_pb2.Duration(seconds=2))
"""Long enough for a busy machine, short enough to see leases end."""


def opening(conversation: str, **fields: Any) -> router_service_pb2.SessionRequest:
    return router_service_pb2.SessionRequest(
        open=router_service_pb2.SessionOpen(conversation_id=conversation, **fields)
    )


CLOSE = router_service_pb2.SessionRequest(close=router_service_pb2.SessionClose())


async def opened(client: SimClient, conversation: str, **fields: Any) -> Any:
    """Open a session; return its call."""
    call = client.stub.Session(metadata=client.metadata)
    await call.write(opening(conversation, **fields))
    response = await call.read()
    assert response is not grpc.aio.EOF, await call.details()
    assert response.opened.alive_time.ToMilliseconds() > 0
    return call


async def ended(call: Any) -> Failure:
    """Return what a session ends with."""
    try:
        async with asyncio.timeout(10):
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, Reason.ERROR_REASON_UNSPECIFIED)
    raise AssertionError(f"ended with {await call.code()}")


async def pair(fleet: SimFleet, **changes: Any) -> tuple[SimClient, SimClient]:
    """Return clients of two routers."""
    changes = {"session_alive_s": ALIVE_S} | changes
    one, other = [await fleet.router(**changes) for _ in range(2)]
    return await fleet.client(one), await fleet.client(other)


async def until_prolonged(fleet: SimFleet, times: int) -> None:
    async def often() -> bool:
        return sum(node.app.parts.prolonger.prolonged for node in fleet.decodes) >= times  # type: ignore[union-attr]

    await until_async(often, f"{times} times prolonged")


async def begun(client: SimClient, *requests: Any) -> Any:
    call = client.stub.Session(metadata=client.metadata)
    # A refusal may come before everything is said; whoever reads is told of it.
    with contextlib.suppress(grpc.aio.AioRpcError):
        for request in requests:
            await call.write(request)
    return call
