"""`kvloop leases`: what the decode workers hold."""

import asyncio
import json
from typing import Annotated, Any

import typer

from kvloop.cli.errors import CommandFailed, sentences

DECODE = "127.0.0.1:50052"
_TIMEOUT_S = 10.0


@sentences
def leases(
    decode: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVLOOP_DECODE_ENDPOINTS",
            help=f"host:port of a decode worker; repeatable. [default: {DECODE}]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """List the leases that decode workers hold."""
    endpoints = [part for value in decode or [DECODE] for part in value.split(",") if part]
    rows, failures = asyncio.run(_collect(endpoints))
    if as_json:
        typer.echo(json.dumps({"leases": rows, "unreachable": failures}, indent=1))
    elif rows or not failures:
        _show(rows)
    if failures:
        raise CommandFailed(
            f"no decode worker answers at {', '.join(failures)}; name the workers with --decode"
        )


async def _collect(endpoints: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    import grpc

    answers = await asyncio.gather(*(_of(endpoint) for endpoint in endpoints), return_exceptions=True)
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for endpoint, answer in zip(endpoints, answers, strict=True):
        if isinstance(answer, grpc.aio.AioRpcError):
            failures.append(endpoint)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            rows += answer
    return rows, failures


async def _of(endpoint: str) -> list[dict[str, Any]]:
    from kvloop.runtime.security import from_environment
    from kvloop.v1alpha1 import decode_service_pb2, decode_service_pb2_grpc, turn_pb2

    rows: list[dict[str, Any]] = []
    async with from_environment().channel(endpoint) as channel:
        stub = decode_service_pb2_grpc.DecodeServiceStub(channel)
        request = decode_service_pb2.ListLeasesRequest()
        while True:
            page = await stub.ListLeases(request, timeout=_TIMEOUT_S)
            for lease in page.leases:
                state = turn_pb2.LeaseState.Name(lease.state).removeprefix("LEASE_STATE_")
                rows.append(
                    {
                        "worker": endpoint,
                        "lease": lease.lease_id,
                        "state": state,
                        "conversation": lease.conversation_id,
                        "tenant": lease.tenant,
                        "tokens": lease.num_tokens,
                        "blocks": lease.num_blocks,
                        "pins": lease.pins,
                        "time_left_s": round(lease.remaining_time.ToTimedelta().total_seconds(), 3),
                    }
                )
            if not page.next_page_token:
                return rows
            request.page_token = page.next_page_token


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "state", "conversation", "lease"):
        table.add_column(heading, overflow="fold")
    for heading in ("tokens", "blocks", "pins", "time left"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            *(
                str(row[name])
                for name in ("worker", "state", "conversation", "lease", "tokens", "blocks", "pins")
            ),
            f"{row['time_left_s']:.0f} s",
        )
    console = Console()
    if rows:
        console.print(table)
    else:
        console.print("nothing is held")
