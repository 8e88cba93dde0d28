"""`kvloop top`."""

import asyncio
from collections import deque
from datetime import datetime
from typing import Annotated, Any

import typer

from kvloop.cli import signals
from kvloop.cli.errors import CommandFailed, sentences


@sentences
def top(
    *,
    store: Annotated[
        str | None,
        typer.Option(envvar="KVLOOP_DIRECTORY_URL", metavar="URL", help="The store; names the workers."),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVLOOP_METRICS_ENDPOINTS",
            help="host:port of /metrics of routers and decode workers (metrics_listen); repeatable.",
        ),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(envvar="KVLOOP_PREFILL_ENDPOINTS", help="host:port of a prefill worker; repeatable."),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(envvar="KVLOOP_DECODE_ENDPOINTS", help="host:port of a decode worker; repeatable."),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 2.0,
    window: Annotated[float, typer.Option(min=1.0, help="Seconds over which rates are taken.")] = 60.0,
    once: Annotated[bool, typer.Option(help="One screen of sums since ever, then end.")] = False,
) -> None:
    """Watch workers, leases, verdicts and times to the first token. Ctrl-C ends it."""
    from kvloop.cli.top.collecting import Places

    places = Places(_split(prefill), _split(decode), _split(metrics))
    if not (store or places.prefill or places.decode or places.metrics):
        raise CommandFailed("nothing to watch: name the store with --store, or processes with --metrics")
    signals.run(_watch(places, store, interval, window, once), ending_is_success=True)


async def _watch(places: Any, url: str | None, interval_s: float, window_s: float, once: bool) -> int:
    from rich.console import Console
    from rich.live import Live

    from kvloop.cli.doctor.network import open_patient_store
    from kvloop.cli.top.collecting import collect
    from kvloop.cli.top.samples import Sample
    from kvloop.cli.top.view import screen

    console = Console()
    store = open_patient_store(url) if url else None
    kept: deque[Sample] = deque()
    try:
        now = await collect(places, store)
        if once:
            console.print(screen(None, now, datetime.now()))
            return 0
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(screen(kept[0] if kept else None, now, datetime.now()), refresh=True)
                kept.append(now)
                while now.at - kept[0].at > window_s:
                    kept.popleft()
                await asyncio.sleep(interval_s)
                now = await collect(places, store)
    finally:
        if store is not None:
            await store.close()


def _split(values: list[str] | None) -> tuple[str, ...]:
    return tuple(part.strip() for value in values or () for part in value.split(",") if part.strip())
