"""The manifest of a checkpoint: the size and SHA-256 of every file, checked before reuse."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from kvloop.engine.settings import MANIFEST

_CHUNK = 8 * 1024 * 1024


def sha256(path: Path, read: Callable[[int], None] = lambda _: None) -> str:
    """Return a file's SHA-256 in hex. read: called with the bytes of each chunk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            read(len(chunk))
    return digest.hexdigest()


def write(folder: Path, source: str) -> None:
    """Write the manifest of all files in a folder. source: SHA-256 of what they were made from."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    text = json.dumps({"source": source, "files": files}, indent=2, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def intact(
    folder: Path, source: str, checked: Callable[[int, int], None] = lambda _done, _total: None
) -> bool:
    """Return whether a folder holds exactly what its manifest says, made from source.

    checked: called with (bytes checked, bytes in all).
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["source"] != source or not manifest["files"]:
            return False
        total = sum(entry["size"] for entry in manifest["files"].values())
        done = 0

        def read(size: int) -> None:
            nonlocal done
            done += size
            checked(done, total)

        return all(
            (folder / name).stat().st_size == entry["size"] and sha256(folder / name, read) == entry["sha256"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
