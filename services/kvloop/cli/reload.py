"""`kvloop reload`: other weights under the same name, on running workers."""

import asyncio
from typing import Annotated, Any

import typer

from kvloop.cli.errors import CommandFailed, sentences

DECODE = "127.0.0.1:50052"
PREFILL = "127.0.0.1:50051"


@sentences
def reload(
    weights_version: Annotated[
        str, typer.Argument(help="A name for the new weights: workers of other versions are not paired.")
    ],
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVLOOP_PREFILL_ENDPOINTS",
            help=f"host:port of a prefill worker; repeatable. [default: {PREFILL}]",
        ),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVLOOP_DECODE_ENDPOINTS",
            help=f"host:port of a decode worker; repeatable. [default: {DECODE}]",
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=1.0, help="How long turns and readers may take to end.")
    ] = 120.0,
) -> None:
    """Have workers load the weights that lie under their model's name now.

    Each worker admits no new turns, ends those in progress, lets go of all leases, and begins a new epoch.
    """
    epochs, failures = asyncio.run(
        _all(_endpoints(prefill, PREFILL), _endpoints(decode, DECODE), weights_version, timeout_s)
    )
    for endpoint, epoch in epochs.items():
        typer.echo(f"{endpoint}: epoch {epoch}")
    if failures:
        said = "; ".join(f"{endpoint}: {text}" for endpoint, text in failures.items())
        raise CommandFailed(f"not all workers have the new weights ({said}); run this again")


def _endpoints(given: list[str] | None, default: str) -> list[str]:
    return [part for value in given or [default] for part in value.split(",") if part]


async def _all(
    prefills: list[str], decodes: list[str], version: str, timeout_s: float
) -> tuple[dict[str, str], dict[str, str]]:
    """Return epochs and failures by endpoint."""
    import grpc

    names = [*prefills, *decodes]
    calls = [_prefill(one, version, timeout_s) for one in prefills]
    calls += [_decode(one, version, timeout_s) for one in decodes]
    answers = dict(zip(names, await asyncio.gather(*calls, return_exceptions=True), strict=True))
    epochs: dict[str, str] = {}
    failures: dict[str, str] = {}
    for endpoint, answer in answers.items():
        if isinstance(answer, grpc.aio.AioRpcError):
            failures[endpoint] = str(answer.details())
        elif isinstance(answer, BaseException):
            raise answer
        else:
            epochs[endpoint] = answer
    return epochs, failures


async def _prefill(endpoint: str, version: str, timeout_s: float) -> str:
    from kvloop.v1alpha1 import prefill_service_pb2, prefill_service_pb2_grpc

    request = prefill_service_pb2.PrefillServiceReloadWeightsRequest(weights_version=version)
    return await _call(endpoint, prefill_service_pb2_grpc.PrefillServiceStub, request, timeout_s)


async def _decode(endpoint: str, version: str, timeout_s: float) -> str:
    from kvloop.v1alpha1 import decode_service_pb2, decode_service_pb2_grpc

    request = decode_service_pb2.DecodeServiceReloadWeightsRequest(weights_version=version)
    return await _call(endpoint, decode_service_pb2_grpc.DecodeServiceStub, request, timeout_s)


async def _call(endpoint: str, stub: Any, request: Any, timeout_s: float) -> str:
    from kvloop.runtime.security import from_environment

    async with from_environment().channel(endpoint) as channel:
        answer = await stub(channel).ReloadWeights(request, timeout=timeout_s)
        return str(answer.epoch)
