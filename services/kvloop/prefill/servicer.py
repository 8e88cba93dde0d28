# ruff: noqa: N802 - methods are named as the RPCs
"""PrefillService over gRPC: what arrives is checked and handed on; decisions are made elsewhere."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from kvloop.engine.port import Engine
from kvloop.engine.reloading import Reloading
from kvloop.engine.worker import worker_info
from kvloop.prefill.leg import Legs
from kvloop.runtime import checks
from kvloop.runtime.errors import Failure, Reason
from kvloop.runtime.mux.carrier import Carrier
from kvloop.runtime.servicing import Context, stream, time_left_s, unary
from kvloop.v1alpha1 import prefill_service_pb2, prefill_service_pb2_grpc

SERVICE_NAME = "kvloop.v1alpha1.PrefillService"
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What the methods work with, once the engine is up."""

    engine: Engine
    legs: Legs
    reloading: Reloading
    worker_id: str


class PrefillServicer(prefill_service_pb2_grpc.PrefillServiceServicer):
    """The methods. Closed until `open`, and to new turns again after `drain`."""

    def __init__(self) -> None:
        self._open: Parts | None = None
        self._draining = False
        self._carrier = Carrier(
            self.Prefill, prefill_service_pb2.PrefillRequest, prefill_service_pb2.PrefillServiceAttachResponse
        )

    def open(self, parts: Parts) -> None:
        """Begin to serve."""
        self._open = parts

    def drain(self) -> None:
        """Refuse new turns."""
        self._draining = True
        self._carrier.drain()

    @property
    def _parts(self) -> Parts:
        if self._open is None:
            raise Failure(
                Reason.ERROR_REASON_NO_WORKER, "the engine is starting", retry_after_s=RETRY_AFTER_S
            )
        return self._open

    @unary
    async def Prefill(
        self, request: prefill_service_pb2.PrefillRequest, context: Context
    ) -> prefill_service_pb2.PrefillResponse:
        """Make the prompt's KV ready to be read."""
        left = checks.check_deadline(time_left_s(context))
        legs = self._parts.legs
        if self._draining:
            raise Failure(Reason.ERROR_REASON_DRAINING, "the worker is going away")
        self._parts.reloading.admit()
        return await legs.run(request, left)

    @stream
    async def Attach(
        self,
        request_iterator: AsyncIterator[prefill_service_pb2.PrefillServiceAttachRequest],
        context: Context,
    ) -> AsyncIterator[prefill_service_pb2.PrefillServiceAttachResponse]:
        """Carry many calls of Prefill."""
        async with aclosing(self._carrier.serve(request_iterator, context)) as batches:
            async for batch in batches:
                yield batch

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
        left = checks.check_deadline(time_left_s(context))
        epoch = await self._parts.reloading.run(request.weights_version, left)
        return prefill_service_pb2.PrefillServiceReloadWeightsResponse(epoch=epoch)

    @unary
    async def GetInfo(
        self, request: prefill_service_pb2.PrefillServiceGetInfoRequest, context: Context
    ) -> prefill_service_pb2.PrefillServiceGetInfoResponse:
        """Tell the worker's facts."""
        parts = self._parts
        info = worker_info(parts.engine.facts, "prefill", parts.worker_id)
        info.pool.CopyFrom(await parts.engine.pool())
        info.counters.CopyFrom(await parts.engine.counters())
        return prefill_service_pb2.PrefillServiceGetInfoResponse(info=info)
