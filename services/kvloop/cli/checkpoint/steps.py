"""What the steps of a fetch share: how they fail and how they tell where they are."""

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (step, done, total); each step ends with done == total. Units are the step's own."""


class CheckpointError(Exception):
    """A checkpoint can't be had; the text says what to do."""
