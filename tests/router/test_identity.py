"""What turns are known by: distinct for whatever differs, the same on every router of a fleet."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kvloop.router.identity import Identities, Owner, load_secret
from kvloop.router.settings import RouterSettings
from kvloop.runtime.config import ConfigError

SECRET = b"s" * 32
OWNER = Owner("tenant", "model", "revision", "adapter", "salt")


def settings(**changes: Any) -> RouterSettings:
    return RouterSettings(prefill_endpoints=("p:1",), decode_endpoints=("d:1",), **changes)


def test_every_field_separates_scopes_and_digest_keys() -> None:
    ids = Identities(SECRET)
    owners = [OWNER] + [
        replace(OWNER, **{name: "other"}) for name in ("tenant", "model", "revision", "adapter", "salt")
    ]
    assert len({ids.scope(owner, "c") for owner in owners}) == len(owners)
    assert len({ids.digest_key(owner) for owner in owners}) == len(owners)
    assert ids.scope(OWNER, "c") != ids.scope(OWNER, "d")


def test_fields_are_not_merely_joined() -> None:
    ids = Identities(SECRET)
    shifted = [
        Owner("ab", "c", "", "", ""),
        Owner("a", "bc", "", "", ""),
        Owner("", "abc", "", "", ""),
        Owner("abc", "", "", "", ""),
        Owner("a", "b", "c", "", ""),
    ]
    for one, other in combinations(shifted, 2):
        assert ids.scope(one, "x") != ids.scope(other, "x")
    assert ids.scope(Owner("t", "m", "r", "a", "sx"), "y") != ids.scope(Owner("t", "m", "r", "a", "s"), "xy")


def test_cache_salts_depend_on_tenant_and_salt_alone() -> None:
    ids = Identities(SECRET)
    assert ids.cache_salt(OWNER) == ids.cache_salt(replace(OWNER, model="x", revision="y", adapter="z"))
    assert ids.cache_salt(OWNER) != ids.cache_salt(replace(OWNER, tenant="x"))
    assert ids.cache_salt(OWNER) != ids.cache_salt(replace(OWNER, salt="x"))


def test_labels_separate_what_the_same_fields_give() -> None:
    ids = Identities(SECRET)
    owner = Owner("t", "", "", "", "")
    digests = {ids.digest_key(owner).hex()[:32], ids.cache_salt(owner), ids.scope(owner, "").hex()[:32]}
    assert len(digests) == 3


def test_the_secret_decides() -> None:
    assert Identities(SECRET).scope(OWNER, "c") == Identities(SECRET).scope(OWNER, "c")
    assert Identities(SECRET).scope(OWNER, "c") != Identities(b"t" * 32).scope(OWNER, "c")


def test_a_turn_without_conversation_has_no_scope() -> None:
    scope = Identities(SECRET).turn_scope(OWNER, "")
    assert not scope.scope
    assert scope.digest_key
    assert scope.cache_salt


def test_the_secret_comes_from_setting_or_file_or_is_made(tmp_path: Path) -> None:
    assert load_secret(settings(fleet_secret="0123456789abcdef")) == b"0123456789abcdef"
    file = tmp_path / "secret"
    file.write_text("fedcba9876543210\n")
    assert load_secret(settings(fleet_secret_file=file)) == b"fedcba9876543210"
    assert load_secret(settings()) != load_secret(settings())


@pytest.mark.parametrize("kind", ["short", "missing"])
def test_bad_secrets_are_refused_without_being_told(kind: str, tmp_path: Path) -> None:
    given = (
        settings(fleet_secret="hunter2")
        if kind == "short"
        else settings(fleet_secret_file=tmp_path / "nowhere")
    )
    with pytest.raises(ConfigError) as error:
        load_secret(given)
    assert "hunter2" not in str(error.value) + repr(given)
