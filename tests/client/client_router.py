"""A router that answers by script: what a client meets before it gets an answer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_status import rpc_status

from kvloop.client import RetryPolicy
from kvloop.runtime import tokens
from kvloop.runtime.errors import Failure, Reason, to_status
from kvloop.v1alpha1 import router_service_pb2, router_service_pb2_grpc, turn_pb2

Response = router_service_pb2.GenerateResponse
Step = Response | Failure | grpc.StatusCode | asyncio.Event

QUICK = RetryPolicy(attempts=4, first_pause_s=0.01, longest_pause_s=0.02)
OVERLOADED = Failure(Reason.ERROR_REASON_OVERLOADED, "too many turns at once", retry_after_s=0.01)
DRAINING = Failure(Reason.ERROR_REASON_DRAINING, "this router is going away")
ONE = Response(chunk=turn_pb2.Chunk(token_ids=tokens.pack([1]), text="a"))
TWO = Response(chunk=turn_pb2.Chunk(token_ids=tokens.pack([2, 3]), text="bc"))
END = Response(summary=turn_pb2.Summary(prompt_tokens=3, output_tokens=3))
ANSWER: tuple[Step, ...] = (ONE, TWO, END)


class ScriptedRouter(router_service_pb2_grpc.RouterServiceServicer):
    """Each call takes the next script; without one it is answered."""

    def __init__(self) -> None:
        self.scripts: list[tuple[Step, ...]] = []
        self.requests: list[router_service_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.left_s: list[float] = []
        self.cancelled = asyncio.Event()
        self.sessions: list[router_service_pb2.SessionOpen] = []
        self.session_failures: list[Failure] = []
        self.hold_sessions = False
        """Whether sessions are left waiting for their opening."""
        self.break_session = asyncio.Event()
        self.closes = 0
        self.ended: list[str] = []
        self.endpoint = ""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Response]:  # noqa: N802
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.left_s.append(context.time_remaining())
        try:
            for step in self.scripts.pop(0) if self.scripts else ANSWER:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Response):
                    yield step
                else:
                    await _fail(context, step)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        opening = await anext(requests)
        self.sessions.append(opening.open)
        if self.session_failures:
            await _fail(context, self.session_failures.pop(0))
        if self.hold_sessions:
            await asyncio.Event().wait()
        opened = router_service_pb2.SessionResponse()
        opened.opened.alive_time.FromSeconds(30)
        yield opened
        closing = asyncio.create_task(_next(requests))
        breaking = asyncio.create_task(self.break_session.wait())
        try:
            await asyncio.wait({closing, breaking}, return_when=asyncio.FIRST_COMPLETED)
            if not closing.done():
                self.break_session.clear()
                await _fail(context, DRAINING)
            assert closing.result().HasField("close")
            self.closes += 1
            yield router_service_pb2.SessionResponse(closed=router_service_pb2.SessionClosed(released=True))
        finally:
            closing.cancel()
            breaking.cancel()

    async def EndConversation(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.scripts:
            await _fail(context, self.scripts.pop(0)[0])
        self.ended.append(request.conversation_id)
        return router_service_pb2.EndConversationResponse(released=True)

    async def GetConversation(self, request: Any, context: Any) -> Any:  # noqa: N802
        await _fail(context, Failure(Reason.ERROR_REASON_CONVERSATION_NOT_FOUND, "nothing is held"))


async def _next(requests: Any) -> Any:
    return await anext(requests)


async def _fail(context: Any, step: Any) -> None:
    if isinstance(step, Failure):
        await context.abort_with_status(rpc_status.to_status(to_status(step)))
    await context.abort(step, "")


@asynccontextmanager
async def scripted(
    listen: Callable[[grpc.aio.Server], int] = lambda server: server.add_insecure_port("127.0.0.1:0"),
) -> AsyncIterator[ScriptedRouter]:
    """Serve a scripted router."""
    router, server = ScriptedRouter(), grpc.aio.server()
    router_service_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    router.endpoint = f"127.0.0.1:{listen(server)}"
    await server.start()
    try:
        yield router
    finally:
        await server.stop(0)
