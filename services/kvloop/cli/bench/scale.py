"""`kvloop bench scale`: how the cost of a turn grows with workers, conversations and routers."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloop.cli.errors import EXIT_FAILED, CommandFailed, say, sentences, write_line

if TYPE_CHECKING:
    from kvloop.bench.scale import Effort, Filled, Meters, Shape
    from kvloop.cli.supervisor.fleet import Fleet
    from kvloop.cli.supervisor.part import Part
    from kvloop.metastore.embedded import EmbeddedStore
    from kvloop.metastore.factory import Store

_VOCABULARY = 32_000
_KNOWN_S = 90.0
"""How long routers may take to meet all workers."""
_STORE_BYTES = 1 << 30
_LOST = 0.01
"""Share of lost turns beyond which nothing was measured."""
_VERDICT, _ASTRAY = "readback", 0.01
"""What every turn is meant to be, and the share of others beyond which a point is worth nothing."""
# A busy machine must not decide what is measured.
_PATIENT = {"directory_timeout_ms": 2000.0, "info_timeout_s": 30.0}
# Every turn that can goes the longest way: both legs, and a read in between.
_FOUND = {"discover": True, "metrics_listen": "127.0.0.1:0", "direct": False, "by_cost": False}


def make_command() -> Any:
    """Return the command."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("scale")(scale)
    return typer.main.get_command(single)


@sentences
def scale(
    *,
    workers: Annotated[str, typer.Option(help="How many, half of each kind; ascending.")] = "2,10,100,1000",
    conversations: Annotated[
        str, typer.Option(help="How many have a lease in the store; ascending.")
    ] = "100,1000,10000,100000",
    routers: Annotated[str, typer.Option(help="How many share the turns; ascending.")] = "1,2,4",
    turns: Annotated[int, typer.Option(min=20, help="Turns per point.")] = 1200,
    talks: Annotated[int, typer.Option(min=2, help="Conversations that are played.")] = 128,
    idle_s: Annotated[float, typer.Option(min=0.2, help="Seconds without turns per point.")] = 4.0,
    preset: Annotated[str, typer.Option(help="Cost model of the simulated engines.")] = "paced",
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the record goes.")] = Path(
        "out/scale.json"
    ),
) -> None:
    """Measure real routers and a real store with many simulated workers, in less than ten minutes.

    One axis at a time: conversations with the fewest workers, workers with all conversations and one router,
    routers with the last but one number of workers. Writes the record after each point, and at the end its
    tables and a picture; Ctrl-C or a point that fails leave what was measured.
    """
    from kvloop.bench.scale import Effort
    from kvloop.cli import signals

    axes = Axes(_ascending("workers", workers), _ascending("conversations", conversations), ())
    axes = replace(axes, routers=_ascending("routers", routers))
    if axes.workers[0] < 2:
        raise CommandFailed("--workers begins with 2 at least: one of each kind")
    signals.run(_scale(axes, Effort(turns=turns, talks=talks, idle_s=idle_s), preset, out))


@dataclass(frozen=True, slots=True)
class Axes:
    """What is varied."""

    workers: tuple[int, ...]
    conversations: tuple[int, ...]
    routers: tuple[int, ...]


