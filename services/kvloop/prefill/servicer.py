# ruff: noqa: N802 - methods are named as the RPCs
"""PrefillService over gRPC: what arrives is checked and handed on; decisions are made elsewhere."""

from dataclasses import dataclass

from kvloop.engine.port import Engine
from kvloop.engine.reloading import Reloading
from kvloop.engine.serving import WorkerServicing
from kvloop.prefill.leg import Legs
from kvloop.runtime import checks
from kvloop.runtime.mux.carrier import Carrier
from kvloop.runtime.servicing import Context, time_left_s, unary
from kvloop.v1alpha1 import prefill_service_pb2, prefill_service_pb2_grpc

SERVICE_NAME = "kvloop.v1alpha1.PrefillService"


@dataclass(frozen=True, slots=True)
class Parts:
    """What the methods work with, once the engine is up."""

    engine: Engine
    legs: Legs
    reloading: Reloading
    worker_id: str


class PrefillServicer(WorkerServicing[Parts], prefill_service_pb2_grpc.PrefillServiceServicer):
    """The methods."""

    def __init__(self) -> None:
        super().__init__(
            Carrier(
                self.Prefill,
                prefill_service_pb2.PrefillRequest,
                prefill_service_pb2.PrefillServiceAttachResponse,
            )
        )

    @unary
    async def Prefill(
        self, request: prefill_service_pb2.PrefillRequest, context: Context
    ) -> prefill_service_pb2.PrefillResponse:
        """Make the prompt's KV ready to be read."""
        left = checks.check_deadline(time_left_s(context))
        return await self._admit().legs.run(request, left)

    @unary
    async def ReleasePrefill(
        self, request: prefill_service_pb2.ReleasePrefillRequest, context: Context
    ) -> prefill_service_pb2.ReleasePrefillResponse:
        """Let go of KV that nobody will read."""
        checks.check_deadline(time_left_s(context))
        checks.check_request_id(request.request_id, required=True)
        released = await self._parts.legs.release(request.request_id)
        return prefill_service_pb2.ReleasePrefillResponse(released=released)

    @unary
    async def ReloadWeights(
        self, request: prefill_service_pb2.PrefillServiceReloadWeightsRequest, context: Context
    ) -> prefill_service_pb2.PrefillServiceReloadWeightsResponse:
        """Load other weights under the same name."""
        epoch = await self._reload(request.weights_version, context)
        return prefill_service_pb2.PrefillServiceReloadWeightsResponse(epoch=epoch)

    @unary
    async def GetInfo(
        self, request: prefill_service_pb2.PrefillServiceGetInfoRequest, context: Context
    ) -> prefill_service_pb2.PrefillServiceGetInfoResponse:
        """Tell the worker's facts."""
        return prefill_service_pb2.PrefillServiceGetInfoResponse(info=await self._info("prefill"))
