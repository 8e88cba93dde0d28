"""Sessions: a conversation's KV is held for as long as its agent is there."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Unpack

from kvloop.client.events import Event
from kvloop.client.holding import Holding
from kvloop.client.options import TurnOptions
from kvloop.client.routers import Router
from kvloop.v1alpha1 import router_service_pb2

if TYPE_CHECKING:
    from kvloop.client.client import Client


class Session(Holding):
    """A conversation of token ids, held."""

    def __init__(self, client: "Client", opening: router_service_pb2.SessionOpen) -> None:
        """Use Client.session."""
        super().__init__(client)
        self._turns = client
        self._opening = opening

    @property
    def conversation_id(self) -> str:
        """Return the conversation's name."""
        return self._opening.conversation_id

    async def turn(
        self, prompt_ids: Sequence[int], **options: Unpack[TurnOptions]
    ) -> AsyncGenerator[Event, None]:
        """Serve one turn of this conversation, as Client.turn does. Raises CallFailed."""
        opening = self._opening
        events = self._turns.turn(
            prompt_ids,
            conversation_id=opening.conversation_id,
            model=opening.model,
            adapter=opening.adapter,
            cache_salt=opening.cache_salt,
            **options,
        )
        async with aclosing(events):
            async for event in events:
                yield event

    def _stream_at(self, router: Router) -> Any:
        return router.stub.Session(metadata=self._client.metadata)

    def _opening_request(self) -> router_service_pb2.SessionRequest:
        return router_service_pb2.SessionRequest(open=self._opening)

    def _closing_request(self) -> router_service_pb2.SessionRequest:
        return router_service_pb2.SessionRequest(close=router_service_pb2.SessionClose())

    async def _let_go(self) -> bool:
        opening = self._opening
        return await self._turns.end(
            opening.conversation_id,
            model=opening.model,
            adapter=opening.adapter,
            cache_salt=opening.cache_salt,
        )