def _ascending(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1 or list(numbers) != sorted(set(numbers)):
        raise CommandFailed(f"--{option} takes ascending whole numbers with commas between, not {text!r}")
    return numbers


async def _scale(axes: Axes, effort: "Effort", preset: str, out: Path) -> int:
    from kvloop.bench.records import keep_record
    from kvloop.bench.scale import AXES
    from kvloop.bench.scale_need import million
    from kvloop.cli.bench import environment
    from kvloop.cli.supervisor.part import PartFailed

    begun, busy = time.monotonic(), os.getloadavg()[0]
    record: dict[str, Any] = {
        "complete": False,
        "when": environment.now(),
        "machine": environment.machine(),
        "versions": environment.versions(),
        "preset": preset,
        "points": {axis: [] for axis in AXES},
        "shapes": {},
        "effort": {name: getattr(effort, name) for name in ("turns", "talks", "at_once", "idle_s")},
    }

    def keep() -> None:
        # Of the whole machine, before and after.
        record["load_average"] = [round(busy, 1), round(os.getloadavg()[0], 1)]
        record["wall_s"] = round(time.monotonic() - begun)
        keep_record(out, record)

    try:
        with tempfile.TemporaryDirectory(prefix="kvloop-scale-") as folder:
            await measure(axes, _open(effort, preset, Path(folder)), record, keep)
    except PartFailed as failed:
        say(str(failed))
        return EXIT_FAILED
    record |= {"million_conversations": million(record), "complete": True}
    keep()
    await asyncio.to_thread(_write, out, record)
    for complaint in (complaints := complaints_of(record)):
        say(complaint)
    return EXIT_FAILED if complaints else 0


def complaints_of(record: Mapping[str, Any]) -> list[str]:
    """Return which points had turns that went another way than they were meant to, for people."""
    from kvloop.bench.peers import astray

    points = [point for points in record["points"].values() for point in points]
    complaints = []
    for point in (*points, *record["shapes"].values(), record["all"]):
        verdicts = {verdict: count for verdict, count in point["verdicts"].items() if count}
        if verdicts.get(_VERDICT, 0) < (1 - _ASTRAY) * sum(verdicts.values()):
            shape = point["shape"]
            complaints.append(
                f"{point['workers']:,} workers, {point['conversations']:,} conversations, {point['routers']}"
                f" routers, {shape['prompt_tokens']:,} tokens, {shape['output_tokens']} to answer:"
                f" {astray(verdicts, _VERDICT)}"
            )
    # A point may stand on several axes.
    return list(dict.fromkeys(complaints))


def _write(out: Path, record: dict[str, Any]) -> None:
    from kvloop.bench.scale_report import markdown, table

    out.with_suffix(".md").write_text(markdown(record), encoding="utf-8")
    write_line(sys.stdout, table(record))
    picture = out.with_suffix(".png")
    try:
        from kvloop.bench import scale_picture
    except ImportError:
        say("The picture needs matplotlib; install it with: pip install 'kvloop[bench]'")
    else:
        scale_picture.draw(picture, record)
        say(f"The picture is {picture}")
    say(f"The record is {out}")


async def measure(
    axes: Axes,
    opening: "AbstractAsyncContextManager[Bench]",
    record: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """Measure along all axes, into a record. keep is called after each point."""
    from kvloop.bench.scale import Shape, growth, slopes

    points, shapes = record["points"], record["shapes"]
    async with opening as bench:

        async def add(axis: str, routers: int) -> None:
            points[axis].append(await bench.point(routers))
            record["growth"] = {name: growth(found, name) for name, found in points.items()}
            keep()

        await bench.workers_up_to(axes.workers[0])
        for count in axes.conversations:
            await bench.conversations_up_to(count)
            await add("conversations", 1)
        points["workers"].append(points["conversations"][-1])
        shapes["base"] = points["conversations"][-1]
        # As many conversations and turns at once as in the base: just the shape is to differ.
        fewer = replace(bench.effort, turns=bench.effort.turns // 4)
        for name, shape in {
            "longer": Shape(prompt_tokens=24_000),
            "wordier": Shape(output_tokens=64),
        }.items():
            shapes[name] = await bench.point(1, shape, effort=fewer)
            keep()
        record["router_cpu"] = slopes(**shapes)
        at_routers = axes.workers[-2:][0]
        for count in axes.workers:
            if count != axes.workers[0]:
                await bench.workers_up_to(count)
                await add("workers", 1)
            if count == at_routers:
                for routers in axes.routers:
                    if routers == 1:
                        points["routers"].append(points["workers"][-1])
                    else:
                        await add("routers", routers)
        record["all"] = points["workers"][-1]
        if axes.routers[-1] > 1:
            record["all"] = (
                points["routers"][-1] if len(axes.workers) == 1 else await bench.point(axes.routers[-1])
            )
        record["growth"] = {name: growth(found, name) for name, found in points.items()}


@asynccontextmanager
async def _open(effort: "Effort", preset: str, folder: Path) -> AsyncIterator["Bench"]:
    """Start the store."""
    from kvloop.bench.scale import Filled, Meters
    from kvloop.metastore.embedded import EmbeddedStore
    from kvloop.metastore.factory import StoreOptions, open_store

    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedStore(maxmemory_bytes=_STORE_BYTES))
        store = open_store(server.url, options=StoreOptions(deadline_s=10.0, connect_s=10.0))
        stack.push_async_callback(store.close)
        meters = Meters(server.url, server.pid)
        stack.push_async_callback(meters.close)
        bench = Bench(effort, preset, folder, server, store, meters, Filled(), [])
        stack.push_async_callback(bench.stop)
        yield bench


@dataclass
class Bench:
    """What stands: the store and the workers. Routers are new for each point."""

    effort: "Effort"
    preset: str
    folder: Path
    server: "EmbeddedStore"
    store: "Store"
    meters: "Meters"
    filled: "Filled"
    parts: "list[Part]"
    workers: int = 0
    routers_made: int = 0

    async def stop(self) -> None:
        """End the workers."""
        await asyncio.gather(*(part.stop(1.0) for part in self.parts))

    async def workers_up_to(self, count: int) -> None:
        """Start workers, in one more process."""
        from kvloop.bench import scale_workers
        from kvloop.cli.supervisor.part import Command, Part
        from kvloop.cli.supervisor.plan import part_environment

        more = count - self.workers
        if more <= 0:
            return
        say(f"{count:,} workers")
        part = Part(f"workers-{len(self.parts)}", self.folder)
        self.parts.append(part)
        arguments = [sys.executable, "-m", scale_workers.__name__, str(part.ready_path)]
        arguments += [str(more // 2), str(more - more // 2), self.preset]
        await part.spawn(Command(arguments, part_environment({scale_workers.STORE_URL: self.server.url}, ())))
        await part.wait_ready(180)
        self.workers = count

    async def conversations_up_to(self, count: int) -> None:
        """Put leases into the store."""
        from kvloop.bench.scale import fill

        say(f"{count:,} conversations")
        await fill(self.store, self.meters, self.filled, count)

    async def point(
        self, routers: int, shape: "Shape | None" = None, effort: "Effort | None" = None
    ) -> dict[str, Any]:
        """Measure with so many routers, fresh ones."""
        from kvloop.bench.scale import Shape
        from kvloop.cli.supervisor.fleet import Fleet, FleetPlan

        say(f"  {routers} routers, {self.workers:,} workers, {len(self.filled.scopes):,} conversations")
        plan = FleetPlan(
            prefill=(), decode=(), routers=[_PATIENT | _FOUND] * routers, store_url=self.server.url
        )
        self.routers_made += 1
        async with Fleet(plan, self.folder / f"point-{self.routers_made}") as fleet:
            return await self._point(fleet, shape or Shape(), effort or self.effort)

    async def _point(self, fleet: "Fleet", shape: "Shape", effort: "Effort") -> dict[str, Any]:
        from kvloop.bench import scale as measure
        from kvloop.bench.router_traffic import ThroughRouter, talk

        names = fleet.names("router")
        pids = [pid for name in names if (pid := fleet.parts[name].pid) is not None]
        metrics = [str(fleet.parts[name].facts["metrics"]) for name in names]
        begun = time.monotonic()
        await _until_known(metrics, self.workers)
        known_s = time.monotonic() - begun
        self.meters.router_pids = pids
        talks = [talk(shape.prompt_tokens, shape.output_tokens, _VOCABULARY) for _ in range(effort.talks)]
        async with AsyncExitStack() as stack:
            ways = [ThroughRouter(endpoint) for endpoint in fleet.endpoints("router")]
            for way in ways:
                stack.push_async_callback(way.close)
            players = measure.Players(ways, effort.at_once)
            await players.play(talks, 2 * len(talks))
            quiet = await measure.idle(self.meters, effort.idle_s)
            players = measure.Players(ways, effort.at_once)
            before, series = await self.meters.read(), await _series(metrics)
            played = await players.play(talks, effort.turns, time.monotonic() + effort.limit_s)
            busy = (await self.meters.read()).since(before)
            after = await _series(metrics)
        if players.lost > _LOST * played:
            raise CommandFailed(f"{players.lost} of {played} turns were lost: too few workers, or too busy")
        return {
            "workers": self.workers,
            "conversations": len(self.filled.scopes),
            "routers": len(names),
            "shape": shape.as_dict(),
            "turns": played,
            "lost": players.lost,
            "chunks_per_turn": round(players.chunks / played, 2),
            "turns_per_s": round(played / busy.at, 1),
            "turn": measure.per_turn(busy, quiet, played),
            "idle": measure.per_second(quiet, len(names)),
            **_told(series, after),
            "first_chunk_ms": measure.shares(players.firsts_ms),
            "lookup_us": await measure.lookups(self.store, self.filled.scopes, effort.lookups),
            "registry": await measure.registry_reading(self.store),
            "bytes_per_conversation": round(self.filled.bytes_each),
            "store_used_mb": round(await self.meters.used_memory() / 1e6, 1),
            "router_rss_mb": round(max(map(measure.rss, pids)) / 1e6, 1),
            "known_after_s": round(known_s, 1),
        }


async def _series(metrics: Sequence[str]) -> Any:
    from kvloop.cli.top import samples
    from kvloop.cli.top.collecting import parse, scrape

    texts = await asyncio.gather(*map(scrape, metrics))
    if None in texts:
        raise CommandFailed("a router did not tell its metrics")
    return samples.summed(sample for text in texts if text is not None for sample in parse(text))


async def _known(metrics: Sequence[str]) -> float:
    from kvloop.cli.top.samples import total

    return total(await _series(metrics), "kvloop_router_workers", state="ready")


async def _until_known(metrics: Sequence[str], workers: int) -> None:
    try:
        async with asyncio.timeout(_KNOWN_S):
            while await _known(metrics) < workers * len(metrics):  # noqa: ASYNC110 - only asking tells
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise CommandFailed(f"routers did not meet {workers:,} workers in {_KNOWN_S:.0f} s") from None


def _told(before: Any, after: Any) -> dict[str, Any]:
    """Return what routers say of the turns in between: time per step, and how turns came by their KV."""
    from kvloop.cli.top.samples import grown, quantile, total

    grew, steps = grown(before, after), {}
    histogram = "kvloop_turn_step_seconds"
    for step in ("admit", "lookup", "verdict", "place"):
        count = total(grew, f"{histogram}_count", step=step)
        if count:
            steps[step] = round(1000 * total(grew, f"{histogram}_sum", step=step) / count, 4)
    late = quantile(0.99, grew, histogram, step="lookup")
    verdicts = ("direct", "readback", "recompute")
    return {
        "steps_ms": steps,
        "lookup_p99_ms": None if late is None else round(1000 * late, 3),
        "verdicts": {v: int(total(grew, "kvloop_turns_total", verdict=v)) for v in verdicts},
    }
