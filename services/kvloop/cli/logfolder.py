"""Where a command's parts write their logs, and when these stay."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvloop.cli.errors import CommandFailed
from kvloop.cli.supervisor.part import PartFailed


@asynccontextmanager
async def log_folder(given: Path | None, command: str, *failures: type[Exception]) -> AsyncIterator[Path]:
    """Yield the folder that was asked for, or a temporary one that goes with the end of the context.

    A failure of a part, or one of `failures`, lets it stay; it becomes a CommandFailed that says where it is.
    """
    folder = given or Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=f"kvloop-{command}-"))
    keep = given is not None
    try:
        yield folder
    except Exception as failure:
        if not isinstance(failure, (PartFailed, *failures)):
            raise
        keep = True
        raise CommandFailed(f"{failure}\nEverything was stopped; all logs are in {folder}") from None
    finally:
        if not keep:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
