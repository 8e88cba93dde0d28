# ruff: noqa: N802 - methods are named as the RPCs
"""DecodeService over gRPC: what arrives is checked and handed on; decisions are made elsewhere."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvloop.decode.keeper import Keeper
from kvloop.decode.listing import list_leases
from kvloop.decode.prolonging import Prolonger
from kvloop.decode.reading import Reading
from kvloop.decode.turns import Turns
from kvloop.engine.port import Engine
from kvloop.engine.reloading import Reloading
from kvloop.engine.serving import WorkerServicing
from kvloop.runtime import checks, tracing
from kvloop.runtime.clock import Clock
from kvloop.runtime.errors import invalid
from kvloop.runtime.mux.carrier import Carrier
from kvloop.runtime.servicing import Context, stream, time_left_s, unary
from kvloop.v1alpha1 import decode_service_pb2, decode_service_pb2_grpc

SERVICE_NAME = "kvloop.v1alpha1.DecodeService"


@dataclass(frozen=True, slots=True)
class Parts:
    """What the methods work with, once the engine is up."""

    engine: Engine
    keeper: Keeper
    prolonger: Prolonger
    reading: Reading
    turns: Turns
    reloading: Reloading
    clock: Clock
    worker_id: str


class DecodeServicer(WorkerServicing[Parts], decode_service_pb2_grpc.DecodeServiceServicer):
    """The methods."""

    def __init__(self) -> None:
        super().__init__(
            Carrier(
                self.Decode, decode_service_pb2.DecodeRequest, decode_service_pb2.DecodeServiceAttachResponse
            )
        )

    @stream
    async def Decode(
        self, request: decode_service_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[decode_service_pb2.DecodeResponse]:
        """Serve the second leg of a turn."""
        checks.check_deadline(time_left_s(context))
        turns = self._admit().turns
        with tracing.continued(context.invocation_metadata()):
            leg = turns.begin(request)
        try:
            async for response in leg.responses():
                yield response
        finally:
            leg.leave()

    @unary
    async def BeginRead(
        self, request: decode_service_pb2.BeginReadRequest, context: Context
    ) -> decode_service_pb2.BeginReadResponse:
        """Pin a lease and hand out its handle."""
        checks.check_deadline(time_left_s(context))
        grant = await self._parts.reading.begin(request)
        response = decode_service_pb2.BeginReadResponse(read_id=grant.read_id, num_tokens=grant.num_tokens)
        response.handle.params_json = grant.handle_json
        response.pin_time.FromNanoseconds(int(grant.pin_s * 1e9))
        return response

    @unary
    async def EndRead(
        self, request: decode_service_pb2.EndReadRequest, context: Context
    ) -> decode_service_pb2.EndReadResponse:
        """Take a pin off. Idempotent."""
        checks.check_deadline(time_left_s(context))
        if not request.read_id:
            raise invalid("read_id", "must not be empty")
        await self._parts.reading.end(request)
        return decode_service_pb2.EndReadResponse()

    @unary
    async def ReleaseLease(
        self, request: decode_service_pb2.ReleaseLeaseRequest, context: Context
    ) -> decode_service_pb2.ReleaseLeaseResponse:
        """Let go of a lease, or of all of a conversation's."""
        checks.check_deadline(time_left_s(context))
        keeper = self._parts.keeper
        if not request.lease_id and not request.scope:
            raise invalid("lease_id", "a lease or a scope is required")
        released = bool(request.lease_id) and await keeper.release(request.lease_id)
        if request.scope:
            released = await keeper.release_scope(request.scope) or released
        return decode_service_pb2.ReleaseLeaseResponse(released=released)

    @unary
    async def ListLeases(
        self, request: decode_service_pb2.ListLeasesRequest, context: Context
    ) -> decode_service_pb2.ListLeasesResponse:
        """List what is held."""
        checks.check_deadline(time_left_s(context))
        parts = self._parts
        return await list_leases(request, parts.keeper, parts.engine, parts.clock)

    @unary
    async def ReloadWeights(
        self, request: decode_service_pb2.DecodeServiceReloadWeightsRequest, context: Context
    ) -> decode_service_pb2.DecodeServiceReloadWeightsResponse:
        """Load other weights under the same name."""
        epoch = await self._reload(request.weights_version, context)
        return decode_service_pb2.DecodeServiceReloadWeightsResponse(epoch=epoch)

    @unary
    async def GetInfo(
        self, request: decode_service_pb2.DecodeServiceGetInfoRequest, context: Context
    ) -> decode_service_pb2.DecodeServiceGetInfoResponse:
        """Tell the worker's facts."""
        return decode_service_pb2.DecodeServiceGetInfoResponse(info=await self._info("decode"))
