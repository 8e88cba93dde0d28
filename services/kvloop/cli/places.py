"""Defaults that several commands share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloop.cli.errors import CommandFailed

ROUTER = "127.0.0.1:7600"
GATEWAY = "127.0.0.1:8000"
CHAT = "127.0.0.1:7700"
SMOLLM2 = "smollm2"


def tokenizer_place(model: str) -> str:
    """Return where a served model's tokenizer is: its own folder or name; SmolLM2's without a name.

    Raises CommandFailed when SmolLM2 is meant and was not fetched.
    """
    return str(smollm2_checkpoint()) if model in ("", SMOLLM2) else model


def smollm2_checkpoint() -> Path:
    """Return SmolLM2's folder. Raises CommandFailed when it was not fetched."""
    from kvloop.engine.settings import smollm2_dir

    folder = smollm2_dir()
    if not (folder / "config.json").is_file():
        raise CommandFailed(f"SmolLM2 is not at {folder} yet; run: kvloop model fetch smollm2")
    return folder


def check_model(engine: Mapping[str, Any]) -> None:
    """Raise CommandFailed when engine settings mean a SmolLM2 that was not fetched."""
    if engine.get("engine", "vllm") == "vllm" and engine.get("model", SMOLLM2) == SMOLLM2:
        smollm2_checkpoint()
