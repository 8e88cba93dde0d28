"""`kvloop explain`: why a turn went the way it went."""

import asyncio
import json
from typing import Annotated, Any

import typer

from kvloop.cli.errors import sentences
from kvloop.cli.places import ROUTER


@sentences
def explain(
    request_id: Annotated[str, typer.Argument(help="request_id of the turn's summary.")],
    router: Annotated[
        str, typer.Option(envvar="KVLOOP_ROUTER", help="host:port of the router that served it.")
    ] = ROUTER,
    token: Annotated[
        str | None, typer.Option(envvar="KVLOOP_TOKEN", help="The tenant's token.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """Show the numbers behind a recent turn: what was found, expected and spent."""
    told = asyncio.run(_ask(router, token, request_id))
    if as_json:
        typer.echo(json.dumps(told, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows(told):
        table.add_row(name, value)
    Console().print(table)


async def _ask(router: str, token: str | None, request_id: str) -> dict[str, Any]:
    from kvloop.cli.client import dial, spoken
    from kvloop.client import ONCE

    async with dial(router, token, ONCE) as client:
        with spoken():
            told = await client.explain(request_id)
    return plain(told)


def plain(told: Any) -> dict[str, Any]:
    """Return an ExplainTurnResponse as plain values, by the fields' own names."""
    from google.protobuf.json_format import MessageToDict

    fields: dict[str, Any] = MessageToDict(
        told, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


def rows(told: dict[str, Any]) -> list[tuple[str, str]]:
    """Return names and values for a table, from the answer as plain values."""
    reuse, costs = told.get("reuse", {}), told.get("costs")
    tokens = reuse.get("tokens", {})
    found = [
        ("outcome", f"{told['outcome']}, attempts {told['attempts']}{_migrated(told)}"),
        ("decided", _why(told["decided_verdict"], told["decided_reason"])),
        ("came of it", _why(reuse.get("verdict", ""), reuse.get("reason", ""))),
        ("tokens", ", ".join(f"{name} {number}" for name, number in tokens.items()) or "-"),
        (
            "prompt and lease",
            f"{told['prompt_tokens']} and {told['lease_tokens']} tokens, sharing at least "
            f"{told['matched_tokens']} and fewer than {told['below_tokens']}",
        ),
        ("threshold", f"{told['threshold_tokens']} tokens"),
    ]
    if told["direct_max_suffix"]:
        found.append(
            (
                "DIRECT limits",
                f"suffix {told['direct_max_suffix']}, in flight {told['direct_tokens_in_flight']} "
                f"of {told['direct_budget_tokens']} tokens{', refused' if told['direct_refused'] else ''}",
            )
        )
    if costs:
        ways = ", ".join(f"{way} {costs[f'{way}_ms']:.1f}" for way in ("direct", "readback", "recompute"))
        say = "decided" if told["by_cost"] else "had no say"
        found.append(("expected ms", f"{ways} ({say})"))
        waits = f"{costs['prefill_wait_ms']:.1f} at P, {costs['decode_wait_ms']:.1f} at D"
        found.append(("of these waiting", waits))
        found.extend(
            (name.replace("_", " "), " ".join(f"{term:.4g}" for term in costs[name]))
            for name in ("prefill_terms", "decode_terms", "transfer_terms")
        )
        found.append(
            (
                "per token of KV",
                f"{costs['bytes_per_token']:.0f} bytes, {costs['descriptors_per_token']:.4f} descriptors",
            )
        )
        found.append(("first step", f"{costs['first_step_ms']:.1f} ms"))
    spent = sorted(told.get("timings_ms", {}).items())
    found.append(("spent ms", ", ".join(f"{name} {ms:.1f}" for name, ms in spent)))
    found.append(("workers", f"{told['prefill_worker'] or '-'}, {told['decode_worker'] or '-'}"))
    return found


def _migrated(told: dict[str, Any]) -> str:
    times = told.get("migrations", 0)
    return f", taken up by another decode worker {times} times" if times else ""


def _why(verdict: str, reason: str) -> str:
    verdict, reason = verdict.removeprefix("VERDICT_"), reason.removeprefix("REUSE_REASON_")
    return f"{verdict} ({reason})" if verdict else "-"
