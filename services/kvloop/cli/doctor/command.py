"""`kvloop doctor`."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloop.cli.doctor.findings import Finding, Status
from kvloop.cli.errors import EXIT_FAILED, sentences
from kvloop.cli.places import ROUTER

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red bold"}


@sentences
def doctor(
    *,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A router's YAML settings: where workers and store are."),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(envvar="KVLOOP_ROUTER", help=f"host:port of a router. [default: {ROUTER}]"),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(envvar="KVLOOP_PREFILL_ENDPOINTS", help="host:port of a prefill worker; repeatable."),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(envvar="KVLOOP_DECODE_ENDPOINTS", help="host:port of a decode worker; repeatable."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(envvar="KVLOOP_DIRECTORY_URL", metavar="URL", help="The store; names workers, too."),
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="KVLOOP_TOKEN", help="Bearer token, where the router asks for one.")
    ] = None,
    engine_host: Annotated[
        bool, typer.Option(help="Whether engines run on this host, so that its NIXL matters.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """Check a deployment, and say what to do about what is wrong. Exit code 1 when something fails."""
    from kvloop.cli.doctor.examination import Deployment, examine
    from kvloop.cli.doctor.machine import look

    given = _settings(config)
    deployment = Deployment(
        router=router or _dialled(given.get("listen")) or ROUTER,
        prefill=_split(prefill or given.get("prefill_endpoints")),
        decode=_split(decode or given.get("decode_endpoints")),
        store=store or str(given.get("directory_url") or ""),
        token=token,
    )
    findings = asyncio.run(examine(deployment, look() if engine_host else None))
    if as_json:
        healthy = all(finding.status is not Status.FAIL for finding in findings)
        document = {"healthy": healthy, "findings": [finding.as_json() for finding in findings]}
        typer.echo(json.dumps(document, indent=1))
    else:
        _show(findings)
    if any(finding.status is Status.FAIL for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def _settings(config: Path | None) -> dict[str, Any]:
    from kvloop.cli.supervisor.plan import read_values

    return read_values(config)


def _dialled(listen: object) -> str:
    """Return where a router that listens there is reached; "" when that is left open."""
    text = str(listen or "")
    return "" if text.endswith(":0") else text


def _split(values: object) -> tuple[str, ...]:
    parts = [values] if isinstance(values, str) else values if isinstance(values, list | tuple) else []
    return tuple(part.strip() for value in parts for part in str(value).split(",") if part.strip())


def _show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        said = Text(finding.text)
        if finding.remedy:
            said.append(f"\n-> {finding.remedy}", style="dim")
        table.add_row(Text(str(finding.status), style=_STYLES[finding.status]), finding.name, said)
    Console().print(table)
