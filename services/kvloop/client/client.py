"""The client: turns and conversations, and tries of them."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Unpack

import grpc

from kvloop.client.calls import Calls, now
from kvloop.client.errors import CallFailed, broken_off, failed
from kvloop.client.events import Event, event_of
from kvloop.client.options import TurnOptions, generate_request
from kvloop.client.routers import Router
from kvloop.client.session import Session
from kvloop.v1alpha1 import router_service_pb2, turn_pb2


class Client(Calls):
    """A client of one fleet's routers."""

    async def turn(
        self,
        prompt_ids: Sequence[int],
        *,
        conversation_id: str = "",
        model: str = "",
        adapter: str = "",
        cache_salt: str = "",
        **options: Unpack[TurnOptions],
    ) -> AsyncGenerator[Event, None]:
        """Serve one turn: yield the answer as it comes, and its summary last. Closing early cancels.

        prompt_ids: the whole history. conversation_id: under which KV is found and kept; "" for neither.

        Raises CallFailed. Once tokens have come, a failure is final: to go on, send the prompt with the
        tokens so far.
        """
        request = generate_request(prompt_ids, options)
        request.conversation_id = conversation_id
        request.model = model
        request.adapter = adapter
        request.cache_salt = cache_salt
        async with aclosing(
            self.answer(
                lambda router, deadline: self._attempt(router, request, deadline), options.get("timeout_s")
            )
        ) as events:
            async for event in events:
                yield event

    def session(
        self, conversation_id: str, *, model: str = "", adapter: str = "", cache_salt: str = ""
    ) -> Session:
        """Return a session to be entered with `async with`: meanwhile what is held is held on."""
        return Session(
            self,
            router_service_pb2.SessionOpen(
                conversation_id=conversation_id, model=model, adapter=adapter, cache_salt=cache_salt
            ),
        )

    async def end(
        self, conversation_id: str, *, model: str = "", adapter: str = "", cache_salt: str = ""
    ) -> bool:
        """Let go of what is held for a conversation; False when nothing was. Raises CallFailed."""
        request = router_service_pb2.EndConversationRequest(
            conversation_id=conversation_id, model=model, adapter=adapter, cache_salt=cache_salt
        )
        answer = await self.ask(
            lambda router, left_s: router.stub.EndConversation(
                request, timeout=left_s, metadata=self.metadata
            )
        )
        return answer.released

    async def get(
        self, conversation_id: str, *, model: str = "", adapter: str = "", cache_salt: str = ""
    ) -> turn_pb2.LeaseInfo | None:
        """Return what is held for a conversation, or None. Raises CallFailed."""
        request = router_service_pb2.GetConversationRequest(
            conversation_id=conversation_id, model=model, adapter=adapter, cache_salt=cache_salt
        )
        try:
            answer = await self.ask(
                lambda router, left_s: router.stub.GetConversation(
                    request, timeout=left_s, metadata=self.metadata
                )
            )
        except CallFailed as failure:
            if failure.reason == "CONVERSATION_NOT_FOUND":
                return None
            raise
        return answer.lease

    async def explain(self, request_id: str) -> router_service_pb2.ExplainTurnResponse:
        """Return why a recent turn of the router in use went the way it went. Raises CallFailed."""
        request = router_service_pb2.ExplainTurnRequest(request_id=request_id)
        return await self.ask(
            lambda router, left_s: router.stub.ExplainTurn(request, timeout=left_s, metadata=self.metadata)
        )

    async def _attempt(
        self, router: Router, request: router_service_pb2.GenerateRequest, deadline: float
    ) -> AsyncGenerator[Event, None]:
        call = router.stub.Generate(request, timeout=deadline - now(), metadata=self.metadata)
        ended = False
        try:
            async for response in call:
                ended = response.HasField("summary")
                yield event_of(response)
        except grpc.aio.AioRpcError as error:
            raise failed(error, router.target) from None
        finally:
            call.cancel()
        if not ended:
            raise broken_off(router.target)
