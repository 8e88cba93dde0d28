"""What is held for a conversation, and letting go of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvloop.metastore.port import DirectoryUnavailable, Found
from kvloop.router.discovery import usable_endpoint
from kvloop.router.identity import Owner
from kvloop.router.legs import DecodeLink, LegFailed
from kvloop.router.steps import check_salt
from kvloop.router.turn import Tools
from kvloop.router.worker import DecodeWorker
from kvloop.runtime.checks import check_conversation_id
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.v1alpha1 import lease_pb2, router_service_pb2, turn_pb2

_RELEASE_TIMEOUT_S = 5.0

Asked = (
    router_service_pb2.EndConversationRequest
    | router_service_pb2.GetConversationRequest
    | router_service_pb2.SessionOpen
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Where leases of a conversation may be: while a model is served in two revisions, in either."""

    scopes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    scope: bytes
    entry: lease_pb2.DirectoryEntry
    remaining_s: float
    holder: DecodeWorker | None

    @property
    def lost(self) -> bool:
        """The worker has restarted since."""
        info = self.holder.info if self.holder is not None else None
        return info is not None and info.epoch != self.entry.epoch


async def get(
    request: router_service_pb2.GetConversationRequest, tenant: str, tools: Tools
) -> router_service_pb2.GetConversationResponse:
    """Return the newest lease. Failures: CONVERSATION_NOT_FOUND, DIRECTORY_UNAVAILABLE, as for Generate."""
    held = [h for h in await _find(of(request, tenant, tools), tools) if h.entry.held and not h.lost]
    if not held:
        raise Failure(Reason.ERROR_REASON_CONVERSATION_NOT_FOUND, "nothing is held for the conversation")
    newest = max(held, key=lambda h: h.entry.turn_start_us)
    lease = turn_pb2.LeaseInfo(
        lease_id=newest.entry.lease_id,
        num_tokens=newest.entry.num_tokens,
        decode_worker=newest.holder.name if newest.holder is not None else newest.entry.decode_endpoint,
    )
    lease.remaining_time.FromMilliseconds(int(newest.remaining_s * 1000))
    return router_service_pb2.GetConversationResponse(lease=lease)


async def end(
    request: router_service_pb2.EndConversationRequest, tenant: str, tools: Tools
) -> router_service_pb2.EndConversationResponse:
    """Release the lease where it is held. Failures: DIRECTORY_UNAVAILABLE, as for Generate."""
    released = await release(of(request, tenant, tools), tools)
    return router_service_pb2.EndConversationResponse(released=released)


def of(request: Asked, tenant: str, tools: Tools) -> Conversation:
    """Return the conversation that a request names. Failures as for Generate."""
    if not request.conversation_id:
        raise invalid("conversation_id", "must not be empty")
    check_conversation_id(request.conversation_id)
    check_salt(request.cache_salt)
    revisions = {served.revision: served for served in tools.pool.versions(request.model, request.adapter)}
    return Conversation(
        tuple(
            tools.identities.scope(
                Owner(tenant, served.name, served.revision, served.adapter, request.cache_salt),
                request.conversation_id,
            )
            for served in revisions.values()
        )
    )


async def release(conversation: Conversation, tools: Tools) -> bool:
    """Release what is held for a conversation; False when nothing was. Failures: DIRECTORY_UNAVAILABLE."""
    released = await asyncio.gather(*(_release(h, tools) for h in await _find(conversation, tools)))
    return any(released)


async def _release(held: _Held, tools: Tools) -> bool:
    async with _reach(held, tools) as link:
        try:
            if link is not None:
                return await link.release_lease(held.entry.lease_id, held.scope, _RELEASE_TIMEOUT_S)
        except LegFailed as failed:
            if failed.answered and not failed.lease_missing:
                raise failed.failure from None
    # The holder is gone or has forgotten; only the hint is left.
    try:
        removed = await tools.directory.remove(held.scope, held.entry.lease_id)
    except DirectoryUnavailable:
        raise _unavailable() from None
    return removed and not held.lost


@asynccontextmanager
async def _reach(held: _Held, tools: Tools) -> AsyncIterator[DecodeLink | None]:
    """Yield a link to the holder, or None when it is gone. Failures: DIRECTORY_UNAVAILABLE."""
    if held.holder is not None and not held.lost:
        yield held.holder.link
        return
    # A router that has just started, or knows only some of the workers, or what one was before it restarted,
    # still finds it in the registry. The entry's own address is not trusted: whoever gets a call gets this
    # router's token with it.
    endpoint = await _announced(held.entry.epoch, tools)
    if endpoint is None:
        yield None
        return
    link = tools.pool.decode_link(endpoint)
    try:
        yield link
    finally:
        await link.close()


async def _announced(epoch: str, tools: Tools) -> str | None:
    if tools.registry is None:
        return None
    try:
        async with asyncio.timeout(_RELEASE_TIMEOUT_S):
            workers = await tools.registry.workers()
    except (DirectoryUnavailable, TimeoutError):
        raise _unavailable() from None
    named = (w.endpoint for w in workers.values() if w.role == "decode" and w.epoch == epoch)
    return next((endpoint for text in named if (endpoint := usable_endpoint(text)) is not None), None)


async def _find(conversation: Conversation, tools: Tools) -> list[_Held]:
    scopes = conversation.scopes
    try:
        async with asyncio.timeout(_RELEASE_TIMEOUT_S):
            found = await asyncio.gather(*(tools.directory.lookup(scope) for scope in scopes))
    except (DirectoryUnavailable, TimeoutError):
        raise _unavailable() from None
    return [
        _held(scope, one, tools) for scope, one in zip(scopes, found, strict=True) if one.entry is not None
    ]


def _held(scope: bytes, found: Found, tools: Tools) -> _Held:
    assert found.entry is not None
    entry = found.entry
    return _Held(scope, entry, found.remaining_s, tools.pool.holder(entry.decode_endpoint, entry.epoch))


def _unavailable() -> Failure:
    return Failure(
        Reason.ERROR_REASON_DIRECTORY_UNAVAILABLE, "the directory does not answer", retry_after_s=1.0
    )
