"""The guard alone: seals against prompts that differ in one place."""

import hashlib
from typing import Any

import pytest

from kvloop.connector.guard import SEAL, RefusedError, Rules, Text, examine, scope_digest, seal, seed_digest

RULES = Rules(block_size=4, hash_unit=4, seed_digest=seed_digest(b"seed"))
TOKENS = list(range(10, 30))
SCOPE = scope_digest("salt", "adapter")


def hashes(tokens: list[int]) -> list[bytes]:
    chain, found = b"seed", []
    for start in range(0, len(tokens) - 3, 4):
        chain = hashlib.sha256(chain + bytes(tokens[start : start + 4])).digest()
        found.append(chain)
    return found


def handle(num_tokens: int, tokens: list[int] = TOKENS, rules: Rules = RULES) -> dict[str, Any]:
    return {
        "do_remote_decode": True,
        "remote_engine_id": "e",
        "remote_request_id": "l#r",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_block_ids": [list(range(1, 1 + -(-num_tokens // 4)))],
        "remote_blocks_expiry_time": 5.0,
        "transfer_mode": "pull",
        SEAL: seal(rules, num_tokens, Text(tokens, hashes(tokens), SCOPE)),
    }


def verdict(
    params: dict[str, Any],
    prompt: list[int] = TOKENS,
    rules: Rules = RULES,
    off: set[str] | None = None,
    scope: str = SCOPE,
) -> Any:
    try:
        return examine(params, rules, Text(prompt, hashes(prompt), scope), off or ())
    except RefusedError as error:
        return error.reason


@pytest.mark.parametrize("k", [1, 3, 4, 5, 8, 19, 20])
def test_any_cut_of_the_same_tokens_is_readable(k: int) -> None:
    assert verdict(handle(k)) == k
    assert verdict(handle(k), prompt=[*TOKENS, 1, 2, 3, 4, 5]) == k


@pytest.mark.parametrize("position", range(11))
def test_one_changed_token_is_refused(position: int) -> None:
    changed = TOKENS.copy()
    changed[position] += 1
    assert verdict(handle(11), prompt=changed) == "hash"
    assert verdict(handle(11), prompt=changed, off={"hash"}) == 11


def test_a_token_after_the_cut_does_not_matter() -> None:
    changed = TOKENS.copy()
    changed[11] += 1
    assert verdict(handle(11), prompt=changed) == 11


def test_a_shorter_prompt_is_refused() -> None:
    assert verdict(handle(11), prompt=TOKENS[:11]) == 11
    assert verdict(handle(11), prompt=TOKENS[:10]) == "counts"


@pytest.mark.parametrize(
    "scope", [("other", "adapter"), ("salt", "other"), ("salt", None), (None, "adapter")]
)
def test_another_salt_or_adapter_is_refused_though_no_full_block_is_covered(scope: tuple[str, str]) -> None:
    assert verdict(handle(3), scope=scope_digest(*scope)) == "hash"


def test_another_seed_is_refused_though_no_full_block_is_covered() -> None:
    assert verdict(handle(3, rules=Rules(4, 4, seed_digest(b"other")))) == "hash"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_block_ids", [[1, 2]]),
        ("remote_block_ids", [[1, 2, 3, 4]]),
        ("remote_block_ids", [[1, 2, 2]]),
        ("remote_block_ids", [[0, 1, 2]]),
        ("remote_block_ids", [[-1, 1, 2]]),
        ("remote_block_ids", [[1, 2, "3"]]),
        ("remote_block_ids", [[1, 2, 3], [4, 5, 6]]),
        ("remote_block_ids", []),
        ("remote_num_tokens", 12),
        ("remote_num_tokens", 10**12),
    ],
)
def test_counts_that_do_not_fit_are_refused(key: str, value: object) -> None:
    assert verdict(handle(11) | {key: value}) == "counts"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_block_ids", "abc"),
        ("remote_block_ids", [1, 2, 3]),
        ("remote_num_tokens", 0),
        ("remote_num_tokens", -3),
        ("remote_num_tokens", True),
        ("remote_num_tokens", "11"),
        ("remote_blocks_expiry_time", None),
        ("remote_blocks_expiry_time", float("nan")),
        ("remote_blocks_expiry_time", float("inf")),
        ("remote_blocks_expiry_time", float("-inf")),
        ("remote_blocks_expiry_time", True),
        ("remote_blocks_expiry_time", 10**400),
        ("remote_engine_id", None),
        ("remote_host", 5),
        ("remote_port", "1"),
        ("tp_size", None),
        ("transfer_mode", "push"),
        (SEAL, None),
        (SEAL, {}),
        (
            SEAL,
            {
                "num_tokens": 11,
                "block_size": 4,
                "hash_unit": 4,
                "seed": 1,
                "scope": "",
                "hash": "",
                "tail": [],
            },
        ),
    ],
)
@pytest.mark.parametrize("off", [set(), {"counts", "hash"}])
def test_fields_are_always_needed(key: str, value: object, off: set[str]) -> None:
    assert verdict(handle(11) | {key: value}, off=off) == "fields"


@pytest.mark.parametrize(
    "key",
    [
        "remote_block_ids",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "remote_request_id",
        "tp_size",
        SEAL,
    ],
)
def test_missing_fields_are_refused(key: str) -> None:
    params = handle(11)
    del params[key]
    assert verdict(params) == "fields"


def test_other_block_sizes_are_refused() -> None:
    assert verdict(handle(8), rules=Rules(8, 4, RULES.seed_digest)) == "counts"
