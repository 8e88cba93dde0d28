"""Peers are fetched once, pinned by version and hash."""

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvloop.bench import peers_fetch
from kvloop.bench.peers_fetch import FetchFailed, Release


def sdist(folder: Path) -> Release:
    archive = folder / "thing-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        for name in ("thing-1.0/a/one.py", "thing-1.0/two.py", "thing-1.0/three.py"):
            entry = tarfile.TarInfo(name)
            entry.size = len(name)
            made.addfile(entry, io.BytesIO(name.encode()))
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    return Release("thing", "1.0", archive.name, found, ("a/one.py", "two.py"))


def test_what_is_wanted_of_an_archive_is_unpacked(tmp_path: Path) -> None:
    release = sdist(tmp_path)
    peers_fetch.unpack(release, tmp_path / release.file_name, tmp_path / "kept")
    assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == ["one.py", "two.py"]
    lacking = Release("thing", "1.0", release.file_name, release.sha256, ("four.py",))
    with pytest.raises(FetchFailed, match=r"has no thing-1\.0/four\.py"):
        peers_fetch.unpack(lacking, tmp_path / release.file_name, tmp_path / "other")


def test_a_release_is_fetched_once_and_only_with_the_right_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as wheel:
        wheel.writestr("thing/__init__.py", "")
    asked: list[str] = []

    def download(release: Release, folder: Path, until: float) -> Path:
        asked.append(release.version)
        return made

    monkeypatch.setattr(peers_fetch, "_download", download)
    cache = tmp_path / "cache"
    wrong = Release("thing", "1.0", made.name, "0" * 64)
    with pytest.raises(FetchFailed, match="has SHA-256"):
        peers_fetch.get(wrong, cache)
    assert list(cache.iterdir()) == []
    right = Release("thing", "1.0", made.name, hashlib.sha256(made.read_bytes()).hexdigest())
    with pytest.raises(FetchFailed, match="--offline"):
        peers_fetch.get(right, cache, offline=True)
    for _ in range(2):
        assert (peers_fetch.get(right, cache) / "thing" / "__init__.py").is_file()
    assert asked == ["1.0", "1.0"]
