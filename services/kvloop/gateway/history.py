"""The gateway's use of the segment cache: rendering chats, and remembering what was generated."""

import asyncio
import bisect
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from kvloop.gateway import exchange, tokenizing
from kvloop.gateway.metrics import Metrics
from kvloop.gateway.segments import Rendering, SegmentCache
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

_TOKENS_A_CHARACTER = 4
"""A character has at most four bytes, and a token that shows anything at least one."""


class History:
    """Renders chats through the cache while it is proven to give the tokenizer's own ids."""

    def __init__(self, renderer: Any, settings: GatewaySettings, metrics: Metrics) -> None:
        """Take the renderer; `start` hooks into it."""
        self._renderer = renderer
        self._metrics = metrics
        self._exact = settings.exact_history
        self._check_every = settings.render_check_every
        self._rendered = 0
        self._encode = tokenizing.plain_encoder(renderer)
        self._cache: SegmentCache | None = None
        specials = tokenizing.special_tokens(renderer) if settings.render_cache_bytes else None
        if specials:
            self._specials = frozenset(specials.values())
            self._hidden = tokenizing.hidden_tokens(renderer)
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
        names = sorted(tokenizing.special_tokens(self._renderer) or ())
        marks = (names + names)[:2]
        for probe in _PROBES:
            text = probe.format(*marks)
            rendering = await self._cache.render("", text, self._encode_pieces)
            if rendering.ids != (await self._encode_pieces([text]))[0]:
                self._give_up("probe")
                return
        tokenizing.hook_tokenizer(self._renderer, self.render)

    async def render(self, text: str, whole: Callable[[], Awaitable[list[int]]]) -> list[int]:
        """Return the ids of a chat; whole: the tokenizer's own, all at once."""
        cache = self._cache
        if cache is None:
            return await whole()
        here = exchange.current()
        rendering = await cache.render(here.tenant if here else "", text, self._encode_pieces)
        self._metrics.rendered(rendering, cache.size_bytes)
        self._rendered += 1
        if self._check_every and self._rendered % self._check_every == 0 and not rendering.restored_tokens:
            ids = await whole()
            if len(ids) >= len(rendering.ids) and ids != rendering.ids:
                self._give_up("check")
                return ids
        if here is not None:
            here.rendering = rendering
        return rendering.ids

    def accept(self, tenant: str) -> None:
        """Take a tenant for one: a router has answered a turn of it."""
        if self._cache is not None:
            self._cache.accept(tenant)

    def remember(
        self,
        tenant: str,
        rendering: Rendering,
        ids: list[int],
        text: str,
        summary: turn_pb2.Summary,
        *,
        hides: bool,
    ) -> None:
        """Keep the ids that a turn generated for when its text comes back.

        rendering: of the turn's prompt. text: what was shown; hides: without special tokens.
        """
        if self._cache is None or not self._exact:
            return
        kept = ids[:-1] if ids and ids[-1] in self._specials else ids
        if summary.HasField("stop_reason") and not summary.stop_reason.isdecimal():
            kept = self._without_stop(kept, text, hides=hides)
        self._cache.remember(tenant, rendering, tokenizing.decode(self._renderer, kept), kept)

    def _without_stop(self, ids: list[int], text: str, *, hides: bool) -> list[int]:
        """Return the ids that show at most the text.

        A stop string was generated but never shown; the ids before it stay where the cut falls between two.
        """
        surplus = len(tokenizing.decode(self._renderer, ids, hides=hides)) - len(text)
        if surplus <= 0:
            return ids
        # The cut is somewhere in so many last tokens; what is before them need not be decoded again.
        base, showing = len(ids), 0
        while base and showing < _TOKENS_A_CHARACTER * (surplus + 1):
            base -= 1
            showing += not (hides and ids[base] in self._hidden)

        def shown(end: int) -> int:
            return len(tokenizing.decode(self._renderer, ids[base:end], hides=hides))

        limit = shown(len(ids)) - surplus
        end = bisect.bisect_right(range(base, len(ids) + 1), limit, key=shown) - 1 + base
        # Those between the text and the stop string were not shown either.
        while hides and end and ids[end - 1] in self._hidden:
            end -= 1
        return ids[: max(0, end)]

    async def _encode_pieces(self, texts: list[str]) -> list[list[int]]:
        loop = asyncio.get_running_loop()
        pool = tokenizing.executor_of(self._renderer)
        return await loop.run_in_executor(pool, functools.partial(self._encode, texts))

    def _give_up(self, where: str) -> None:
        _log.error("render_cache_disagrees", where=where)
        self._cache = None
