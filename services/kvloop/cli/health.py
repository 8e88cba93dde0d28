"""`kvloop health`: one question to one process, for health checks of containers."""

import asyncio
import http.client
import urllib.parse
from typing import Annotated

import typer

from kvloop.cli.errors import CommandFailed, sentences


@sentences
def health(
    target: Annotated[str, typer.Argument(help="host:port of a gRPC service, or an http:// URL.")],
    service: Annotated[
        str,
        typer.Option(
            help='Name to ask about; "liveness" stays on while a process drains. [default: readiness]'
        ),
    ] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait.")] = 3.0,
) -> None:
    """Ask grpc.health.v1, or GET a URL; exit code 0 when the process serves."""
    if target.startswith("http://"):
        status = _get(target, timeout)
        if not 200 <= status < 300:
            raise CommandFailed(f"{target} answers {status}")
        return
    state = asyncio.run(_check(target, service, timeout))
    if state != "SERVING":
        raise CommandFailed(f"{target} is {state}")


def _get(url: str, timeout_s: float) -> int:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise CommandFailed(f"{url} does not answer ({type(error).__name__})") from None
    finally:
        connection.close()


async def _check(endpoint: str, service: str, timeout_s: float) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from kvloop.runtime.security import from_environment

    async with from_environment().channel(endpoint) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise CommandFailed(f"{endpoint} does not answer ({error.code().name})") from None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
