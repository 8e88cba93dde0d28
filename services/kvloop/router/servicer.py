"""RouterService: who calls, what is let in, and which attempt of a request is the newest."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from kvloop.router import conversations, steps
from kvloop.router.auth import Authenticator
from kvloop.router.relay import Relay
from kvloop.router.sessions import Sessions
from kvloop.router.turn import Tools, Turn
from kvloop.runtime import tracing
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.mux.carrier import Carrier
from kvloop.runtime.servicing import Context, stream, time_left_s, unary, written
from kvloop.v1alpha1 import router_service_pb2

SERVICE = "kvloop.v1alpha1.RouterService"


class RouterServicer:
    """The door of the router. One instance per process, on one event loop."""

    def __init__(self, tools: Tools, authenticator: Authenticator) -> None:
        self._tools = tools
        self._authenticator = authenticator
        self._sessions = Sessions(tools)
        self._carrier = Carrier(
            self.Generate,
            router_service_pb2.GenerateRequest,
            router_service_pb2.RouterServiceAttachResponse,
        )
        self._running: set[asyncio.Task[None]] = set()
        self._newest: dict[tuple[str, str], tuple[asyncio.Task[None], Relay]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def turns(self) -> int:
        """Return how many turns are being served."""
        return len(self._running)

    @property
    def sessions(self) -> int:
        """Return how many sessions are open."""
        return len(self._sessions)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the service for a server. Generate's answers are serialized already."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.Generate,
                    request_deserializer=router_service_pb2.GenerateRequest.FromString,
                ),
                "Attach": grpc.stream_stream_rpc_method_handler(
                    self.Attach,
                    request_deserializer=router_service_pb2.RouterServiceAttachRequest.FromString,
                    response_serializer=router_service_pb2.RouterServiceAttachResponse.SerializeToString,
                ),
                "Session": grpc.stream_stream_rpc_method_handler(
                    self.Session,
                    request_deserializer=router_service_pb2.SessionRequest.FromString,
                    response_serializer=router_service_pb2.SessionResponse.SerializeToString,
                ),
                "EndConversation": grpc.unary_unary_rpc_method_handler(
                    self.EndConversation,
                    request_deserializer=router_service_pb2.EndConversationRequest.FromString,
                    response_serializer=router_service_pb2.EndConversationResponse.SerializeToString,
                ),
                "GetConversation": grpc.unary_unary_rpc_method_handler(
                    self.GetConversation,
                    request_deserializer=router_service_pb2.GetConversationRequest.FromString,
                    response_serializer=router_service_pb2.GetConversationResponse.SerializeToString,
                ),
                "ExplainTurn": grpc.unary_unary_rpc_method_handler(
                    self.ExplainTurn,
                    request_deserializer=router_service_pb2.ExplainTurnRequest.FromString,
                    response_serializer=router_service_pb2.ExplainTurnResponse.SerializeToString,
                ),
            },
        )

    @written
    async def Generate(  # noqa: N802 - gRPC's name
        self, request: router_service_pb2.GenerateRequest, context: Context
    ) -> None:
        """Serve one turn. Nothing, headers included, is sent before the first chunk."""
        try:
            tenant = self._tenant(context)
            turn = steps.admit(request, tenant, time_left_s(context), self._tools)
            with turn.timed("queue"):
                await self._tools.admission.enter(turn.time_left_s(), turn.patience)
        except Failure as failure:
            self._tools.watch.refused(failure)
            raise
        relay = self._tools.canary.relay(turn, self._tools)
        with tracing.continued(context.invocation_metadata()):
            task = self._start(turn, relay)
        try:
            # Only calls that share a stream have it.
            await relay.pour(context.write, getattr(context, "offer", None))
        finally:
            # Ends the legs when the client has gone; otherwise the task is done already.
            task.cancel()

    @stream
    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[router_service_pb2.RouterServiceAttachRequest], context: Context
    ) -> AsyncIterator[router_service_pb2.RouterServiceAttachResponse]:
        """Carry many calls of Generate."""
        async with aclosing(self._carrier.serve(requests, context)) as batches:
            async for batch in batches:
                yield batch

    @stream
    async def Session(  # noqa: N802
        self, requests: AsyncIterator[router_service_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[router_service_pb2.SessionResponse]:
        """Keep a conversation alive while the stream is open."""
        async for response in self._sessions.serve(requests, lambda: self._tenant(context)):
            yield response

    @unary
    async def EndConversation(  # noqa: N802
        self, request: router_service_pb2.EndConversationRequest, context: Context
    ) -> router_service_pb2.EndConversationResponse:
        """Let go of what is held for a conversation."""
        return await conversations.end(request, self._tenant(context), self._tools)

    @unary
    async def GetConversation(  # noqa: N802
        self, request: router_service_pb2.GetConversationRequest, context: Context
    ) -> router_service_pb2.GetConversationResponse:
        """Tell what is held for a conversation."""
        return await conversations.get(request, self._tenant(context), self._tools)

    @unary
    async def ExplainTurn(  # noqa: N802
        self, request: router_service_pb2.ExplainTurnRequest, context: Context
    ) -> router_service_pb2.ExplainTurnResponse:
        """Tell why a recent turn went the way it went."""
        return self._tools.memory.get(self._tenant(context), request.request_id)

    async def drain(self, limit_s: float) -> None:
        """Refuse new turns; return when the running ones have ended, or after limit_s."""
        self._close()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            pass

    async def stop(self) -> None:
        """Cancel what still runs. Idempotent."""
        self._close()
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _close(self) -> None:
        """Let nothing in any more."""
        self._tools.admission.close()
        self._sessions.end()
        self._carrier.drain()

    def _tenant(self, context: Context) -> str:
        return self._authenticator.tenant(context.invocation_metadata() or ())

    def _start(self, turn: Turn, relay: Relay) -> asyncio.Task[None]:
        key = (turn.tenant, turn.request_id)
        if (older := self._newest.pop(key, None)) is not None:
            older[1].fail(
                Failure(Reason.ERROR_REASON_SUPERSEDED, "a later attempt of this request has taken over")
            )
            older[0].cancel()
        task = asyncio.create_task(self._run(turn, relay))
        self._running.add(task)
        self._idle.clear()
        self._newest[key] = (task, relay)

        def ended(_: asyncio.Task[None]) -> None:
            self._running.discard(task)
            self._tools.admission.leave()
            if not self._running:
                self._idle.set()
            if self._newest.get(key, (None,))[0] is task:
                del self._newest[key]

        task.add_done_callback(ended)
        return task

    async def _run(self, turn: Turn, relay: Relay) -> None:
        try:
            with self._tools.watch.serving(turn):
                await steps.serve(turn, self._tools, relay)
            self._tools.canary.answered(turn, relay, self._tools)
        except asyncio.CancelledError:
            # Only a stop of the router finds a reader still there.
            relay.fail(Failure(Reason.ERROR_REASON_DRAINING, "this router has stopped; use another"))
            raise
        except Exception as error:  # noqa: BLE001 - raised again where the call ends
            relay.fail(error)
