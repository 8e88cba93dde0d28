"""Handles that lie, and the guard that finds out: what each lie runs into."""

from typing import Any

import pytest

from kvloop.connector import guard
from kvloop.connector.hooks import SPOILS, Spoil, spoiled

BLOCK = 4
RULES = guard.Rules(BLOCK, BLOCK, "seed")
TEXT = guard.Text(list(range(10, 20)), [bytes([n]) * 8 for n in range(2)], "scope")


def handle() -> dict[str, Any]:
    return {
        "remote_engine_id": "d",
        "remote_request_id": "lease#read",
        "remote_host": "127.0.0.1",
        "remote_port": 5,
        "tp_size": 1,
        "remote_num_tokens": 10,
        "remote_block_ids": [[7, 8, 9]],
        "remote_blocks_expiry_time": 5.0,
        "transfer_mode": "pull",
        guard.SEAL: guard.seal(RULES, 10, TEXT),
    }


def test_an_honest_handle_passes() -> None:
    assert guard.examine(handle(), RULES, TEXT) == 10


@pytest.mark.parametrize(("how", "reason"), [("short", "counts"), ("twice", "counts"), ("other", "hash")])
def test_lies_are_found_out(how: Spoil, reason: str) -> None:
    before = handle()
    lie = spoiled(before, how)
    assert before == handle()
    with pytest.raises(guard.RefusedError) as raised:
        guard.examine(lie, RULES, TEXT)
    assert raised.value.reason == reason
    guard.examine(lie, RULES, TEXT, off={reason})


def test_a_block_that_does_not_exist_is_the_workers_to_find() -> None:
    lie = spoiled(handle(), "range")
    assert guard.examine(lie, RULES, TEXT) == 10
    assert max(lie["remote_block_ids"][0]) > 1_000_000


def test_another_host_is_its_front_ends_to_find() -> None:
    before = handle()
    lie = spoiled(before, "elsewhere")
    assert guard.examine(lie, RULES, TEXT) == 10
    assert {key for key in lie if lie[key] != before[key]} == {"remote_host"}
    assert {"short", "twice", "other", "range", "elsewhere"} == SPOILS
