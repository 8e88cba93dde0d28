"""LoRA adapters: loaded before anything is served, so that what serves is what was compared.

vLLM would read an adapter's files at its first request, and again after making room for others. Files that
were replaced meanwhile would then serve under the identity of those that lay there at the start.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloop.runtime.errors import Failure, Reason


class Adapters:
    """The adapters of one engine, by name."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = dict(paths)
        self.contents: dict[str, str] = {}
        """Name -> digest of the files that were loaded."""

    def request(self, name: str) -> Any:
        """Return vLLM's request for an adapter, None for "". Raises MODEL_NOT_FOUND."""
        if not name:
            return None
        if name not in self._paths:
            raise Failure(Reason.ERROR_REASON_MODEL_NOT_FOUND, "no such adapter is served")
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, list(self._paths).index(name) + 1, self._paths[name])

    async def load(self, llm: Any) -> None:
        """Load every adapter from its files, whatever was loaded before.

        Raises WORKER_FAILED when files change meanwhile, and what vLLM raises.
        """
        loaded: dict[str, str] = {}
        for name, path in self._paths.items():
            request = self.request(name)
            before = await asyncio.to_thread(content, path)
            # One that is there already would stay.
            await llm.remove_lora(request.lora_int_id)
            added = await llm.add_lora(request)
            if not added or await asyncio.to_thread(content, path) != before:
                raise Failure(
                    Reason.ERROR_REASON_WORKER_FAILED,
                    f"adapters: {name} was not loaded whole, or its files changed meanwhile; load it again",
                )
            loaded[name] = before
        self.contents = loaded


def content(path: str) -> str:
    """Return the digest of an adapter's files, found where vLLM finds them; "" when there are none.

    vLLM's block hashes know an adapter by its name, from 0.32 on by its name and path.
    """
    from vllm.lora.utils import get_adapter_absolute_path

    folder = Path(get_adapter_absolute_path(path))
    digest = hashlib.sha256()
    files = sorted(file for file in folder.glob("*") if file.is_file()) if folder.is_dir() else []
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:32] if files else ""
