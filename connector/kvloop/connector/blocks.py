"""Copies of KV blocks within one engine's memory."""

from typing import Any

import torch

from kvloop.connector import compat


class BlockCopier:
    """Copies KV blocks within one engine, on the stream that computes."""

    def __init__(self, worker: Any) -> None:
        """Take a worker that has registered its KV caches. Raises ValueError when they are elsewhere."""
        self._per_logical = compat.kernel_blocks(worker)
        self._regions = []
        storages = {
            storage.data_ptr(): storage
            for cache in worker.device_kv_caches.values()
            for storage in [cache.untyped_storage()]
        }
        for address, stride, length in compat.block_regions(worker):
            start, storage = next(
                (
                    (start, storage)
                    for start, storage in storages.items()
                    if start <= address < start + storage.nbytes()
                ),
                (0, None),
            )
            if storage is None:
                raise ValueError("KV is transferred from other memory than it is computed in")
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._regions.append((flat, address - start, stride, length))

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another, all layers."""
        for part in range(self._per_logical):
            old, new = source * self._per_logical + part, target * self._per_logical + part
            for flat, offset, stride, length in self._regions:
                to, off = offset + new * stride, offset + old * stride
                flat[to : to + length].copy_(flat[off : off + length])
