"""Which group of workers a turn belongs to, while several serve its model.

Before anything is known of its history, its name decides (WorkerPool.resolve), so that every router thinks of
the same group. What the directory then knows counts for more: a conversation stays with the group that holds
it for as long as that can go on. A lease is found under any revision of the model; groups of one revision
share their names.
"""

import secrets
from dataclasses import replace

from kvloop.metastore.port import PrefixFound
from kvloop.router.groups import Served
from kvloop.router.identity import Owner
from kvloop.router.turn import Tools, Turn
from kvloop.runtime.digests import Prefixes
from kvloop.v1alpha1 import router_service_pb2

_RANDOM_BYTES = 8


def key(request: router_service_pb2.GenerateRequest, tenant: str, tools: Tools) -> bytes:
    """Return what decides where a turn belongs that nobody holds anything of: the same on every router."""
    if not request.conversation_id:
        return secrets.token_bytes(_RANDOM_BYTES)
    owner = Owner(tenant, "", "", request.adapter, request.cache_salt)
    return tools.identities.scope(owner, request.conversation_id)


def owners(turn: Turn, tools: Tools) -> list[Owner]:
    """Return as whose the turn's history may be known: its own, and those under other revisions."""
    others = {served.revision for served in tools.pool.siblings(turn.served)} - {turn.owner.revision}
    return [turn.owner, *(replace(turn.owner, revision=revision) for revision in sorted(others))]


def join(turn: Turn, tools: Tools, found: PrefixFound, owner: Owner) -> bool:
    """Have the group that holds what was found serve the turn, if it can go on; False if it is of no use.

    owner: as whose it was found.
    """
    group = _holding(turn, tools, found)
    if group is not None and group.revision == owner.revision:
        turn.served = group
        if owner != turn.owner:
            _rename(turn, tools, owner)
    return owner == turn.owner


def _holding(turn: Turn, tools: Tools, found: PrefixFound) -> Served | None:
    groups, entry = tools.pool.siblings(turn.served), found.found.entry
    if len(groups) == 1 or entry is None:
        return None
    worker = tools.pool.holder(entry.decode_endpoint, entry.epoch)
    if worker is None or worker.info is None or worker.info.epoch != entry.epoch:
        return None
    group = next((group for group in groups if group.fits(worker.info)), None)
    return group if group is not None and _takes(group, turn.served) and tools.pool.keeps(group) else None


def _takes(group: Served, admitted: Served) -> bool:
    """Tell whether a group takes whatever was let in for another one."""
    return (
        group.max_model_len >= admitted.max_model_len
        and group.vocab_size == admitted.vocab_size
        and group.default_max_tokens == admitted.default_max_tokens
    )


def _rename(turn: Turn, tools: Tools, owner: Owner) -> None:
    request, former = turn.request, turn.scope
    turn.owner = owner
    turn.scope = tools.identities.turn_scope(owner, former.conversation_id)
    if not former.conversation_id:
        turn.scope.scope = former.scope
    turn.prefixes = Prefixes(turn.scope.digest_key, turn.prompt)
    turn.home = tools.identities.scope(owner, request.parent_conversation_id or request.conversation_id)
