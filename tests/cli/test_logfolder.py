"""Logs stay where somebody will want to read them, and only there."""

from pathlib import Path

import pytest

from kvloop.bench.target import TargetFailed
from kvloop.cli.errors import CommandFailed
from kvloop.cli.logfolder import log_folder
from kvloop.cli.supervisor.part import PartFailed


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    return tmp_path / "t"


def left_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_a_temporary_folder_goes_with_the_end(temporary: Path) -> None:
    async with log_folder(None, "demo") as folder:
        assert folder.parent == temporary
        assert folder.name.startswith("kvloop-demo-")
        (folder / "store.log").touch()
    assert not folder.exists()


@pytest.mark.parametrize("failure", [PartFailed("decode-0", "ended", []), TargetFailed("no answer")])
async def test_a_failure_leaves_it_and_says_where(temporary: Path, failure: Exception) -> None:
    with pytest.raises(CommandFailed) as raised:
        async with log_folder(None, "demo", TargetFailed):
            raise failure
    (folder,) = left_in(temporary)
    assert str(raised.value) == f"{failure}\nEverything was stopped; all logs are in {folder}"


async def test_what_is_no_failure_of_parts_leaves_nothing(temporary: Path) -> None:
    with pytest.raises(CommandFailed, match=r"^too long$"):
        async with log_folder(None, "sweep"):
            raise CommandFailed("too long")
    assert not left_in(temporary)


async def test_a_folder_that_was_asked_for_stays(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="anything"):
        async with log_folder(tmp_path, "up"):
            raise ValueError("anything")
    assert tmp_path in left_in(tmp_path.parent)
