"""Tenants from bearer tokens, and the file that holds their hashes."""

import hashlib
from pathlib import Path

import pytest

from kvloop.router.auth import Authenticator, hash_token, parse_tokens
from kvloop.runtime.config import ConfigError
from kvloop.runtime.errors import Failure


class ManualClock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


def test_without_tokens_everybody_is_the_default_tenant() -> None:
    assert Authenticator(None, ManualClock()).tenant(bearer("anything")) == "default"


def test_tokens_lead_to_tenants(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# ours\n{hash_token('one')} acme\n\n{hash_token('two').upper()}  beta # spare\n")
    auth = Authenticator(file, ManualClock())
    assert auth.tenant(bearer("one")) == "acme"
    assert auth.tenant(bearer("two")) == "beta"
    assert auth.tenant([("authorization", "bearer one")]) == "acme"
    assert hash_token("one") == hashlib.sha256(b"one").hexdigest()


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "")],
        [("authorization", "one")],
        [("authorization", "Basic one")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer three")],
        [("authorization", b"Bearer one")],
        [("authorization-bin", b"Bearer one")],
        [("authorization", f"Bearer {hash_token('one')}")],
        [("authorization", "Bearer three"), ("authorization", "Bearer one")],
    ],
)
def test_others_are_refused_without_echo(metadata: list[tuple[str, str | bytes]], tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{hash_token('one')} acme\n")
    with pytest.raises(Failure) as failure:
        Authenticator(file, ManualClock()).tenant(metadata)
    assert failure.value.reason_name == "UNAUTHENTICATED"
    assert "three" not in failure.value.message


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    clock, file = ManualClock(), tmp_path / "tokens"
    file.write_text(f"{hash_token('old')} acme\n")
    auth = Authenticator(file, clock)
    replacement = tmp_path / "new"
    replacement.write_text(f"{hash_token('new')} acme\n")
    replacement.replace(file)
    clock.now += 2
    assert auth.tenant(bearer("new")) == "acme"
    with pytest.raises(Failure):
        auth.tenant(bearer("old"))


@pytest.mark.parametrize("broken", ["nonsense", "", None])
def test_a_broken_file_leaves_the_former_tokens_unless_it_is_empty(
    broken: str | None, tmp_path: Path
) -> None:
    clock, file = ManualClock(), tmp_path / "tokens"
    file.write_text(f"{hash_token('one')} acme\n")
    auth = Authenticator(file, clock)
    if broken is None:
        file.unlink()
    else:
        file.write_text(broken)
    clock.now += 2
    if broken == "":
        with pytest.raises(Failure):
            auth.tenant(bearer("one"))
    else:
        assert auth.tenant(bearer("one")) == "acme"
    file.write_text(f"{hash_token('two')} beta\n# a longer file now\n")
    clock.now += 2
    assert auth.tenant(bearer("two")) == "beta"


@pytest.mark.parametrize(
    "text",
    [
        "acme secret",
        f"{'0' * 63} acme",
        f"{'0' * 64}",
        f"{'0' * 64} acme beta",
        f"{'0' * 64} {'x' * 200}",
        f"{'0' * 64} acme\n{'0' * 64} beta",
    ],
)
def test_lines_that_make_no_sense_are_named_by_number_alone(text: str) -> None:
    with pytest.raises(ConfigError, match=r"line [12]") as error:
        parse_tokens(text)
    assert "secret" not in str(error.value)


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokens_file"):
        Authenticator(tmp_path / "nowhere", ManualClock())
