"""`kvloop bench load`."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloop.cli.bench.workload import STOP_HELP, sessions_of
from kvloop.cli.errors import EXIT_FAILED, CommandFailed, say, sentences, write_line
from kvloop.cli.places import ROUTER

if TYPE_CHECKING:
    from kvloop.bench.load import LoadPlan
    from kvloop.bench.target import Target
    from kvloop.bench.workload.model import Encoder, Session


def make_command() -> Any:
    """Return the command."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("load")(load)
    return typer.main.get_command(single)


@sentences
def load(
    *,
    workload: Annotated[str, typer.Argument(help="multi-turn, agentic, or a JSON file.")] = "multi-turn",
    router: Annotated[str, typer.Option(metavar="HOST:PORT", help="The router.")] = ROUTER,
    url: Annotated[str | None, typer.Option(help="An OpenAI-compatible server instead, without /v1.")] = None,
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "",
    token: Annotated[str | None, typer.Option(envvar="KVLOOP_TOKEN", help="Bearer token.")] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: sessions at once. [default: 1]")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Open loop: sessions per second.")] = None,
    sessions: Annotated[int, typer.Option(min=1, help="How many.")] = 10,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="The first so many requests do not count.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same sessions.")] = 0,
    scale: Annotated[float, typer.Option(min=1e-4, help="Factor of tokens (agentic).")] = 1.0,
    time_scale: Annotated[float, typer.Option(min=0, help="Factor of pauses (agentic).")] = 1.0,
    stop: Annotated[str | None, typer.Option(help=STOP_HELP)] = None,
    reuse: Annotated[bool, typer.Option(help="Whether KV of earlier turns may be reused.")] = True,
    exact: Annotated[bool, typer.Option(help="Answers go on past an end of sequence.")] = True,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Conversations that outgrow it end.")
    ] = None,
    vocabulary: Annotated[int, typer.Option(min=2, help="Size of the model's vocabulary.")] = 32_000,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or name of a tokenizer. [default: an id per word]")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="With --url: send no field that OpenAI does not have.")
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the run in its records.")] = "load",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")] = Path("out/load"),
) -> None:
    """Play conversations against a router or server: closed loop by clients, or open loop by rate.

    Ctrl-C ends it and keeps what was measured.
    """
    from kvloop.bench.load import LoadPlan
    from kvloop.cli import signals

    if clients is not None and rate is not None:
        raise CommandFailed("--clients is for a closed loop, --rate for an open one; give one of them")
    if plain and url is None:
        raise CommandFailed("--plain is for servers of --url; leave it out, or give --url")
    if plain and not reuse:
        raise CommandFailed(
            "--no-reuse is asked for by a header of kvloop's, which --plain leaves out; drop one"
        )
    plan = LoadPlan(
        leg=name,
        clients=None if rate is not None else clients or 1,
        rate=rate,
        warm_up=warm_up,
        max_requests=max_requests,
        # That an answer goes on is a field of vLLM's.
        exact=exact and not plain,
        max_model_len=max_model_len,
        reuse=reuse,
        seed=seed,
    )
    made = sessions_of(workload, sessions, seed, scale=scale, time_scale=time_scale, stop=stop)
    encoder = _encoder(tokenizer, vocabulary)
    settings = {
        "name": name,
        "workload": workload,
        "target": url or router,
        "model": model,
        "sessions": len(made),
        "seed": seed,
        "clients": plan.clients,
        "rate": rate,
        "scale": scale,
        "time_scale": time_scale,
        "stop": stop,
        "warm_up": warm_up,
        "max_requests": max_requests,
        "max_model_len": max_model_len,
        "reuse": reuse,
        "exact": plan.exact,
        "plain": plain,
        "vocabulary": vocabulary,
        "tokenizer": tokenizer,
    }
    where = _Where(url, router, model, token, plain=plain)
    work = _load(plan=plan, sessions=made, where=where, encoder=encoder, settings=settings, out=out)
    signals.run(work)


