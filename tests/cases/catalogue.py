"""The catalogue of never-wrong cases, and the check of what a run on vLLM wrote about them.

Run as a script: catalogue.py out/cases.json; exits with 1 and says what is missing or wrong.
"""

import json
import sys
from pathlib import Path
from typing import Any

_SIZES = {"A": 12, "B": 7, "C": 6, "D": 5, "E": 7, "F": 12, "G": 5, "H": 4}
IDS = tuple(f"{letter}{number}" for letter, size in _SIZES.items() for number in range(1, size + 1))
"""A: what of a history is read; B: how turns end; C: whose KV it is; D: many readers; E: time; F: faults and
lies; G: pressure; H: DIRECT."""

FIELDS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "expected": str,
    "verdict": str,
    "reason": str,
    "bytes_read": int,
    "mechanism_ok": bool,
    "tokens_equal_cold": bool,
    "second_equal_cold": bool,
    "engines_alive": bool,
    "free_blocks_before": dict,
    "free_blocks_after": dict,
    "ms": float,
}
_TRUE = ("mechanism_ok", "tokens_equal_cold", "second_equal_cold", "engines_alive")


def shortcomings(written: dict[str, Any]) -> list[str]:
    """Return what is missing from, or wrong in, the content of cases.json."""
    found = [] if written.get("vllm") else ["no vllm version"]
    cases = written.get("cases", [])
    for case in cases:
        name = case.get("id", "?")
        found += [
            f"{name}: {field}" for field, kind in FIELDS.items() if not isinstance(case.get(field), kind)
        ]
        found += [f"{name}: {field} is false" for field in _TRUE if case.get(field) is False]
        if case.get("free_blocks_before") != case.get("free_blocks_after"):
            found.append(f"{name}: blocks are missing")
    present = {case.get("id") for case in cases}
    return found + [f"{one}: not there" for one in IDS if one not in present]


if __name__ == "__main__":
    problems = shortcomings(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.write("\n".join(problems or [f"{sys.argv[1]}: every case is there, and every field"]) + "\n")
    sys.exit(bool(problems))
