"""`kvloop bench report`, and what every sweep ends with."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloop.cli.errors import EXIT_FAILED, CommandFailed, say, sentences, write_line


def make_command() -> Any:
    """Return the command."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command("report")(report)
    return typer.main.get_command(single)


@sentences
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Sweeps' results; several are put together.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where it goes. [default: the first folder]")
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="What was measured, for the pictures. [default: from the settings]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Put sweeps together that are not alike.")] = False,
) -> None:
    """Write a sweep's summary and pictures anew, from its records.

    Sweeps of different legs that could not run at once (a P with and without a prefix cache on one GPU)
    are put together by naming them all. They must be alike in engine, model, machine, versions of vLLM, block
    size, suffix, answers and seed.
    """
    from kvloop.bench import records
    from kvloop.bench.likeness import SAME, differences
    from kvloop.bench.report import summarise

    read: list[records.Record] = []
    settings: dict[str, Any] = {}
    complete = True
    unlike: list[str] = []
    for folder in folders:
        try:
            former = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            own = records.read(folder)
        except (OSError, ValueError) as error:
            raise CommandFailed(f"{folder} holds no sweep: {error}") from None
        if "workload" in former["settings"] or (own and not any(record.nominal_tokens for record in own)):
            raise CommandFailed(f"{folder} holds no sweep but a load; its summary.json is left as it is")
        read += own
        # What several sweeps tell differs between the first that tells it and another one.
        unlike += [f"{folder}: {line}" for line in differences(settings, former["settings"], SAME)]
        legs = {**settings.get("legs", {}), **former["settings"].get("legs", {})}
        settings = {**former["settings"], **settings, "legs": legs}
        complete = complete and bool(former["complete"])
    for line in unlike:
        say(f"not alike: {line}")
    if unlike and not force:
        raise CommandFailed("sweeps that are not alike are no legs of one; --force puts them together anyway")
    if unlike:
        settings["unlike"] = unlike
    if title is not None:
        settings["title"] = title
    if write_all(out or folders[0], summarise(read, settings, complete=complete)):
        sys.exit(EXIT_FAILED)


def write_all(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """Write summary and pictures, say where they are and return what legs lack, which is said too.

    Without matplotlib there are no pictures.
    """
    from kvloop.bench import report as reports

    folder.mkdir(parents=True, exist_ok=True)
    reports.write(folder, summary)
    write_line(sys.stdout, reports.markdown(summary).partition("\n## Settings")[0].rstrip())
    try:
        from kvloop.bench import pictures
    except ImportError:
        say("Pictures need matplotlib; install it with: pip install 'kvloop[bench]'")
    else:
        pictures.draw(folder, summary, title_of(summary["settings"]))
    say(f"Results are in {folder}")
    lacking = reports.lacking(summary)
    for sentence in lacking:
        say(sentence)
    return lacking


def title_of(settings: Mapping[str, Any]) -> str:
    """Return what was measured, in a line."""
    if title := settings.get("title"):
        return str(title)
    engine = {"simulated": "simulated engine, no measurement", "": "kvloop"}.get(
        settings.get("engine", ""), f"kvloop, vLLM {settings.get('engine_version', '')}"
    )
    model = Path(settings.get("model", "")).name
    return ", ".join(part for part in (engine, model, settings.get("machine", "")) if part)
