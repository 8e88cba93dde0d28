"""Every row of the catalogue has a test, and what a run writes is checked field by field."""

import ast
from pathlib import Path

from catalogue import FIELDS, IDS, shortcomings

WHOLE = {
    "id": "A1",
    "expected": "READBACK",
    "verdict": "READBACK",
    "reason": "PROVEN",
    "bytes_read": 1,
    "mechanism_ok": True,
    "tokens_equal_cold": True,
    "second_equal_cold": True,
    "engines_alive": True,
    "free_blocks_before": {"d1": 5},
    "free_blocks_after": {"d1": 5},
    "ms": 1.5,
}


def marked(file: Path) -> set[str]:
    """Return the ids in a file's case markers."""
    calls = [
        node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    ]
    markers = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "case"]
    return {one for marker in markers for one in str(ast.literal_eval(marker.args[0])).split()} - {"bad"}


def test_every_row_has_a_test() -> None:
    ids = set().union(*(marked(file) for file in Path(__file__).parent.glob("test_*.py")))
    assert ids == set(IDS)


def test_whole_records_pass() -> None:
    cases = [WHOLE | {"id": one} for one in IDS]
    assert shortcomings({"vllm": "0.29.0", "cases": cases}) == []


def test_what_is_missing_is_told() -> None:
    for field in FIELDS:
        cases = [{key: value for key, value in WHOLE.items() if key != field}]
        assert shortcomings({"vllm": "x", "cases": cases}) != [f"{one}: not there" for one in IDS[1:]]
    assert "no vllm version" in shortcomings({"cases": []})
    for wrong in ({"tokens_equal_cold": False}, {"free_blocks_after": {"d1": 4}}, {"verdict": None}):
        assert any(text.startswith("A1:") for text in shortcomings({"vllm": "x", "cases": [WHOLE | wrong]}))