class _Where:
    """The target as it was named."""

    def __init__(self, url: str | None, router: str, model: str, token: str | None, *, plain: bool) -> None:
        self._url, self._router, self._model, self._token = url, router, model, token
        self._plain = plain

    def open(self, encoder: "Encoder") -> "Target":
        """Return the target."""
        if self._url is None:
            from kvloop.bench.target import RouterTarget

            return RouterTarget(self._router, token=self._token, model=self._model)
        try:
            from kvloop.bench.http_target import HttpTarget
        except ImportError:
            raise CommandFailed("--url needs httpx; install it with: pip install 'kvloop[bench]'") from None
        return HttpTarget(self._url, self._model, encoder, token=self._token, plain=self._plain)


class _TokenizerEncoder:
    """A Hugging Face tokenizer's ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


def _encoder(tokenizer: str | None, vocabulary: int) -> "Encoder":
    from kvloop.bench.workload.words import WordEncoder

    if tokenizer is None:
        return WordEncoder(vocabulary)
    from kvloop.cli.chat.rendering import spare_torch

    spare_torch()
    try:
        import transformers

        return _TokenizerEncoder(transformers.AutoTokenizer.from_pretrained(tokenizer))
    except ImportError:
        raise CommandFailed("--tokenizer needs transformers: pip install 'kvloop[chat]'") from None
    except (OSError, ValueError) as error:
        raise CommandFailed(f"no tokenizer at {tokenizer}: {str(error).splitlines()[0]}") from None


async def _load(
    *,
    plan: "LoadPlan",
    sessions: "list[Session]",
    where: _Where,
    encoder: "Encoder",
    settings: Mapping[str, Any],
    out: Path,
) -> int:
    from kvloop.bench.load import Load
    from kvloop.bench.load_report import summarise_load
    from kvloop.bench.records import REQUESTS, Record, RecordFile
    from kvloop.cli.bench.environment import machine, now, versions
    from kvloop.cli.bench.progress import Bar

    # What is measured may run elsewhere: a router does not tell on what.
    client = {"machine": machine(), "versions": versions()}
    settings = {"date": now(), "client": client, **settings}
    requests = sum(session.requests for session in sessions)
    total = min(requests, plan.max_requests or requests)
    target = where.open(encoder)
    complete = False
    with RecordFile(out / REQUESTS) as file:
        bar = Bar(total)

        def told(record: Record) -> None:
            file.add(record)
            bar.tell(record)

        load = Load(plan, target, encoder, told)
        try:
            with bar:
                await load.play(sessions)
            complete = True
        finally:
            # A signal comes as a cancellation: what was measured is kept.
            summary = summarise_load(
                file.records, settings, complete=complete, planned=requests, outgrown=load.outgrown
            )
            _tell(out, summary)
            await target.close()
    failed = sum(1 for record in file.records if record.error)
    return EXIT_FAILED if failed or not file.records else 0


def _tell(out: Path, summary: Mapping[str, Any]) -> None:
    from kvloop.bench.load_report import caveats

    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if summary["failures"]["count"]:
        say(f"{summary['failures']['count']} requests failed; the first: {summary['failures']['first']}")
    for caveat in caveats(summary):
        say(caveat)
    for metric, found in summary.get("distribution", {}).items():
        shares = "  ".join(f"{share} {found[share]:,.1f}" for share in ("mean", "p50", "p90", "p99"))
        write_line(sys.stdout, f"{metric:<18} {shares}")
    if "verdicts" in summary:
        write_line(sys.stdout, f"verdicts           {summary['verdicts']}")
        write_line(
            sys.stdout,
            f"{summary['measured']} requests in {summary['span_s']:.1f} s,"
            f" {summary['output_tokens_per_s']:,.0f} tokens/s",
        )
    say(f"Results are in {out}")
