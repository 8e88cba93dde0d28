"""Peers, pinned by version and hash, into the user's cache: never into the repository.

pip fetches them, so an index, proxy or certificate that the user has configured holds here too. What is there
already needs no network.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvloop.engine.settings import cache_home

FETCH_S = 420.0
"""A slow index must not take a benchmark's time; what was cut short is fetched anew next time."""
# pip prepares a source archive's metadata before it hands it out, and vLLM's needs these.
_BUILD_TOOLS = ("setuptools==80.10.2", "setuptools-scm==10.3.4", "setuptools-rust==1.13.0", "packaging==26.4")
_ERROR_CHARS = 400


class FetchFailed(Exception):
    """A peer can't be had; the text says why."""


@dataclass(frozen=True, slots=True)
class Release:
    """One file of a package, and what is kept of it."""

    package: str
    version: str
    file_name: str
    sha256: str
    members: tuple[str, ...] = ()
    """Members of a source archive that are kept, below its top folder; a wheel is kept whole."""

    @property
    def from_source(self) -> bool:
        """Tell whether it is a source archive."""
        return self.file_name.endswith(".tar.gz")


PROXY = "examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py"
TOY_PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
VLLM_PROXIES = Release(
    "vllm",
    "0.32.0",
    "vllm-0.32.0.tar.gz",
    "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    (PROXY, TOY_PROXY),
)
VLLM_ROUTER = Release(
    "vllm-router",
    "0.1.17",
    "vllm_router-0.1.17-cp38-abi3-manylinux_2_28_x86_64.whl",
    "85c96bea4d573a49b5a8ae4c72ee3dfe733aba26b6f1ff1256e6142f1f42694d",
)


def get(
    release: Release, cache: Path | None = None, *, offline: bool = False, limit_s: float = FETCH_S
) -> Path:
    """Return the folder of a release, fetched unless it is there. Raises FetchFailed.

    cache: where peers are kept; None is a folder in the user's cache.
    """
    name = f"{release.package}-{release.version}-{release.sha256[:12]}"
    folder = (cache or cache_home() / "peers") / name
    if folder.is_dir():
        return folder
    if offline:
        raise FetchFailed(
            f"{release.package} {release.version} is not in {folder.parent}, and --offline was given"
        )
    until = time.monotonic() + limit_s
    with _beside(folder) as built:
        archive = _download(release, built, until)
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != release.sha256:
            raise FetchFailed(
                f"{release.file_name} has SHA-256 {found}, not {release.sha256}; check pip's index"
            )
        kept = built / "kept"
        unpack(release, archive, kept)
        return _settle(kept, folder)


def unpack(release: Release, archive: Path, folder: Path) -> None:
    """Unpack what is kept: members of a source archive by their names alone, a wheel as it is.

    Raises FetchFailed when a member is missing.
    """
    folder.mkdir()
    if not release.from_source:
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
        return
    top = release.file_name.removesuffix(".tar.gz")
    wanted = {f"{top}/{member}" for member in release.members}
    with tarfile.open(archive) as source:
        for member in source:
            if member.isfile() and member.name in wanted:
                wanted.remove(member.name)
                member.name = Path(member.name).name
                source.extract(member, folder, filter="data")
    if wanted:
        raise FetchFailed(f"{release.file_name} has no {min(wanted)}")


def _download(release: Release, folder: Path, until: float) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    requirement = f"{release.package}=={release.version}"
    download = [*pip, "download", "--no-deps", "--dest", str(folder)]
    if release.from_source:
        tools = folder / "tools"
        _run([*pip, "install", "--target", str(tools), *_BUILD_TOOLS], until)
        environment = {
            "PYTHONPATH": str(tools),
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": release.version,
        }
        kind = ["--no-build-isolation", "--no-binary", release.package]
        _run([*download, *kind, requirement], until, environment)
    else:
        _run([*download, "--only-binary=:all:", requirement], until)
    archive = folder / release.file_name
    if not archive.is_file():
        raise FetchFailed(f"{requirement}: pip gave no {release.file_name}, which is for Linux on x86-64")
    return archive


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """Give a temporary folder on the destination's file system."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".fetching-", dir=folder.parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _settle(built: Path, folder: Path) -> Path:
    """Move what was unpacked to its place in one step; another fetch may have been faster."""
    try:
        built.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    return folder


def _run(command: list[str], until: float, environment: dict[str, str] | None = None) -> None:
    what = " ".join(command[1:3])
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=max(1.0, until - time.monotonic()),
        )
    except subprocess.TimeoutExpired:
        raise FetchFailed(f"{what} took too long; try again, the network or pip's index is slow") from None
    if done.returncode:
        # pip's last line says what it means; those before may repeat where it looked.
        complaint = (done.stderr or done.stdout).strip()[-_ERROR_CHARS:]
        raise FetchFailed(f"{what} failed: {complaint or f'exit code {done.returncode}'}")
