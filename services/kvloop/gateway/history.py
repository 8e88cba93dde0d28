"""The gateway's use of the segment cache: rendering chats, and remembering what was generated."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from kvloop.gateway import compat, exchange
from kvloop.gateway.exchange import Exchange
from kvloop.gateway.metrics import Metrics
from kvloop.gateway.segments import SegmentCache
from kvloop.gateway.settings import GatewaySettings
from kvloop.runtime import logs
from kvloop.v1alpha1 import turn_pb2

_log = logs.get("gateway")

# What borders of pieces could get wrong: white space, digits, marks and special tokens on either side.
_PROBES = (
    "{0}system\nBe brief. {1}\n{0}user\n 12345 + 67890 =  ?\n\n{1}\n{0}assistant\n",
    "{0}{1}{0} {1} x{0}x {1}\n\n{0}\t{1}",
    "a{0}bé中文😀{1}‍e\u0301 {0}\r\n{1}",
)


class History:
    """Renders chats through the cache while it is proven to give the tokenizer's own ids."""

    def __init__(self, renderer: Any, settings: GatewaySettings, metrics: Metrics) -> None:
        """Take the renderer; `start` hooks into it."""
        self._renderer = renderer
        self._metrics = metrics
        self._exact = settings.exact_history
        self._check_every = settings.render_check_every
        self._rendered = 0
        self._encode = compat.plain_encoder(renderer)
        self._cache: SegmentCache | None = None
        specials = compat.special_tokens(renderer) if settings.render_cache_bytes else None
        if specials:
            self._specials = frozenset(specials.values())
            self._cache = SegmentCache(
                specials,
                max_bytes=settings.render_cache_bytes,
                tenant_bytes=settings.render_cache_tenant_bytes,
            )

    @property
    def active(self) -> bool:
        """Return whether chats go through the cache."""
        return self._cache is not None

    async def start(self) -> None:
        """Try the cache on texts that would tell, and hook it into the renderer if it passes."""
        if self._cache is None:
            _log.info("render_cache_off", why="switched off, or pieces depend on each other")
            return
        names = sorted(compat.special_tokens(self._renderer) or ())
        marks = (names + names)[:2]
        for probe in _PROBES:
            text = probe.format(*marks)
            rendering = await self._cache.render("", text, self._encode_pieces)
            if rendering.ids != (await self._encode_pieces([text]))[0]:
                self._give_up("probe")
                return
        compat.hook_tokenizer(self._renderer, self.render)

    async def render(self, text: str, whole: Callable[[], Awaitable[list[int]]]) -> list[int]:
        """Return the ids of a chat; whole: the tokenizer's own, all at once."""
        if self._cache is None:
            return await whole()
        here = exchange.current()
        rendering = await self._cache.render(here.tenant if here else "", text, self._encode_pieces)
        self._metrics.rendered(rendering, self._cache.size_bytes)
        self._rendered += 1
        if self._check_every and self._rendered % self._check_every == 0 and not rendering.restored_tokens:
            ids = await whole()
            if len(ids) >= len(rendering.ids) and ids != rendering.ids:
                self._give_up("check")
                return ids
        if here is not None:
            here.rendering = rendering
        return rendering.ids

    def remember(self, here: Exchange, ids: list[int], text: str, summary: turn_pb2.Summary) -> None:
        """Keep the ids that a turn generated for when its text comes back."""
        if self._cache is None or not self._exact or here.rendering is None:
            return
        kept, exact = self._spoken(ids, text, summary)
        self._cache.remember(here.tenant, here.rendering, exact, kept)

    def _spoken(self, ids: list[int], text: str, summary: turn_pb2.Summary) -> tuple[list[int], str]:
        """Return the ids that stay in the history, and exactly their text.

        The special token that ended the answer is the template's to write. A stop string was generated but
        never shown; the ids before it stay where the cut falls between two ids.
        """
        end = len(ids)
        if end and ids[-1] in self._specials:
            end -= 1
        exact = compat.decode_exactly(self._renderer, ids[:end])
        stopped = summary.HasField("stop_reason") and not summary.stop_reason.isdecimal()
        while stopped and end and len(exact) > len(text):
            end -= 1
            exact = compat.decode_exactly(self._renderer, ids[:end])
        return ids[:end], exact

    async def _encode_pieces(self, texts: list[str]) -> list[list[int]]:
        loop = asyncio.get_running_loop()
        pool = compat.executor_of(self._renderer)
        return await loop.run_in_executor(pool, functools.partial(self._encode, texts))

    def _give_up(self, where: str) -> None:
        _log.error("render_cache_disagrees", where=where)
        self._cache = None
